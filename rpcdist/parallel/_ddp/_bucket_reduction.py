"""The reductions of an iteration's buckets: starts them during the backward pass, and waits for them at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from rpcdist._counters import training
from rpcdist.collectives import ProcessGroup, ReduceOp, Work
from rpcdist.errors import CollectiveError
from rpcdist.parallel._ddp._buckets import BucketEntry, DenseBucket, SparseBucket
from rpcdist.parallel._ddp._comm_hook import GradBucket, RegisteredHook
from rpcdist.parallel._ddp._finite_check import FiniteCheck
from rpcdist.parallel._ddp._notices import BucketWait
from rpcdist.profile_ranges import is_profiling, record_function, span_taps

Bucket = DenseBucket | SparseBucket
GradientOf = Callable[[BucketEntry], torch.Tensor | None]
"""Returns a parameter's gradient on this rank; None if it has none."""
Deliver = Callable[[list[BucketEntry], list[torch.Tensor], bool], None]
"""Stores reduced gradients; see `GradientSource.deliver`."""


def reduce_runs(runs: Sequence[torch.Tensor], group: ProcessGroup, divisor: float, asynchronous: bool) -> list[Work]:
    """Averages flat tensors of one dtype and device over the ranks of a group, in place; returns the operations."""
    if not runs:
        return []
    average = divisor == group.size() and runs[0].dtype is not torch.float16
    if not average:
        torch._foreach_div_(list(runs), divisor)  # before the sum, which could overflow the dtype
    binding = group.binding(runs[0].device.type)
    return binding.all_reduce_many(runs, ReduceOp.AVG if average else ReduceOp.SUM, asynchronous)


class BucketReductions:
    """The reductions of one iteration at a time. The reducer's lock guards it.

    Attributes:
        first_launch_ns: when the first operation of the iteration was started; 0 before.
    """

    def __init__(
        self, group: ProcessGroup, waiter: BucketWait, finite: FiniteCheck, hook: RegisteredHook | None
    ) -> None:
        self.first_launch_ns = 0
        self._group = group
        self._waiter = waiter
        self._finite = finite
        self._hook = hook
        self._iteration = 0
        self._divisor = 1.0
        self._works: dict[int, list[Work]] = {}
        self._futures: dict[int, tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = {}
        self._began: dict[int, float] = {}  # for a trace: when the reduction of a bucket was started

    def begin(self, iteration: int, divisor: float) -> None:
        """Begins an iteration, whose gradients are divided by `divisor`."""
        self.first_launch_ns = 0
        self._iteration = iteration
        self._divisor = divisor
        self._works.clear()
        self._futures.clear()
        self._began.clear()

    # ------------------------------------------------------------ starting

    def start(
        self, bucket: Bucket, gradient_of: GradientOf, *, in_place: bool, is_last: bool, asynchronous: bool
    ) -> None:
        """Starts the reduction of a bucket.

        Args:
            bucket: whose gradients are ready.
            gradient_of: returns the gradient of each member.
            in_place: whether the reduction may overwrite gradients.
            is_last: whether it is the last bucket of the iteration.
            asynchronous: whether to return before the reduction has ended.
        """
        if span_taps:
            self._began[bucket.number] = time.monotonic()
        try:
            with _range_of("starts", bucket):
                if isinstance(bucket, SparseBucket):
                    self._start_sparse(bucket, gradient_of)
                else:
                    self._start_dense(bucket, gradient_of, in_place, is_last, asynchronous)
        except CollectiveError as exc:
            self._waiter.fail(exc, bucket.number, _names(bucket), self._iteration)

    def _start_sparse(self, bucket: SparseBucket, gradient_of: GradientOf) -> None:
        gradient = gradient_of(bucket.members[0])
        if gradient is not None:
            self._finite.before([_values(gradient)], partial(_named_gradients, bucket, gradient_of))
        self._works[bucket.number] = [bucket.start(gradient)]

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
            self._futures[bucket.number] = shown, self._hook.start(shown)

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
        for work in self._works.pop(bucket.number, ()):
            self._waiter.wait(work, bucket.number, _names(bucket), self._iteration)
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


def _range_of(what: str, bucket: Bucket) -> AbstractContextManager[object]:
    """A range in torch's profiler, where one runs."""
    return record_function(f"DDP bucket {bucket.number} {what}") if is_profiling() else nullcontext()


def _names(bucket: Bucket) -> list[str]:
    return [member.name for member in bucket.members]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient._values() if gradient.is_sparse else gradient).reshape(-1)


def _named_gradients(bucket: Bucket, gradient_of: GradientOf) -> Iterable[tuple[str, torch.Tensor]]:
    pairs = ((member.name, gradient_of(member)) for member in bucket.members)
    return [(name, gradient) for name, gradient in pairs if gradient is not None]
