"""Reliable delivery of control messages between two incarnations: numbered, acknowledged, sent again, applied once.

The outbox is pure bookkeeping; the receiver applies messages, and acknowledges several together. User
calls are not sent in this way, since they are never retried.

Invariants:
    1. Messages are applied in the order in which they were numbered, each once.
    2. A message stays with the sender until its number, or a later one, is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from rpcdist._proto import autograd_pb2, membership_pb2, rpc_pb2, rref_pb2
from rpcdist.errors import ProtocolViolation, RpcdistError
from rpcdist.ids import Identity, ProcessId
from rpcdist.rpc._peers.directory import MemberEvent
from rpcdist.rpc._peers.network import AnySession, Lifetime
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.time_limits import CONTROL_DELAY_S
from rpcdist.transport.io_loop import IoLoop

ControlBody = rref_pb2.RRefMessage | autograd_pb2.AutogradMessage | membership_pb2.MembershipMessage

_KINDS: Mapping[type, str] = {
    autograd_pb2.AutogradMessage: "autograd",
    membership_pb2.MembershipMessage: "membership",
    rref_pb2.RRefMessage: "rref",
}


def kind_of(body: ControlBody) -> str:
    return _KINDS[type(body)]


class ControlOutbox:
    """The sender's side of one peer incarnation. Not thread-safe."""

    def __init__(self) -> None:
        self._next = 1
        self._unacknowledged: deque[rpc_pb2.Message] = deque()

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def add(self, body: ControlBody) -> rpc_pb2.Message:
        message = rpc_pb2.Message(control_seq=self._next)
        getattr(message, kind_of(body)).CopyFrom(body)
        self._next += 1
        self._unacknowledged.append(message)
        return message

    def acknowledged(self, up_to: int) -> None:
        while self._unacknowledged and self._unacknowledged[0].control_seq <= up_to:
            self._unacknowledged.popleft()

    def to_resend(self) -> list[rpc_pb2.Message]:
        """The messages that a new connection must carry first."""
        return list(self._unacknowledged)


def is_next(seq: int, applied: int | None) -> bool:
    """Whether the control message of this number must be applied next; False if it was applied before.

    Args:
        seq: the number of the message.
        applied: the number of the last message that was applied; None for the first message of a process, which may
            have any number. This process has acknowledged those before it, and then forgotten the sender, because it
            was notified that the sender had left the job, although the sender was only silent.

    Raises:
        ProtocolViolation: messages before it are missing, which a channel that keeps order cannot cause.
    """
    if applied is not None and seq > applied + 1:
        raise ProtocolViolation(f"control message {seq} arrived after {applied}")
    return applied is None or seq > applied


Apply = Callable[[Identity, Any, Sequence[ReceiveBuffer]], object]
"""Called with the sender, the body of the message, and its large buffers."""


@dataclass(slots=True, eq=False)
class ControlReceiver:
    """Applies control messages; one per agent. On the I/O loop, except for messages of a worker to itself."""

    _io: IoLoop
    _lifetime: Lifetime
    _apply: dict[str, Apply] = field(default_factory=dict)
    _applied: dict[ProcessId, int] = field(default_factory=dict)  # the number of the last message, by sender
    _to_acknowledge: dict[AnySession, int] = field(default_factory=dict)

    def handle(self, kind: str, apply: Apply) -> None:
        self._apply[kind] = apply

    def apply(self, kind: str, sender: Identity, body: Message, buffers: Sequence[ReceiveBuffer] = ()) -> None:
        self._apply[kind](sender, body, buffers)

    def on_message(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        """Applies a message, unless it is numbered and was applied before: its acknowledgement may have been lost."""
        kind = message.WhichOneof("body")
        assert kind is not None  # the demultiplexer has read it
        if not message.control_seq:
            self._apply[kind](session.peer, getattr(message, kind), buffers)
            return
        sender = session.peer.process
        applied = self._applied.get(sender)
        if is_next(message.control_seq, applied):
            applied = message.control_seq
            self._applied[sender] = applied
            self._apply[kind](session.peer, getattr(message, kind), buffers)
        if not self._to_acknowledge:
            self._io.loop.call_later(CONTROL_DELAY_S, self.acknowledge)
        assert applied is not None  # the first message of a process is the next one
        self._to_acknowledge[session] = applied

    def forget(self, sender: Identity) -> None:
        """Forgets a process that is permanently out of the job, and sends no message again."""
        self._applied.pop(sender.process, None)

    def on_member(self, event: MemberEvent) -> None:
        """Forgets a worker that has left. A lost one may be found again, and continue its numbers."""
        if event.kind == "left":
            self.forget(event.member.identity)

    def acknowledge(self) -> None:
        due, self._to_acknowledge = self._to_acknowledge, {}
        for session, applied in due.items():
            session.send(rpc_pb2.Message(ack=rpc_pb2.Ack(control_seq=applied)))

    def service_method(
        self, kind: str, reply: Callable[[], Message], seen: Callable[[Identity], object]
    ) -> Callable[[Identity, Any], Awaitable[Message]]:
        """The method `Deliver` of a service, with the same handler as for sessions, in which repeats are harmless.

        Args:
            seen: renews the lease of the sender, which may have no session: its references here end with its lease.
        """

        async def deliver(peer: Identity, body: Message) -> Message:
            if self._lifetime.is_closed:
                raise RpcdistError("this worker has shut down RPC")
            seen(peer)
            self._apply[kind](peer, body, ())
            return reply()

        return deliver
