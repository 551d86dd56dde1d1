"""The interface of backends, which run a group's operations on one kind of device (`tcp`, `nccl`, `mpi`).

`EngineBackend` is the common part of the backends that run operations on an `Engine`: `tcp` and `mpi`.
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
    """The arguments for constructing a backend.

    Attributes:
        name: the group's name, equal on all its ranks and unique among groups.
        ranks: ranks of the members in the world, by rank in the group.
        store: a key space that only this group and backend use.
        timeout_s: limit of each operation without its own, in seconds.
        options: `pg_options` of the caller, or None.
        device: the device that the caller bound the group to, or None.
        check: raises if a member cannot join any more; None if that cannot be known.
        process: the state that the groups of this process share.
        outlives_ranks: whether the program continues when a rank is lost, so that no flight record is written.
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
        """The number of ranks in the group."""
        return len(self.ranks)


class GroupBackend(ABC):
    """One rank's end of a group on one kind of device; exported as `rpcdist.collectives.BackendBase`.

    It runs operations in the order of the calls. Any thread may call; every rank calls in the same order.

    A constructor takes one `GroupContext`, finds the other ranks, and returns when all of them can be reached. If that
    fails, it raises within the context's timeout.

    Attributes:
        name: as in `init_process_group(backend=...)`.
        context: the argument of the constructor.
        runs_parts: whether it has `run_part`.
        reduces_many: whether ALL_REDUCE takes any number of tensors instead of one; set by the constructor.
        abort_hooks: functions that it calls when the group fails, before operations fail; None if it calls none.
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
            operation: the caller must not touch its tensors until it is done.
            asynchronous: whether to return before it is done.
            timeout_s: its limit, counted from this call; None takes the context's.
            finish: called once, after the operation's bytes have arrived and before its `Work` is done; for example, it
                copies the result into a tensor that is not contiguous. For devices with streams it is called at once
                and enqueues the copy.
            result: the value that `Work.result` returns.

        Returns:
            Work that is done, unless the operation is asynchronous.

        Raises:
            CollectiveError: in a blocking call; an asynchronous call reports it through its `Work`.
        """

    def here(self) -> GroupBackend:
        """Returns the backend for this thread's operations: in a callback of an operation it may be another one."""
        return self

    def run_part(self, operation: Operation) -> None:
        """Runs another operation as a part of the one whose `finish` calls this, on its thread, within its limit.

        So an operation can consist of parts of which the first gathers the sizes of the others; every rank runs the
        same parts. `finish` must let the errors of this method through.
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
        """Receives into a dense contiguous tensor from rank `peer`, or from the first rank that sends if it is None.

        `Work.source_rank()` returns that rank. Messages of one pair and tag arrive in the order of the sends.
        """

    def start_batch(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Begins a batch of `batch_isend_irecv`, for backends that group calls; `end_batch` ends it, on this thread."""

    def end_batch(self) -> None:  # noqa: B027
        """Starts the sends and receives since `start_batch`, unless they have started."""

    def lost_ranks(self) -> dict[int, str]:
        """Returns the ranks of the group that are known to be gone, with the reason, in the order of their loss."""
        return {}

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Ends all operations at once, on all ranks, with `GroupAborted`. Idempotent; never waits."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Waits for submitted operations, and aborts them after `timeout_s`; then frees all resources. Idempotent."""


logger = logging.getLogger(__name__)


class Messages(Protocol):
    """The messages of a group; see `GroupBackend.send` and `GroupBackend.recv`."""

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
    """A backend that consists of an engine, which runs the collectives, and of messages."""

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
        """Returns, in a callback, a second backend of the same ranks, made at the first call; see [Note: callbacks]."""
        if not self._engine.callbacks.runs_here():
            return self
        if self._nested is None:
            context = self.context
            store = PrefixStore("callbacks", context.store)
            name = f"{context.name}, its callbacks"
            nested = replace(context, name=name, store=store, check=self._check)
            self._nested = type(self)(nested)  # type: ignore[call-arg]  # subclasses take the context alone
            self._check()  # the new backend has not heard of a failure since then
        return self._nested

    def _check(self) -> None:
        failure = self._engine.state.failure
        if failure is not None:
            raise failure.error(f"a callback of group {self.context.name!r}")

    def _fail_nested(self, failure: GroupFailure) -> None:
        """Fails the operations of callbacks, since the callbacks of other ranks may never call them."""
        if self._nested is not None:
            self._nested._engine.fail(failure)

    def _end_callbacks(self, deadline: Deadline) -> None:
        """Waits for the callbacks and frees their backend, after the operations for which they wait."""
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
