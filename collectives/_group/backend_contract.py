"""The contract of backends, which carry out a group's operations on one kind of device (`tcp`, `nccl`, `mpi`)."""

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
    """The arguments that a backend is constructed with.

    Attributes:
        name: the group's name: equal on all its ranks, and different from those of all other groups.
        rank: rank of this process in the group.
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
        """Ends everything at once, here and on the other ranks, with `GroupAborted`; idempotent; never waits."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Waits for what was submitted, then frees everything; idempotent. After `timeout_s` it aborts the rest."""
