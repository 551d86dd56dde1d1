"""Calls to oneself: the same messages, without a connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rpcdist._proto import rpc_pb2
from rpcdist.ids import Identity
from rpcdist.transport.session import IncomingBuffer, OutgoingBuffer

__all__ = ["Loopback"]


class Loopback:
    """Has the parts of `Session` that the RPC layer uses. Values are copied as on the way to any other worker."""

    closed_reason = None

    def __init__(
        self,
        identity: Identity,
        allocate: Callable[[int], IncomingBuffer],
        deliver: Callable[[Loopback, list[tuple[rpc_pb2.Message, list[IncomingBuffer]]]], None],
    ) -> None:
        self.peer = identity
        self._allocate = allocate
        self._deliver = deliver

    def __repr__(self) -> str:
        return f"<Loopback of {self.peer.name}>"

    @property
    def last_received(self) -> float:
        return time.monotonic()

    def send(self, message: rpc_pb2.Message, buffers: Sequence[OutgoingBuffer] = ()) -> int:
        received = []
        for buffer in buffers:
            copy = self._allocate(len(buffer.view))
            copy.view[:] = buffer.view
            received.append(copy)
        self._deliver(self, [(message, received)])
        return 0

    def abort_transfer(self, number: int, reason: str) -> None:
        """Nothing is under way: `send` copies at once."""
