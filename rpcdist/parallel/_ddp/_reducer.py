"""The reducer: averages gradients over the ranks, bucket by bucket, while the backward pass makes others ready.

Rules:
 1. Buckets are reduced in their order, each as soon as it and all buckets before it are complete. So all ranks issue
    the same operations in the same order, whatever the order in which their gradients become ready.
 2. A forward pass arms an iteration. The iteration begins with its first gradient, and ends with the backward pass,
    when all buckets are reduced and the results are delivered. Gradients outside of an armed iteration are ignored.
 3. A `GradientSource` hides whether gradients come from an ordinary or a distributed backward pass.
 4. All ranks have the same buckets: they follow from the parameters at first, then from the order of readiness on
    rank 0.
 5. The last bucket is reduced at the end of the pass: no computation is left to overlap with, so no other thread is
    needed.

Hooks run on the engine's threads; one lock guards the reducer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp._bucket_assignment import GradientFacts, initial_buckets, rebuilt_buckets
from rpcdist.parallel._ddp._bucket_reduction import Bucket, BucketReductions
from rpcdist.parallel._ddp._bucket_wait import BucketWait
from rpcdist.parallel._ddp._comm_hook import RegisteredHook
from rpcdist.parallel._ddp._ddp_errors import DataParallelError, UnusedParameters
from rpcdist.parallel._ddp._dense_bucket import BucketEntry, DenseBucket
from rpcdist.parallel._ddp._finite_check import FiniteCheck
from rpcdist.parallel._ddp._gradient_sources import (
    DistributedPass,
    GradientSource,
    NoPass,
    OrdinaryPass,
    in_distributed_pass,
)
from rpcdist.parallel._ddp._notices import Notices
from rpcdist.parallel._ddp._parameters import Named
from rpcdist.parallel._ddp._reducer_options import ReducerOptions
from rpcdist.parallel._ddp._sparse_bucket import SparseBucket

__all__ = ["Reducer"]


class Reducer:
    """Averages the gradients of a model; see the rules at the top of the file.

    Args:
        parameters: in the same order on all ranks.
        group: the ranks that reduce.
        options: the same on all ranks.
    """

    def __init__(self, parameters: Sequence[Named], group: ProcessGroup, options: ReducerOptions) -> None:
        self.parameters = list(parameters)
        self.options = options
        self.iteration = 0
        self.divide_by: float | None = None  # None: the size of the group
        self.hook: RegisteredHook | None = None
        self.has_rebuilt = False
        self.first_gradient_ns = self.done_ns = 0
        self._facts = [
            GradientFacts(tensor.nbytes, (tensor.dtype, tensor.device), sparse) for _, tensor, sparse in parameters
        ]
        self._lock = threading.RLock()
        self._index_of = {id(named.tensor): index for index, named in enumerate(parameters)}
        self._armed = False
        self._source: GradientSource | None = None
        self.use_group(group)

    def __repr__(self) -> str:
        state = f"waits for bucket {self._next}" if self._armed else "idle"
        return f"<Reducer of {len(self.parameters)} parameters in {len(self.buckets)} buckets: {state}>"

    def use_group(self, group: ProcessGroup) -> None:
        """Reduces in this group from now on, and starts again with the initial buckets."""
        self.group = group
        self._notices = Notices(group, f"ddp/{group.next_number('ddp')}")
        self._partial_passes = False
        self._order: list[int] | None = None
        self._ready_order: list[int]
        self._expected_calls: list[int] | None = None  # gradients per parameter and iteration, in a static graph
        self._globally_used: list[bool] | None = None
        self.has_rebuilt = False
        self._armed = False
        self._reductions = self._make_reductions()
        self._make_buckets(initial_buckets(self._facts, self.options.caps, self.options.dynamic_unused))
        self.initial_bucket_bytes = [bucket.num_bytes for bucket in self.buckets]

    def _make_reductions(self) -> BucketReductions:
        results_are_equal = self.hook is None or self.hook.leaves_equal_bits
        finite = FiniteCheck(self.group, self.options.check_finite, results_are_equal)
        return BucketReductions(self.group, BucketWait(self.group, self._notices), finite, self.hook)

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> None:
        self.buckets: list[Bucket] = []
        for number, bucket in enumerate(indices):
            members = [BucketEntry(index, self.parameters[index]) for index in bucket]
            if self.parameters[bucket[0]].sparse:
                self.buckets.append(SparseBucket(number, members[0], self.group))
            else:
                self.buckets.append(DenseBucket(number, members, flat=self.hook is not None))
        self._bucket_of = {member.index: bucket for bucket in self.buckets for member in bucket.members}
        self._reset()

    def _reset(self) -> None:
        """Prepares for the first gradient of an iteration."""
        self.first_gradient_ns = self.done_ns = 0
        self._ready_order = []
        self._next = 0
        self._begun = False
        self._callback_queued = False
        self._notice_posted = False
        self._unused: set[int] = set()
        self._marked_unused = False
        self._calls = [0] * len(self.parameters)
        self._skipped: set[int] = set()
        for bucket in self.buckets:
            bucket.waiting = set(bucket.indices)

    def use_hook(self, hook: RegisteredHook) -> None:
        """Reduces the dense buckets by a comm hook from now on."""
        self.hook = hook
        self._reductions = self._make_reductions()
        self._make_buckets([[member.index for member in bucket.members] for bucket in self.buckets])

    @property
    def first_launch_ns(self) -> int:
        """When the first reduction of the iteration was started; 0 before."""
        return self._reductions.first_launch_ns

    # ------------------------------------------------------------ the forward pass

    def rebuild(self) -> bool:
        """Makes new buckets once the order of readiness is known; returns whether it did. It does not communicate."""
        if self._order is None or self.has_rebuilt:
            return False
        self.has_rebuilt = True
        self._make_buckets(rebuilt_buckets(self._facts, self.options.caps, self._order))
        return True

    def check_finished(self) -> None:
        """Checks that the last iteration has ended if it began.

        Raises:
            UnusedParameters: gradients are missing; it names the parameters.
        """
        with self._lock:
            if not (self._armed and self._begun):
                return
            missing = self._missing()
            self._armed = False
            notice = self._notices.post(self.iteration, missing, final=True)
            raise UnusedParameters(notice.rank, missing, self.iteration)

    def arm(self, used: set[int] | None) -> None:
        """Expects the gradients of a backward pass.

        Args:
            used: the `id`s of the parameters that can get gradients in this pass; None for all.
        """
        with self._lock:
            self._reset()
            self._source = None
            if self._expected_calls is not None:
                self._unused = {index for index, count in enumerate(self._expected_calls) if not count}
            elif used is not None:
                self._unused = {index for address, index in self._index_of.items() if address not in used}
            if not self._armed:
                self.iteration += 1
            self._armed = True
            self._reductions.begin(self.iteration, self.group.size() if self.divide_by is None else self.divide_by)

    def _missing(self) -> list[str]:
        """The names of the parameters without gradients in this iteration, in the module's order."""
        waiting = {index for bucket in self.buckets for index in bucket.waiting}
        return [named.name for index, named in enumerate(self.parameters) if index in waiting]

    # ------------------------------------------------------------ gradients

    def gradient_added(self, index: int) -> None:
        """An ordinary backward pass has added to a parameter's `.grad`."""
        if self._armed:
            with self._lock:
                source = self._source
                if not isinstance(source, OrdinaryPass):
                    source = self._source = OrdinaryPass(self.options.view)
                self._ready(index, source)

    def gradient_captured(self, index: int, gradient: torch.Tensor) -> None:
        """A distributed backward pass is about to capture a parameter's gradient."""
        if self._armed:
            with self._lock:
                if not isinstance(self._source, DistributedPass):
                    self._source = DistributedPass()
                self._source.arrive(index, self.parameters[index].tensor, gradient)
                self._ready(index, self._source)

    def _ready(self, index: int, source: GradientSource) -> None:
        """Runs for every gradient on the thread that computes them, so it does little itself."""
        if not self._armed:
            return
        if not self._callback_queued:
            self._begin_pass(source)
        if self.options.static and not self._completes_static(index):
            return
        if not self._marked_unused:
            self._mark_unused()
        self._mark(index)

    def _begin_pass(self, source: GradientSource) -> None:
        """The first gradient of a backward pass has come."""
        if not self._begun:
            self._begun = True
            self.first_gradient_ns = time.time_ns()
        self._callback_queued = True
        source.at_end(self._pass_ended)

    def _completes_static(self, index: int) -> bool:
        """Counts a gradient in a static graph; whether it is the last one that the parameter gets."""
        self._calls[index] += 1
        if self._expected_calls is None:
            return False  # the first iteration only counts
        if self._calls[index] != self._expected_calls[index]:
            self._check_static(index)
            return False
        return True

    def _check_static(self, index: int) -> None:
        assert self._expected_calls is not None
        if self._calls[index] > self._expected_calls[index]:
            raise DataParallelError(
                f"Your training graph has changed in this iteration, which static_graph=True does not allow: parameter "
                f"{self.parameters[index].name!r} got {self._calls[index]} gradients in iteration {self.iteration} on "
                f"rank {self._world_rank}, and {self._expected_calls[index]} in the first one"
            )

    def _mark_unused(self) -> None:
        self._marked_unused = True
        for index in sorted(self._unused):
            self._mark(index)

    def _mark(self, index: int) -> None:
        waiting = self._bucket_of[index].waiting
        if index not in waiting:
            raise DataParallelError(
                f"Expected to mark a variable ready only once: parameter {self.parameters[index].name!r} got a second "
                f"gradient in iteration {self.iteration} on rank {self._world_rank}. Either reentrant checkpointing "
                "uses it several times (pass use_reentrant=False, or static_graph=True if every iteration is the "
                "same), or a second backward pass ran after one forward pass (call it under no_sync, or forward again)"
            )
        waiting.discard(index)
        if self._order is None and not self.options.dynamic_unused:
            self._ready_order.append(index)
        if not waiting:
            self._launch_complete()

    @property
    def _world_rank(self) -> int:
        return self.group.world_rank(self.group.rank())

    # ------------------------------------------------------------ reductions

    def _launch_complete(self) -> None:
        """Reduces the complete buckets in their order, except the last bucket (rule 5)."""
        while self._next < len(self.buckets) - (self.hook is None):
            bucket = self.buckets[self._next]
            if bucket.waiting:
                return
            self._next += 1
            self._launch(bucket, asynchronous=True)

    def _launch(self, bucket: Bucket, asynchronous: bool) -> None:
        if self.options.skip_unused and all(member.index in self._unused for member in bucket.members):
            self._skipped.add(bucket.number)
            return
        self._reductions.start(
            bucket,
            self._gradient,
            in_place=self._source is None or self._source.lends,
            is_last=bucket is self.buckets[-1],
            asynchronous=asynchronous,
        )

    def _gradient(self, member: BucketEntry) -> torch.Tensor | None:
        if self._source is None or member.index in self._unused:
            return None
        return self._source.gradient(member)

    # ------------------------------------------------------------ the end of the pass

    def outputs_reached(self) -> None:
        """The backward pass begins at the module's outputs; parameters without gradient at its end are unused."""
        if self._armed and not self._begun:
            source = DistributedPass() if in_distributed_pass() else OrdinaryPass(self.options.view)
            self._source = source
            source.at_end(self._close)

    def _pass_ended(self) -> None:
        """A backward pass, or a nested one, has ended."""
        with self._lock:
            self._callback_queued = False
            if not self._armed or self._must_close:
                return
            if any(bucket.waiting for bucket in self.buckets):
                self._warn_others()
            else:
                self._finish()

    @property
    def watches_outputs(self) -> bool:
        """Whether `outputs_reached` has to be called for this iteration."""
        return self._must_close

    @property
    def _must_close(self) -> bool:
        """Whether the iteration ends with the outermost backward pass even if gradients are missing."""
        return self.options.dynamic_unused or (self.options.static and self._expected_calls is None)

    def _warn_others(self) -> None:
        """Posts a notice about missing gradients. In rare cases another backward pass makes them ready."""
        if not self._notice_posted and not self._partial_passes:
            self._notice_posted = True
            self._notices.post(self.iteration, self._missing(), final=False)

    def _close(self) -> None:
        """Treats parameters without gradients as unused, and finishes."""
        with self._lock:
            if not self._armed:
                return
            if self.options.static and self._expected_calls is None:
                self._expected_calls = list(self._calls)
                self._unused = {index for index, count in enumerate(self._calls) if not count}
                for bucket in self.buckets:
                    bucket.waiting.clear()
            for bucket in self.buckets:
                self._unused |= bucket.waiting
                bucket.waiting.clear()
            self._begun = True
            self._launch_complete()
            self._finish()

    def _finish(self) -> None:
        """Waits for the reductions, delivers the results, and agrees with the other ranks on the next buckets."""
        self._partial_passes = self._partial_passes or self._notice_posted
        self._armed = False
        while self._next < len(self.buckets):
            self._next += 1
            self._launch(self.buckets[self._next - 1], asynchronous=False)
        self._share_used()
        for bucket in self.buckets:
            if bucket.number not in self._skipped:
                self._reductions.finish(bucket, self._deliver)
        self._reductions.conclude()
        self._share_order()
        self.done_ns = time.time_ns()

    def _deliver(self, members: list[BucketEntry], reduced: list[torch.Tensor], lasting: bool) -> None:
        """Delivers reduced gradients; gradients of parameters that no rank used stay unchanged."""
        assert self._source is not None
        used = self._globally_used
        if used is not None and not all(used[member.index] for member in members):
            pairs = [pair for pair in zip(members, reduced, strict=True) if used[pair[0].index]]
            members, reduced = [member for member, _ in pairs], [tensor for _, tensor in pairs]
        self._source.deliver(members, reduced, lasting)

    def _share_used(self) -> None:
        """Finds the parameters that some rank has used; the others keep their gradients."""
        first_static = self.options.static and self._globally_used is None
        if not (self.options.dynamic_unused or first_static):
            return
        mine = [index not in self._unused for index in range(len(self.parameters))]
        if self.options.skip_unused:
            self._globally_used = mine
            return
        used = torch.tensor(mine, dtype=torch.int32, device=self.parameters[0].tensor.device)
        collectives.all_reduce(used, group=self.group)
        self._globally_used = [count > 0 for count in used.tolist()]

    def _share_order(self) -> None:
        """Adopts rank 0's order of readiness, after an iteration in which all parameters became ready."""
        if self._order is not None or self.options.dynamic_unused:
            return
        if self.options.static and not self._ready_order:
            return  # the first iteration of a static graph records no order
        self._agree_on_order(self._ready_order)

    def _agree_on_order(self, mine: Sequence[int]) -> None:
        order = torch.tensor(mine, dtype=torch.int64, device=self.parameters[0].tensor.device)
        collectives.broadcast(order, group=self.group, group_src=0)
        self._order = order.tolist()

    # ------------------------------------------------------------ a rank without data

    def shadow(self) -> None:
        """Takes part in one iteration of other ranks with gradients of zero; see `DistributedDataParallel.join`."""
        with self._lock:
            self.rebuild()
            self.arm(set())
            self._source = NoPass()
            self._begun = True
            for bucket in self.buckets:
                bucket.waiting.clear()
            if self.options.static and self._expected_calls is None:
                self._expected_calls = [1] * len(self.parameters)
            elif not self.options.dynamic_unused:
                self._ready_order = list(range(len(self.parameters)))
            self._launch_complete()
            self._finish()
