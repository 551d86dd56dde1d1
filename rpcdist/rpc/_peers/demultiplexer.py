"""Arriving messages, handed to the part of the agent that handles their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpcdist._proto import rpc_pb2
from rpcdist.rpc._peers.lifetime import Lifetime
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.transport.wire_messages import CompactCall, CompactPass, CompactReply, WireMessage

PoolJob = tuple[Callable[..., object], tuple[object, ...]]
"""A function and its arguments, to be called by a thread of the pool."""

Handler = Callable[[MessageSink, Any, list[ReceiveBuffer], list[PoolJob]], object]
"""Takes the session, the message (of the kind that it is registered for), its large buffers, and the list to which it
adds what the pool shall do."""


class Demultiplexer:
    """One per agent. Handlers run on the I/O loop, or on the thread that sends where a worker calls itself.

    Those of messages that it `takes_anywhere` also run on threads that wait for a reply, or for work, and read there.

    Args:
        submit_many: gives jobs to the pool.
        lifetime: nothing is handed on when it is over.
    """

    def __init__(self, submit_many: Callable[[list[PoolJob]], object], lifetime: Lifetime) -> None:
        self._submit_many = submit_many
        self._lifetime = lifetime
        self._handlers: dict[str | type | None, Handler] = {}

    def __repr__(self) -> str:
        return f"<Demultiplexer [{', '.join(map(str, self._handlers))}]>"

    def handle(self, kind: str | type[CompactCall | CompactReply | CompactPass], handler: Handler) -> None:
        """Says who takes messages of a class, or those of protobuf whose body is of a kind; others are dropped."""
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
        return bool(kind == "call")

    def on_messages(self, session: MessageSink, messages: list[tuple[WireMessage, list[ReceiveBuffer]]]) -> None:
        """Messages arrived on a session. What they give the pool to do goes there together: one wake-up for all."""
        if self._lifetime.is_closed:
            return
        jobs: list[PoolJob] = []
        for message, buffers in messages:
            kind = message.WhichOneof("body") if isinstance(message, rpc_pb2.Message) else type(message)
            handler = self._handlers.get(kind)
            if handler is not None:
                handler(session, message, buffers, jobs)
        if jobs:
            self._submit_many(jobs)
