"""What remote references need of their agent, as protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from rpcdist._proto import rref_pb2
from rpcdist.errors import WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._rref.handles import HandleState
from rpcdist.rpc._rref.identifiers import Incarnation
from rpcdist.rpc.future import Future
from rpcdist.rpc.worker_info import WorkerInfo


class RRefHost(Protocol):
    """What the manager needs: who others are, and a way to tell them something."""

    @property
    def me(self) -> Identity:
        """This worker."""

    def send_control(self, to: int, message: rref_pb2.RRefMessage) -> None:
        """Delivers at least once, unless the worker dies. Any thread, never blocks."""

    def flush(self, to: int) -> None:
        """Has what lingers on its way to a worker sent now. Any thread, never blocks."""

    def name_of(self, worker_id: int) -> str:
        """A worker's name, or a text with the id if it is unknown."""

    def incarnation_of(self, worker_id: int) -> int:
        """Of the process that has this id now; 0 if it is unknown."""


class CreationOutcome(Protocol):
    """The call of a `remote()`, to be asked what became of it."""

    def future(self) -> Future[Any]:
        """Done when the owner holds the result."""

    def cancel(self) -> bool:
        """Ends it; False if it has ended."""


class RRefHome(Protocol):
    """What a reference object needs: the agent that it came from, which may not be the current one."""

    @property
    def me(self) -> Incarnation:
        """This worker."""

    @property
    def my_name(self) -> str:
        """Its name."""

    def check_sharable(self, rref: Any) -> object:
        """Raises `RRefError` if the reference cannot be shared."""

    def fetch(self, state: HandleState, timeout_s: float, creation: object = None) -> Any:
        """The value, from its owner; blocks. `creation`: the `CreationOutcome`, if the reference was made here."""

    def flush(self, to: int) -> None:
        """Has the creations that linger on their way to a worker sent now."""

    def start_fetch(self, state: HandleState, timeout_s: float) -> Future[Any]:
        """The same without waiting."""

    def fetch_error(self, state: HandleState, exc: WorkerLost) -> WorkerLost:
        """What to raise when the fetch failed with a lost worker."""

    def call(self, to: WorkerInfo, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        """Calls a function, and waits for its result."""

    def rpc_sync(self, rref: Any, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        """Calls a function at the owner, with an `OwnedRRef` before its arguments, and waits for its result."""

    def rpc_async(self, rref: Any, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        """The same without waiting."""

    def remote_on(self, rref: Any, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        """The same for a result that stays there; returns a reference to it."""

    def in_turn(
        self, rref: Any, mode: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        """Calls a method of an actor, in the way that `mode` says (`rpcdist.rpc._rref.proxy.Mode`)."""

    def turns_over(self, rref: Any, stream: int, numbers: tuple[int, ...]) -> None:
        """At the owner of an actor: calls of it have ended for their caller, and may never come."""

    def backward(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """Runs a distributed backward pass that begins here; blocks."""
