"""What the manager of remote references needs of the agent, and what it hands to it."""

from __future__ import annotations

from typing import Any, Protocol

from rpcdist._proto import rref_pb2
from rpcdist.rpc._rref.handles import Handle, HandleState
from rpcdist.rpc._rref.identifiers import UniqueId
from rpcdist.rpc.future import Future

__all__ = ["RRefHost", "Token"]


class RRefHost(Protocol):
    """What the manager needs of its agent."""

    worker_id: int
    worker_name: str
    incarnation: int

    def send_control(self, to: int, message: rref_pb2.RRefMessage) -> None:
        """Delivers at least once, unless the worker dies. Any thread, never blocks."""

    def worker_name_of(self, worker_id: int) -> str:
        """Its name, or a text with the id if it is unknown."""

    def incarnation_of(self, worker_id: int) -> int:
        """Of the process that has this id now; 0 if it is unknown."""

    def fetch(self, owner: int, rref: UniqueId, fork: UniqueId, timeout_s: float) -> Future[Any]:
        """The value, from its owner."""

    def wake(self) -> None:
        """Asks for a call of `drain` soon."""


class Token:
    """A reference that arrived in a message and was not unpickled yet. `claim` it, or `discard` it."""

    __slots__ = ("handle", "rref", "state")

    def __init__(self, state: HandleState, handle: Handle) -> None:
        self.state = state
        self.handle: Handle | None = handle
        self.rref: object = None
