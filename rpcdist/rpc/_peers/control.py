"""Reliable delivery of control messages between two incarnations: numbered, acknowledged, sent again, applied once.

Pure bookkeeping. User calls never go this way: they are never retried.

Invariants:
    1. Messages are applied in the order in which they were numbered, each once.
    2. A message stays with the sender until its number, or a later one, is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rpcdist._proto import autograd_pb2, membership_pb2, rpc_pb2, rref_pb2
from rpcdist.errors import ProtocolViolation

ControlBody = rref_pb2.RRefMessage | autograd_pb2.AutogradMessage | membership_pb2.MembershipMessage

_KINDS: Mapping[type, str] = {
    autograd_pb2.AutogradMessage: "autograd",
    membership_pb2.MembershipMessage: "membership",
    rref_pb2.RRefMessage: "rref",
}


def kind_of(body: ControlBody) -> str:
    """The name of the field of a message that carries such a body."""
    return _KINDS[type(body)]


class ControlOutbox:
    """The sender's side of one peer incarnation. Not thread-safe."""

    def __init__(self) -> None:
        self._next = 1
        self._unacknowledged: deque[rpc_pb2.Message] = deque()

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def __repr__(self) -> str:
        return f"<ControlOutbox {len(self)} unacknowledged>"

    def add(self, body: ControlBody) -> rpc_pb2.Message:
        """Numbers a message; send what is returned."""
        message = rpc_pb2.Message(control_seq=self._next)
        getattr(message, kind_of(body)).CopyFrom(body)
        self._next += 1
        self._unacknowledged.append(message)
        return message

    def acknowledged(self, up_to: int) -> None:
        while self._unacknowledged and self._unacknowledged[0].control_seq <= up_to:
            self._unacknowledged.popleft()

    def to_resend(self) -> list[rpc_pb2.Message]:
        """What a new connection starts with."""
        return list(self._unacknowledged)


class ControlInbox:
    """The receiver's side of one peer incarnation. Not thread-safe.

    The first message may have any number. This process has acknowledged those before it, and has forgotten the sender
    since: it was told that the sender had left the job, and yet the sender was only silent.
    """

    def __init__(self) -> None:
        self.applied = 0
        self._is_new = True

    def accept(self, seq: int) -> bool:
        """True if the message of this number is the next to be applied; False for one that was applied before.

        Raises:
            ProtocolViolation: messages before it are missing, which a channel that keeps order cannot cause.
        """
        if self._is_new:
            self.applied, self._is_new = seq - 1, False
        if seq <= self.applied:
            return False
        if seq != self.applied + 1:
            raise ProtocolViolation(f"control message {seq} arrived after {self.applied}")
        self.applied = seq
        return True
