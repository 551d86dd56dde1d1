"""File descriptors that travel beside the bytes of a Unix socket."""

from __future__ import annotations

import os
import socket
from array import array
from collections import deque
from typing import Final

from rpcdist.errors import ProtocolViolation
from rpcdist.transport.shared_memory import Segment

Ancillary = list[tuple[int, int, bytes]]

_INT_BYTES: Final = array("i").itemsize
MAX_DESCRIPTORS: Final = 16
"""That wait for the message which came with them."""
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES) if hasattr(socket, "CMSG_SPACE") else 0
CUT_OFF: Final = int(getattr(socket, "MSG_CTRUNC", 0))
"""As plain numbers: the enum that `socket` has them in costs more than the system call."""
CLOSE_ON_EXEC: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class ReceivedDescriptors:
    """Those that came and that nobody has taken yet; used by whoever reads.

    Args:
        address: of the peer, for messages.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._waiting: deque[int | None] = deque()  # None: this process may have no more

    def add(self, ancillary: Ancillary, flags: int) -> None:
        """Takes what `recvmsg` returned. Raises `ProtocolViolation` for more than the peer may pass."""
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._waiting.extend(array("i", data[: len(data) // _INT_BYTES * _INT_BYTES]))
        if not ancillary:  # cut off: the kernel could not give the descriptor a number here
            self._waiting.append(None)
        elif flags & CUT_OFF:
            raise ProtocolViolation(f"{self._address} passes more descriptors than it may")
        if len(self._waiting) > MAX_DESCRIPTORS:
            raise ProtocolViolation(f"{self._address} passes descriptors that it does not announce")

    def take(self) -> int | None:
        """The next one, for the caller to close; None if this process had no room for it."""
        if not self._waiting:
            raise ProtocolViolation(f"{self._address} offers memory without a descriptor")
        return self._waiting.popleft()

    def close(self) -> None:
        """Closes those that nobody took."""
        while self._waiting:
            if (descriptor := self._waiting.popleft()) is not None:
                os.close(descriptor)


def rights(segment: Segment) -> Ancillary:
    """What `sendmsg` needs to pass the descriptor of a segment."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [segment.fileno()]).tobytes())]
