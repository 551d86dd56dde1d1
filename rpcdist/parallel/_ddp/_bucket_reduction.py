"""The reductions of an iteration's buckets, started during the backward pass and awaited at its end.

A rank whose backward pass ended without some gradients does not take part in the reduction of their buckets. The other
ranks see only that it is late. So it writes a notice with the names of the missing gradients into the group's store,
which ranks read after they have waited for some time.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn

import torch

from rpcdist._counters import training
from rpcdist.collectives import ProcessGroup, ReduceOp, Work
from rpcdist.errors import CollectiveError, RpcdistError
from rpcdist.parallel._ddp._buckets import DenseBucket, SparseBucket
from rpcdist.parallel._ddp._comm_hook import GradBucket, RegisteredHook
from rpcdist.parallel._ddp._ddp_errors import DataParallelError, explained, list_names
from rpcdist.parallel._ddp._finite_check import FiniteCheck
from rpcdist.parallel._ddp._parameters import Trained
from rpcdist.profile_ranges import is_profiling, record_function, span_taps
from rpcdist.time_limits import DDP_NOTICE_POLL_S

logger = logging.getLogger(__name__)

Bucket = DenseBucket | SparseBucket
GradientOf = Callable[[Trained], torch.Tensor | None]
"""Returns a parameter's gradient on this rank; None if it has none."""
Deliver = Callable[[list[Trained], list[torch.Tensor], bool], None]
"""Stores reduced gradients; see `OrdinaryPass.deliver`."""


def reduce_runs(runs: Sequence[torch.Tensor], group: ProcessGroup, divisor: float, asynchronous: bool) -> list[Work]:
    """Averages flat tensors of one dtype and device over the ranks of a group, in place; returns the operations."""
    if not runs:
        return []
    average = divisor == group.size() and runs[0].dtype is not torch.float16
    if not average:
        torch._foreach_div_(list(runs), divisor)  # first, since the sum could overflow the dtype
    binding = group.binding(runs[0].device.type)
    return binding.all_reduce_many(runs, ReduceOp.AVG if average else ReduceOp.SUM, asynchronous)


