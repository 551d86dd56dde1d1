"""The reduction of one bucket: averaging its tensors or calling the comm hook, and waiting for the other ranks."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp, Work
from rpcdist.errors import CollectiveError, ConfigError
from rpcdist.parallel._ddp._ddp_errors import explained, list_names
from rpcdist.parallel._ddp._dense_bucket import DenseBucket
from rpcdist.parallel._ddp._gradient_layout import view_like
from rpcdist.parallel._ddp._notices import Notices
from rpcdist.time_limits import DDP_NOTICE_POLL_S

__all__ = ["BucketWait", "CommHook", "GradBucket", "check_comm_hook", "reduce_runs"]

logger = logging.getLogger(__name__)


class GradBucket:
    """A bucket as a comm hook sees it. Valid until the hook's future is done."""

    def __init__(self, bucket: DenseBucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.buffer

    def __repr__(self) -> str:
        return f"<GradBucket {self._bucket!r}>"

    def index(self) -> int:
        """Number of the bucket in the order of communication."""
        return self._bucket.number

    def buffer(self) -> torch.Tensor:
        """The gradients of this rank as one flat tensor; a hook may change it in place."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer` in the shapes of the parameters."""
        parameters = self.parameters()
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        return [view_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return [member.parameter for member in self._bucket.members]

    def is_last(self) -> bool:
        """Whether it is the last bucket of the iteration."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor that `buffer` returns by a flat one of the same size, perhaps of another dtype."""
        if buffer.numel() != self._bucket.buffer.numel():
            count = self._bucket.buffer.numel()
            raise ConfigError(f"the buffer of bucket {self.index()} has {count} elements, not {buffer.numel()}")
        self._buffer = buffer


CommHook = Callable[[object, GradBucket], "torch.futures.Future[torch.Tensor]"]


def check_comm_hook(hook: object) -> None:
    """Raises TypeError or ConfigError for an object that cannot be a comm hook."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        names = list(inspect.signature(hook).parameters)
    except ValueError:  # no signature to look at
        return
    if len(names) != 2:
        raise ConfigError(f"a communication hook takes two arguments, state and bucket; this one takes {names}")


def reduce_runs(runs: Sequence[torch.Tensor], group: ProcessGroup, divisor: float, asynchronous: bool) -> list[Work]:
    """Averages flat tensors over the ranks of a group, in place; returns the work of the asynchronous operations."""
    works = []
    for run in runs:
        average = divisor == group.size() and run.dtype is not torch.float16
        if not average:
            run.div_(divisor)  # before the sum, which could overflow the dtype
        work = collectives.all_reduce(run, ReduceOp.AVG if average else ReduceOp.SUM, group, async_op=asynchronous)
        if work is not None:
            works.append(work)
    return works


class BucketWait:
    """Waits for the reductions of a bucket, and explains why they fail or take long.

    Args:
        group: the ranks that reduce.
        notices: where the ranks say which gradients they lack.
    """

    def __init__(self, group: ProcessGroup, notices: Notices) -> None:
        self._group = group
        self._notices = notices
        self._told = 0

    def wait(self, work: Work, number: int, names: Sequence[str], iteration: int) -> None:
        """Returns when the operation is done.

        Raises:
            CollectiveError: it failed, or another rank has given up on it; names that rank and the parameters.
        """
        try:
            while not work.is_completed():
                self._wait_a_while(work)
                if not work.is_completed():
                    self._look(work, number, iteration)
            work.wait()
        except CollectiveError as exc:
            self.fail(exc, number, names, iteration)

    @staticmethod
    def _wait_a_while(work: Work) -> None:
        try:
            work.wait(DDP_NOTICE_POLL_S)
        except CollectiveError:
            if work.is_completed():
                raise

    def _look(self, work: Work, number: int, iteration: int) -> None:
        for notice in self._notices.read(iteration):
            if notice.final:
                backend = self._group.backend(self._group.object_device)
                backend.abort(f"the reduction of bucket {number} cannot end: {notice}")
                work.wait()
            elif self._told != iteration:
                self._told = iteration
                warnings.warn(f"still waiting in bucket {number}: {notice}", RuntimeWarning, stacklevel=2)

    def fail(self, error: CollectiveError, number: int, names: Sequence[str], iteration: int) -> NoReturn:
        """Raises the error with details: which gradients were reduced, and the notices of other ranks about them."""
        rank = self._group.world_rank(self._group.rank())
        told = "".join(f"; {notice}" for notice in self._notices.read(iteration))
        raise explained(
            error,
            f"rank {rank} reduced bucket {number} of iteration {iteration}, with the gradients of {list_names(names)}"
            f"{told}. If a rank ran out of data, train under `with model.join():`",
        ) from error
