"""The receiving side of control messages: applies each once, and acknowledges them together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from rpcdist._proto import rpc_pb2
from rpcdist.errors import RpcdistError
from rpcdist.ids import Identity
from rpcdist.rpc._executors.io_thread import IoThread
from rpcdist.rpc._peers.control import ControlInbox
from rpcdist.rpc._peers.demultiplexer import PoolJob
from rpcdist.rpc._peers.directory import MemberEvent
from rpcdist.rpc._peers.lifetime import Lifetime
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.time_limits import ACKNOWLEDGE_DELAY_S

Apply = Callable[[Identity, Any, Sequence[ReceiveBuffer]], object]
"""Takes the sender, the body of the message, and its large buffers."""


class ControlReceiver:
    """One per agent; on the I/O loop, but for messages of a worker to itself.

    Args:
        io: the I/O loop.
        lifetime: service methods fail when it is over.
    """

    def __init__(self, io: IoThread, lifetime: Lifetime) -> None:
        self._io = io
        self._lifetime = lifetime
        self._apply: dict[str, Apply] = {}
        self._inboxes: dict[tuple[int, int], ControlInbox] = {}
        self._to_acknowledge: dict[MessageSink, int] = {}

    def __repr__(self) -> str:
        return f"<ControlReceiver [{len(self._inboxes)} senders]>"

    def handle(self, kind: str, apply: Apply) -> None:
        """Says who takes the bodies of one kind."""
        self._apply[kind] = apply

    def apply(self, kind: str, sender: Identity, body: Message, buffers: Sequence[ReceiveBuffer] = ()) -> None:
        """Hands a body on at once, whether it was applied before or not."""
        self._apply[kind](sender, body, buffers)

    def on_message(
        self, session: MessageSink, message: rpc_pb2.Message, buffers: list[ReceiveBuffer], jobs: list[PoolJob]
    ) -> None:
        """Applies a message, unless it is numbered and was applied before: its acknowledgement may have been lost."""
        kind = message.WhichOneof("body")
        assert kind is not None  # the demultiplexer looked at it
        if not message.control_seq:
            self._apply[kind](session.peer, getattr(message, kind), buffers)
            return
        peer = session.peer
        inbox = self._inboxes.setdefault((peer.id, peer.incarnation), ControlInbox())
        if inbox.accept(message.control_seq):
            self._apply[kind](peer, getattr(message, kind), buffers)
        if not self._to_acknowledge:
            self._io.loop.call_later(ACKNOWLEDGE_DELAY_S, self.acknowledge)
        self._to_acknowledge[session] = inbox.applied

    def forget(self, sender: Identity) -> None:
        """A process is out of the job for good, and sends no message again."""
        self._inboxes.pop((sender.id, sender.incarnation), None)

    def on_member(self, event: MemberEvent) -> None:
        """A worker came or went. One that was lost may be found again, and go on with its numbers."""
        if event.kind == "left":
            self.forget(event.member.identity)

    def acknowledge(self) -> None:
        """Sends the acknowledgements that are due."""
        due, self._to_acknowledge = self._to_acknowledge, {}
        for session, applied in due.items():
            session.send(rpc_pb2.Message(ack=rpc_pb2.Ack(control_seq=applied)))

    def service_method(self, kind: str, reply: Callable[[], Message]) -> Callable[[Identity, Any], Awaitable[Message]]:
        """The method `Deliver` of a service: the same handler as for sessions, which repeats do no harm to."""

        async def deliver(peer: Identity, body: Message) -> Message:
            if self._lifetime.is_closed:
                raise RpcdistError("this worker has shut down RPC")
            self._apply[kind](peer, body, ())
            return reply()

        return deliver
