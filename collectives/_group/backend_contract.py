"""The contract of backends, which carry out a group's operations on one kind of device (`tcp`, `nccl`, `mpi`).

`EngineBackend` is the common part of those whose operations run on an `Engine`: `tcp` and `mpi`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch

from rpcdist.collectives._group.engine import Engine
from rpcdist.collectives._group.flight_records import MessageLog
from rpcdist.collectives._group.local_process import LocalProcess
from rpcdist.collectives._group.state import GroupFailure
from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline

if TYPE_CHECKING:
    from rpcdist.collectives._stores.store_base import Store


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The arguments that a backend is constructed with.

    Attributes:
        name: the group's name: equal on all its ranks, and different from those of all other groups.
        ranks: ranks of the members in the world, by rank in the group.
        store: a key space that only this group and backend use.
        timeout_s: limit of each operation that brings no other, in seconds.
        options: `pg_options` of the caller, or None.
        device: the device that the caller bound the group to, or None.
        check: raises when a member cannot come any more; None where nobody would know.
        process: what the groups of this process share.
        outlives_ranks: whether the program goes on without a rank that is lost, so that no flight record is written.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    store: Store
    timeout_s: float
    options: object | None = None
    device: torch.device | None = None
    check: Callable[[], None] | None = None
    process: LocalProcess = field(default_factory=LocalProcess, repr=False)
    outlives_ranks: bool = False

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


class GroupBackend(ABC):
    """One rank's end of a group on one kind of device; exported as `rpcdist.collectives.BackendBase`.

    It carries out operations in the order of the calls; any thread may call, and every rank calls in the same order.

    A constructor takes one `GroupContext`, finds the other ranks and returns when all of them can be reached, or raises
    within the context's timeout.

    Attributes:
        name: as in `init_process_group(backend=...)`.
        context: what it was made from.
        runs_parts: whether it has `run_part`.
        reduces_many: whether ALL_REDUCE takes any number of tensors, instead of one; known once it is made.
        abort_hooks: what it calls when the group fails, before operations do; None where it calls nothing.
    """

    name: ClassVar[str]
    runs_parts: ClassVar[bool] = False
    reduces_many: bool = False
    abort_hooks: dict[int, Callable[[], object]] | None = None
    context: GroupContext

    @abstractmethod
    def submit(
        self,
        operation: Operation,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
        result: list[torch.Tensor] | None = None,
    ) -> Work:
        """Runs a collective operation.

        Args:
            operation: its tensors must not be touched by the caller until it is done.
            asynchronous: whether to return before it is done.
            timeout_s: its limit, counted from this call; None takes the context's.
            finish: called once, after the operation's bytes have arrived and before `Work` says so; e.g. copies what
                came into a tensor that is not contiguous. For devices with streams it is called at once and enqueues.
            result: what `Work.result` returns.

        Returns:
            Work that is done, unless asynchronous.

        Raises:
            CollectiveError: in a blocking call; an asynchronous one reports it through its `Work`.
        """

    def here(self) -> GroupBackend:
        """The backend that runs what this thread submits: in a callback of an operation it may be another one."""
        return self

    def run_part(self, operation: Operation) -> None:
        """Runs another operation as a part of the one whose `finish` calls this, on its thread and within its limit.

        So an operation can be made of several of which the first finds out the sizes of the others; every rank runs the
        same parts. `finish` must let its errors through.
        """
        raise NotImplementedError(f"the backend {self.name!r} has no parts")

    @abstractmethod
    def send(
        self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool = False, timeout_s: float | None = None
    ) -> Work:
        """Sends a dense contiguous tensor to rank `peer` of the group; done when the tensor may be changed again."""

    @abstractmethod
    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Receives into a dense contiguous tensor from rank `peer`, or from whichever sends first when it is None.

        `Work.source_rank()` says who it was. Messages of one pair and tag arrive in the order in which they were sent.
        """

    def start_batch(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """`batch_isend_irecv` begins; for backends that group calls. Ends with `end_batch`, on the same thread."""

    def end_batch(self) -> None:  # noqa: B027
        """All sends and receives since `start_batch` may start."""

    def lost_ranks(self) -> dict[int, str]:
        """The ranks of the group that are known to be gone, and why; the one that went first comes first."""
        return {}

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Ends everything immediately, on all ranks, with `GroupAborted`; idempotent; never waits."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Waits for what was submitted, then frees everything; idempotent. After `timeout_s` it aborts the rest."""


logger = logging.getLogger(__name__)


class Messages(Protocol):
    """Carries a group's messages; see `GroupBackend.send` and `GroupBackend.recv`."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool, timeout_s: float) -> Work: ...

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool,
        timeout_s: float,
        finish: Callable[[], None] | None,
    ) -> Work: ...


class EngineBackend(GroupBackend):
    """A backend made of an engine, which runs the collectives, and of messages."""

    runs_parts = True

    def __init__(self, context: GroupContext, engine: Engine, messages: Messages) -> None:
        self.context = context
        self._engine = engine
        self.abort_hooks = engine.abort_hooks
        self._messages = messages
        self._recorder = context.process.recorder
        self._log = MessageLog(context.name, context.ranks)
        self._closed = False
        self._nested: EngineBackend | None = None
        context.process.close_at_exit(self)

    def submit(
        self,
        operation: Operation,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
        result: list[torch.Tensor] | None = None,
    ) -> Work:
        if self._engine.callbacks.runs_here():
            return self.here().submit(
                operation, asynchronous=asynchronous, timeout_s=timeout_s, finish=finish, result=result
            )
        return self._engine.submit(operation, asynchronous, timeout_s, finish, result)

    def here(self) -> GroupBackend:
        """In a callback, a second backend of the same ranks, made at the first call; see [Note: callbacks]."""
        if not self._engine.callbacks.runs_here():
            return self
        if self._nested is None:
            context = self.context
            store = PrefixStore("callbacks", context.store)
            name = f"{context.name}, its callbacks"
            nested = replace(context, name=name, store=store, check=self._check)
            self._nested = type(self)(nested)  # type: ignore[call-arg]  # subclasses take the context alone
            self._check()  # a failure since then has passed it by
        return self._nested

    def _check(self) -> None:
        failure = self._engine.state.failure
        if failure is not None:
            raise failure.error(f"a callback of group {self.context.name!r}")

    def _fail_nested(self, failure: GroupFailure) -> None:
        """Operations of callbacks cannot end: the callbacks of other ranks may never call them."""
        if self._nested is not None:
            self._nested._engine.fail(failure)

    def _end_callbacks(self, deadline: Deadline) -> None:
        """Waits for the callbacks, and frees what they use; after the operations that they wait for."""
        if not self._engine.callbacks.drain(deadline.remaining_s()):
            logger.error("callbacks of group %r did not end in time", self.context.name)
        if self._nested is not None:
            self._nested.close(deadline.remaining_s())

    def run_part(self, operation: Operation) -> None:
        self._engine.run_part(operation)

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool = False, timeout_s: float | None = None
    ) -> Work:
        limit_s = self.context.timeout_s if timeout_s is None else timeout_s
        return self._recorded("send", tensor, peer, tag, asynchronous=asynchronous, timeout_s=limit_s)

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        limit_s = self.context.timeout_s if timeout_s is None else timeout_s
        return self._recorded("recv", tensor, peer, tag, asynchronous=asynchronous, timeout_s=limit_s, finish=finish)

    def _recorded(
        self, operation: Literal["send", "recv"], tensor: torch.Tensor, peer: int | None, tag: int, **options: Any
    ) -> Work:
        start: Callable[..., Work] = self._messages.send if operation == "send" else self._messages.recv
        record = self._log.record(operation, tensor, peer, tag)
        self._recorder.note(record)
        try:
            work = start(tensor, peer, tag, **options)
        except BaseException as exc:
            record.end(exc)
            raise
        record.follow(work)
        return work

    def lost_ranks(self) -> dict[int, str]:
        return self._engine.state.lost_ranks()

    def abort(self, reason: str) -> None:
        self._engine.fail_everywhere(self._engine.state.aborted(reason))
