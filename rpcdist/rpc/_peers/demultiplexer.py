"""Arriving messages, handed to the part of the agent that handles their kind, as long as the agent is open."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from rpcdist._proto import rpc_pb2
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.transport.wire_messages import Call, CompactPass, Reply, WireMessage


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

Handler = Callable[[AnySession, Any, list[ReceiveBuffer], list[PoolJob]], object]
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

    def handle(self, kind: str | type[Call | Reply | CompactPass], handler: Handler) -> None:
        """Registers the handler of a class of messages, or of a kind of protobuf message; others are dropped."""
        self._handlers[kind] = handler

    def takes_anywhere(self, message: rpc_pb2.Message) -> bool:
        """Whether the handler of this message may run on any thread. The order of the others is kept on the loop."""
        if message.HasField("autograd"):
            return not (message.control_seq or message.autograd.HasField("release"))
        return message.HasField("gpu_release")

    def on_messages(self, session: AnySession, messages: list[tuple[WireMessage, list[ReceiveBuffer]]]) -> None:
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
            if kind is Call:
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


def line_of(session: AnySession, is_nested: bool) -> Hashable:
    """The line of the pool that a call joins: another call may wait for a nested one, which passes the others."""
    return (session.account, "nested") if is_nested else session.account
