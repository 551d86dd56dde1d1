"""Arriving messages, handed to the part of the agent that handles their kind, as long as the agent is open."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from rpcdist._proto import rpc_pb2
from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values.buffers import LargeBuffer, ReceiveBuffer
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import CompactCall, CompactPass, CompactReply, WireMessage


class Lifetime:
    """Set once, by the agent; read by any thread.

    Attributes:
        is_closed: nothing is sent and nothing that arrives is handled any more.
        all_leave: all workers leave by agreement, so connections end, and nobody is lost by that.
    """

    __slots__ = ("all_leave", "is_closed")

    def __init__(self) -> None:
        self.is_closed = self.all_leave = False


PoolJob = tuple[Callable[..., object], tuple[object, ...]]
"""A function and its arguments, to be called by a thread of the pool."""

Handler = Callable[[MessageSink, Any, list[ReceiveBuffer], list[PoolJob]], object]
"""Takes the session, the message (of the kind that it is registered for), its large buffers, and the list to which it
adds what the pool shall do."""


class Demultiplexer:
    """One per agent. Handlers run on the I/O loop, or on the thread that sends where a worker calls itself.

    Those of messages that it `takes_anywhere` also run on threads that wait for a reply, or for work, and read there.

    Args:
        submit_many: gives jobs to the pool, and says whose line they join there; see `ThreadPool.submit_many`.
    """

    def __init__(self, submit_many: Callable[..., object], lifetime: Lifetime) -> None:
        self._submit_many = submit_many
        self._lifetime = lifetime
        self._handlers: dict[str | type | None, Handler] = {}

    def handle(self, kind: str | type[CompactCall | CompactReply | CompactPass], handler: Handler) -> None:
        """Registers the handler of a class of messages, or of a kind of protobuf message; others are dropped."""
        self._handlers[kind] = handler

    def takes_anywhere(self, message: WireMessage) -> bool:
        """Whether the handler of this message may run on any thread. The order of the others is kept on the loop."""
        if not isinstance(message, rpc_pb2.Message):
            return True
        kind = message.WhichOneof("body")
        if kind == "reply":
            return not message.reply.stream
        if kind == "autograd":
            return not (message.control_seq or message.autograd.HasField("release"))
        return kind in ("call", "gpu_release")

    def on_messages(self, session: MessageSink, messages: list[tuple[WireMessage, list[ReceiveBuffer]]]) -> None:
        """Messages arrived on a session. Their jobs go to the pool together, with one wake-up for all.

        Calls join the line of the peer, and parts of backward passes that of its nested calls. The jobs of answers are
        work of this worker.
        """
        if self._lifetime.is_closed:
            return
        calls: list[PoolJob] = []
        passes: list[PoolJob] = []
        jobs: list[PoolJob] = []
        for message, buffers in messages:
            kind = message.WhichOneof("body") if isinstance(message, rpc_pb2.Message) else type(message)
            handler = self._handlers.get(kind)
            if handler is None:
                continue
            if kind is CompactCall or kind == "call":
                handler(session, message, buffers, calls)
            elif kind is CompactPass:
                handler(session, message, buffers, passes)
            else:
                handler(session, message, buffers, jobs)
        if calls:
            self._submit_many(calls, session.account)
        if passes:
            self._submit_many(passes, line_of(session, is_nested=True))
        if jobs:
            self._submit_many(jobs)


def line_of(session: MessageSink, is_nested: bool) -> Hashable:
    """The line of the pool that a call joins: another call may wait for a nested one, which passes the others."""
    return (session.account, "nested") if is_nested else session.account


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
        self.account = AnnouncedBytes()
        self._deliver = deliver

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
