"""Calls to oneself: the same messages, without a connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values.buffers import LargeBuffer, ReceiveBuffer
from rpcdist.transport.wire_messages import WireMessage


class Loopback:
    """The session of a worker with itself. Values are copied as on the way to any other worker.

    Args:
        identity: this worker.
        deliver: takes the messages, on the thread that sends.
    """

    closed_reason = None
    id = b""

    def __init__(
        self,
        identity: Identity,
        deliver: Callable[[MessageSink, list[tuple[WireMessage, list[ReceiveBuffer]]]], None],
    ) -> None:
        self.peer = identity
        self._deliver = deliver

    def __repr__(self) -> str:
        return f"<Loopback of {self.peer.name}>"

    @property
    def last_received(self) -> float:
        return time.monotonic()

    def send(self, message: WireMessage, buffers: Sequence[LargeBuffer] = ()) -> int:
        self._deliver(self, [(message, [buffer.copy() for buffer in buffers])])
        return 0

    def flush(self) -> None:
        """Nothing waits."""

    def hold_back(self, send: Callable[[], object]) -> None:
        send()

    def want_value(self, call: int) -> bool:
        return False

    def abort_transfer(self, number: int, reason: str) -> None:
        """Nothing is under way: `send` copies at once."""

    def transfer_progress(self, number: int) -> tuple[int, int] | None:
        return None

    def lead(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: tuple[Callable[[], object], Callable[[], object]] | None = None,
        first: Callable[[], object] | None = None,
    ) -> bool:
        if first is not None:
            first()
        return False

    def ring(self) -> None:
        """Nobody leads: there is nothing to read."""
