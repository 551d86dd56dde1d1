"""The reduction of one bucket: which operations, the comm hook instead of them, and waiting for other ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp, Work
from rpcdist.errors import CollectiveError, ConfigError
from rpcdist.parallel._ddp._bucket import DenseBucket
from rpcdist.parallel._ddp._ddp_errors import explained, list_names
from rpcdist.parallel._ddp._gradient_layout import view_like
from rpcdist.parallel._ddp._notices import Notices

__all__ = ["BucketWait", "CommHook", "GradBucket", "reduce_runs"]

logger = logging.getLogger(__name__)

LOOK_AFTER_S: Final = 2.0
"""After waiting this long for other ranks, a rank looks for their notices, and again after each such time."""


class GradBucket:
    """A bucket as a comm hook sees it. Valid until the hook's future is done."""

    def __init__(self, bucket: DenseBucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.buffer

    def __repr__(self) -> str:
        return f"<GradBucket {self._bucket!r}>"

    def index(self) -> int:
        """Its number, by the order of communication."""
        return self._bucket.number

    def buffer(self) -> torch.Tensor:
        """The gradients of this rank, as one flat tensor; a hook may change it."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The same, as views in the shapes of the parameters."""
        parameters = self.parameters()
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        return [view_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return [member.parameter for member in self._bucket.members]

    def is_last(self) -> bool:
        """Whether it is the last one of the iteration."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Has `buffer` return another flat tensor of the same size, perhaps of another dtype, from now on."""
        if buffer.numel() != self._bucket.buffer.numel():
            count = self._bucket.buffer.numel()
            raise ConfigError(f"the buffer of bucket {self.index()} has {count} elements, not {buffer.numel()}")
        self._buffer = buffer


CommHook = Callable[[object, GradBucket], "torch.futures.Future[torch.Tensor]"]


def reduce_runs(runs: Sequence[torch.Tensor], group: ProcessGroup, divisor: float, asynchronous: bool) -> list[Work]:
    """Averages flat tensors over the ranks, in place."""
    works = []
    for run in runs:
        average = divisor == group.size() and run.dtype is not torch.float16
        if not average:
            run.div_(divisor)  # before the sum, which might be too large for the dtype
        work = collectives.all_reduce(run, ReduceOp.AVG if average else ReduceOp.SUM, group, async_op=asynchronous)
        if work is not None:
            works.append(work)
    return works


class BucketWait:
    """Waits for the other ranks, and says what is wrong when they do not come.

    Args:
        group: the ranks.
        notices: what they may say.
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
            work.wait(LOOK_AFTER_S)
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
        """Raises the error with more to say: which gradients were reduced, and what other ranks said about them."""
        rank = self._group.world_rank(self._group.rank())
        told = "".join(f"; {notice}" for notice in self._notices.read(iteration))
        raise explained(
            error,
            f"rank {rank} reduced bucket {number} of iteration {iteration}, with the gradients of {list_names(names)}"
            f"{told}. If a rank ran out of data, train under `with model.join():`",
        ) from error
