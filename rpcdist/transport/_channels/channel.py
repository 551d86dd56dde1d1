"""The interfaces between a session and its channel, and the channels that this process may use.

A channel carries whole envelopes in both directions, in order. `RPCDIST_CHANNELS` selects the channels.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from rpcdist.errors import ConfigError
from rpcdist.inspection import ChannelFacts
from rpcdist.transport.unix_sockets import has_abstract_sockets


class ReadChannel(Protocol):
    """Carries the envelopes of one session, which a task on the I/O loop reads and writes.

    Attributes:
        facts: the channel's kind and traffic; the session adds the rest.
    """

    @property
    def facts(self) -> ChannelFacts: ...

    async def read(self) -> bytes | None:
        """The next envelope; None if the peer closed the channel. Raises `TransportError` if it broke."""

    async def write(self, data: bytes) -> None:
        """Sends an envelope; returns when the channel can take more. Raises `TransportError` if it broke."""

    def abort(self, reason: str) -> None:
        """Ends the channel at once; pending reads and writes fail. Idempotent."""


class FrameReceiver(Protocol):
    """Receives the frames that a `SocketChannel` reads, on the I/O loop or on a waiting thread, one thread at a time.

    An exception that the receiver raises ends the channel.
    """

    def receive(self, data: bytes | bytearray) -> None:
        """Called when an envelope has arrived."""

    def place(self, transfer: int, buffer: int, offset: int, size: int) -> memoryview | None:
        """The memory into which the channel receives a chunk; None if the transfer was aborted."""

    def placed(self, transfer: int, buffer: int, size: int) -> None:
        """Called when the bytes of a chunk are in place."""


CHANNELS_VARIABLE: Final = "RPCDIST_CHANNELS"
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")


def allowed_channels() -> frozenset[str]:
    """The raw channels that sessions may use: those that `RPCDIST_CHANNELS` allows and that this system has.

    "local" are Unix sockets, between processes of one user on one host; the other one is "tcp". gRPC is always
    available.

    Raises:
        ConfigError: the variable has an unknown value.
    """
    text = os.environ.get(CHANNELS_VARIABLE, "auto")
    if text not in ("auto", "local", "tcp", "grpc"):
        raise ConfigError(f"{CHANNELS_VARIABLE} must be 'auto', 'local', 'tcp' or 'grpc', but it is {text!r}")
    allowed = {"local", "tcp"} if text == "auto" else {text} - {"grpc"}
    if not has_abstract_sockets() or _has_overflow_id():
        allowed.discard("local")
    return frozenset(allowed)


def _has_overflow_id() -> bool:
    """Whether this user's id is also the one that the kernel shows for every user outside the user namespace."""
    try:
        return int(_OVERFLOW_UID.read_text()) == os.getuid()
    except (OSError, ValueError):
        return False