class BucketReductions:
    """The reductions of one iteration at a time. The reducer's lock guards it.

    Args:
        key: prefix of the keys of notices in the group's store, equal on all ranks and different for each reducer.

    Attributes:
        first_launch_ns: the time when the first operation of the iteration was started; 0 before.
    """

    def __init__(self, group: ProcessGroup, key: str, finite: FiniteCheck, hook: RegisteredHook | None) -> None:
        self.first_launch_ns = 0
        self._group = group
        self._key = key
        self._finite = finite
        self._hook = hook
        self._iteration = 0
        self._warned = 0  # the last iteration for which a warning about waiting was logged
        self._divisor = 1.0
        self._works: dict[int, list[Work]] = {}
        self._futures: dict[int, tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = {}
        self._began: dict[int, float] = {}  # for a trace: the start of each bucket's reduction

    def begin(self, iteration: int, divisor: float) -> None:
        """Begins an iteration, whose gradients are divided by `divisor`."""
        self.first_launch_ns = 0
        self._iteration = iteration
        self._divisor = divisor
        self._works.clear()
        self._futures.clear()
        self._began.clear()

    # ------------------------------------------------------------ starting

    def reduce(
        self, bucket: Bucket, gradient_of: GradientOf, *, in_place: bool, is_last: bool, asynchronous: bool
    ) -> None:
        """Starts the reduction of a bucket, which may overwrite gradients if it is `in_place`."""
        if span_taps:
            self._began[bucket.number] = time.monotonic()
        try:
            with _range_of("starts", bucket):
                if isinstance(bucket, SparseBucket):
                    self._start_sparse(bucket, gradient_of)
                else:
                    self._start_dense(bucket, gradient_of, in_place, is_last, asynchronous)
        except CollectiveError as exc:
            self._fail(exc, bucket)

    def _start_sparse(self, bucket: SparseBucket, gradient_of: GradientOf) -> None:
        gradient = gradient_of(bucket.members[0])
        if gradient is not None:
            self._finite.before([_values(gradient)], partial(_named_gradients, bucket, gradient_of))
        self._works[bucket.number] = [bucket.exchange_sizes(gradient)]

    def _start_dense(
        self, bucket: DenseBucket, gradient_of: GradientOf, in_place: bool, is_last: bool, asynchronous: bool
    ) -> None:
        runs = bucket.gather(gradient_of, in_place)
        self._finite.before(runs, partial(_named_gradients, bucket, gradient_of))
        if not self.first_launch_ns:
            self.first_launch_ns = time.time_ns()
        if self._hook is None:
            self._works[bucket.number] = reduce_runs(runs, self._group, self._divisor, asynchronous)
        else:
            shown = GradBucket(bucket, is_last)
            self._futures[bucket.number] = shown, self._hook.call(shown)

    # ------------------------------------------------------------ finishing

    def finish(self, bucket: Bucket, deliver: Deliver) -> None:
        """Waits for the reduction of a bucket, and delivers its results."""
        waited_from = time.monotonic() if training else 0.0
        with _range_of("ends", bucket):
            self._finish(bucket, deliver)
        for counts in training:
            counts.bucket_waited(time.monotonic() - waited_from)
        if (began_s := self._began.pop(bucket.number, 0.0)) > 0.0:
            for tap in list(span_taps):
                tap("DDP buckets", f"bucket {bucket.number}, {bucket.num_bytes} B", began_s, time.monotonic())

    def _finish(self, bucket: Bucket, deliver: Deliver) -> None:
        if bucket.number not in self._works and bucket.number not in self._futures:
            # The program has caught the error of the backward pass, but ends the iteration.
            raise DataParallelError(
                f"bucket {bucket.number} of iteration {self._iteration} was not reduced: its reduction could not be "
                "started in the backward pass; see the error of that pass"
            )
        for work in self._works.pop(bucket.number, ()):
            self._wait(work, bucket)
        if isinstance(bucket, SparseBucket):
            reduced = bucket.finish(self._divisor)
            self._finite.after([_values(reduced)])
            deliver(bucket.members, [reduced], True)
            return
        if self._hook is not None and bucket.number in self._futures:
            result = self._hook.finish(*self._futures.pop(bucket.number), self._group.timeout_s)
            if result.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(result)
        self._finite.after(bucket.runs)
        bucket.scatter(deliver)

    def conclude(self) -> None:
        """Ends the iteration: warns about gradients that are not finite."""
        self._finite.conclude(self._iteration)

    def _wait(self, work: Work, bucket: Bucket) -> None:
        """Waits until an operation of a bucket is done; explains why it failed or takes long.

        Raises:
            CollectiveError: it failed, or another rank has given up; names that rank and the parameters.
        """
        try:
            while not work.is_completed():
                self._wait_a_while(work)
                if not work.is_completed():
                    self._check_notices(work, bucket)
            work.wait()
        except CollectiveError as exc:
            self._fail(exc, bucket)

    @staticmethod
    def _wait_a_while(work: Work) -> None:
        try:
            work.wait(DDP_NOTICE_POLL_S)
        except CollectiveError:
            if work.is_completed():
                raise

    def _check_notices(self, work: Work, bucket: Bucket) -> None:
        for is_final, notice in self._read_notices():
            if is_final:
                backend = self._group.backend(self._group.object_device)
                backend.abort(f"the reduction of bucket {bucket.number} cannot end: {notice}")
                work.wait()
            elif self._warned != self._iteration:
                self._warned = self._iteration
                warnings.warn(f"still waiting in bucket {bucket.number}: {notice}", RuntimeWarning, stacklevel=2)

    def _fail(self, error: CollectiveError, bucket: Bucket) -> NoReturn:
        """Raises the error with details: the gradients that were reduced, and the notices of other ranks about them."""
        rank = self._group.world_rank(self._group.rank())
        notices = "".join(f"; {notice}" for _, notice in self._read_notices())
        raise explained(
            error,
            f"rank {rank} reduced bucket {bucket.number} of iteration {self._iteration}, with the gradients of "
            f"{list_names(_names(bucket))}{notices}. If a rank ran out of data, train under `with model.join():`",
        ) from error.__cause__  # the new error contains the text of the old one

    # ------------------------------------------------------------ notices of other ranks

    def post_notice(self, iteration: int, problem: str, is_final: bool) -> None:
        """Writes a notice of this rank for the others. Ignores errors of the store, since only an explanation is lost.

        Args:
            problem: continues "rank 0".
            is_final: whether this rank has raised an error; otherwise the gradients may still become ready.
        """
        group = self._group
        text = f"rank {group.world_rank(group.rank())} {problem}"
        try:
            group.get_group_store().set(f"{self._key}/{group.rank()}", json.dumps([iteration, is_final, text]))
        except (RpcdistError, RuntimeError, OSError) as exc:
            logger.debug("the other ranks could not be notified: %s", exc)

    def _read_notices(self) -> list[tuple[bool, str]]:
        """Returns the other ranks' notices about this iteration: whether each is final, and its text."""
        group = self._group
        found: list[tuple[bool, str]] = []
        try:
            store = group.get_group_store()
            for rank in range(group.size()):
                key = f"{self._key}/{rank}"
                if rank != group.rank() and store.check([key]):
                    match json.loads(store.get(key)):  # not signed: it explains an error, and decides nothing
                        case [self._iteration, bool(is_final), str(text)]:
                            found.append((is_final, text))
        except (RpcdistError, RuntimeError, OSError, ValueError) as exc:
            logger.debug("the notices of the other ranks cannot be read: %s", exc)
        return found


def _range_of(what: str, bucket: Bucket) -> AbstractContextManager[object]:
    """A range in torch's profiler, if it runs."""
    return record_function(f"DDP bucket {bucket.number} {what}") if is_profiling() else nullcontext()


def _names(bucket: Bucket) -> list[str]:
    return [member.name for member in bucket.members]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient._values() if gradient.is_sparse else gradient).reshape(-1)


def _named_gradients(bucket: Bucket, gradient_of: GradientOf) -> Iterable[tuple[str, torch.Tensor]]:
    pairs = ((member.name, gradient_of(member)) for member in bucket.members)
    return [(name, gradient) for name, gradient in pairs if gradient is not None]
