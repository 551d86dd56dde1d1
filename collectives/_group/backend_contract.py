"""The interface of backends, which run a group's operations on one kind of device (`tcp`, `nccl`, `mpi`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from rpcdist.collectives._group.local_process import LocalProcess
from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives.work import Work

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

    def meet(self, timeout_s: float) -> bool:
        """Waits until all ranks have called it, outside the order of operations; at once returns False if it cannot."""
        return False

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
