"""The reducer: averages gradients over the ranks, bucket by bucket, during the backward pass.

Rules:
 1. Buckets are reduced in order, each as soon as it and all buckets before it are complete. So all ranks issue the
    same operations in the same order, although their gradients may become ready in different orders.
 2. `IterationState` decides which gradients an iteration waits for, when buckets are reduced, and when it ends; the
    reducer carries that out. An iteration ends with a whole backward pass, with all passes nested in it: then buckets
    are reduced and the results delivered.
 3. The source of gradients hides whether gradients come from an ordinary or a distributed backward pass.
 4. All ranks have the same buckets: the parameters determine them at first, then the order of readiness on rank 0.
 5. The last bucket is reduced at the end of the pass: no computation is left to overlap with, so no other thread is
    needed.
 6. If the program ends iterations itself, all reductions are started during the pass and work on copies: until the
    program calls `finalize`, `.grad` has this rank's gradients, and must not change.

Hooks run on the engine's threads; one lock guards the reducer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import begins_traceback, text_of
from rpcdist.parallel._ddp._bucket_reduction import Bucket, BucketReductions
from rpcdist.parallel._ddp._buckets import DenseBucket, SparseBucket, initial_buckets, rebuilt_buckets
from rpcdist.parallel._ddp._comm_hook import RegisteredHook
from rpcdist.parallel._ddp._ddp_arguments import ReducerOptions
from rpcdist.parallel._ddp._ddp_errors import (
    DataParallelError,
    UnusedParameters,
    changed_gradients,
    list_names,
    not_finalized,
    nothing_to_finalize,
    unexpected_gradient,
)
from rpcdist.parallel._ddp._finite_check import FiniteCheck
from rpcdist.parallel._ddp._gradient_sources import (
    AccumulationNodes,
    DistributedPass,
    GradientSource,
    NoPass,
    OrdinaryPass,
    adds_to_leaves,
    due_parameters,
    in_distributed_pass,
    refuse_changes,
    step_and_clear,
    take_over,
    versions_of,
    watch_outputs,
)
from rpcdist.parallel._ddp._iteration_state import (
    ARMED,
    AVERAGING,
    AWAITED,
    ENTERED,
    IDLE,
    IterationState,
    UnexpectedGradient,
)
from rpcdist.parallel._ddp._parameters import Trained
from rpcdist.profile_ranges import span_taps


class Reducer:
    """Averages the gradients of a model; see the rules at the top of the file.

    Args:
        parameters: in the same order on all ranks.
        options: the same on all ranks.
        syncs: returns whether backward passes average now; False under `no_sync`.
    """

    def __init__(
        self, parameters: Sequence[Trained], group: ProcessGroup, options: ReducerOptions, syncs: Callable[[], bool]
    ) -> None:
        self.parameters = list(parameters)
        self.options = options
        self.divide_by: float | None = None  # None: the size of the group
        self.by_hand = False  # whether the program ends iterations itself
        self.joins = False  # under `join`, where ranks without data mirror one iteration for each forward pass
        self.hook: RegisteredHook | None = None
        self.error = ""  # the text of the last error, for logging data
        self.forward_began_ns = self.forward_ended_ns = 0
        self.first_gradient_ns = self.computed_ns = self.done_ns = 0
        self.num_buckets_reduced = 0
        self._tensors = [each.tensor for each in parameters]
        self._lock = threading.RLock()
        self._nodes: AccumulationNodes = {}
        self._syncs = syncs
        self._state = IterationState(len(self.parameters), options.rule, options.skip_unused)
        self._source: GradientSource | None = None
        self._shadows: NoPass | None = None
        self._versions = versions_of(self._tensors)  # at the start of the running pass
        self._left: list[tuple[torch.Tensor | None, int]] = []  # gradients and versions, until the program ends it
        self._stepped: list[nn.Parameter] | None = None  # by their own optimizers; None until that is known
        self.use_group(group)

    def use_group(self, group: ProcessGroup) -> None:
        """Changes the group, and starts again with the initial buckets."""
        self.group = group
        self._key = f"ddp/{group.next_number('ddp')}"
        # The order of readiness on rank 0, which the next forward pass uses for buckets once it is known.
        self.readiness: Literal["unknown", "known", "used"] = "unknown"
        self._order: list[int] = []
        self._state.restart()
        self._reductions = self._make_reductions()
        self._make_buckets(initial_buckets(self.parameters, self.options.caps, self.options.dynamic_unused))
        self.initial_bucket_bytes = [bucket.num_bytes for bucket in self.buckets]

    def _make_reductions(self) -> BucketReductions:
        results_are_equal = self.hook is None or self.hook.leaves_equal_bits
        finite = FiniteCheck(self.group, self.options.check_finite, results_are_equal)
        return BucketReductions(self.group, self._key, finite, self.hook)

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> None:
        self.buckets: list[Bucket] = []
        for number, bucket in enumerate(indices):
            members = [self.parameters[index] for index in bucket]
            if members[0].sparse:
                self.buckets.append(SparseBucket(number, members[0], self.group))
            else:
                self.buckets.append(DenseBucket(number, members, flat=self.hook is not None))
        self._state.use_buckets(indices, keeps_last=self.hook is None and not self.by_hand)

    def use_hook(self, hook: RegisteredHook) -> None:
        """Reduces dense buckets with a comm hook from now on."""
        self._refuse_if_awaited()
        self.hook = hook
        self._reductions = self._make_reductions()
        self._make_buckets_again()

    def _make_buckets_again(self) -> None:
        self._make_buckets([[member.index for member in bucket.members] for bucket in self.buckets])

    def end_by_hand(self, required: bool) -> None:
        """Sets whether the program ends iterations with `finalize`.

        Raises:
            DataParallelError: an iteration has begun.
        """
        with self._lock:
            if required == self.by_hand:
                return
            self._refuse_if_awaited()
            if self._state.phase not in (IDLE, ARMED):
                raise DataParallelError(
                    f"require_manual_backward_finalization was set on rank {self._world_rank} while iteration "
                    f"{self.iteration} is averaged: set it before forward, or after finalize_backward()"
                )
            self.by_hand = required
            self._make_buckets_again()

    @property
    def iteration(self) -> int:
        """The number of the last begun iteration, from 1."""
        return self._state.iteration

    @property
    def ready_order(self) -> list[int]:
        """The parameters in the order in which their gradients became ready in this iteration."""
        return self._state.ready_order

    @property
    def first_launch_ns(self) -> int:
        """The time when the first reduction of the iteration was started; 0 before."""
        return self._reductions.first_launch_ns

    @property
    def unused_bytes(self) -> int:
        """The size of the parameters that this rank did not use in the last iteration."""
        return sum(self.parameters[index].tensor.nbytes for index in self._state.unused)

    def _ddp_graph_static(self) -> bool:
        """Whether `static_graph=True` would have worked so far; torch's name, which scripts read."""
        return self._state.could_be_static

    # ------------------------------------------------------------ the forward pass

    def rebuild(self) -> bool:
        """Makes new buckets if the order of readiness is known; returns whether it did. Does not communicate."""
        if self.readiness != "known" or self._state.phase is AWAITED:
            return False
        self.readiness = "used"
        self._make_buckets(rebuilt_buckets(self.parameters, self.options.caps, self._order))
        return True

    def check_finished(self) -> None:
        """Checks that the last iteration has ended if it began.

        Raises:
            UnusedParameters: gradients are missing; names the parameters.
        """
        with self._lock:
            self._refuse_if_awaited()
            indices = self._state.abandon()
            if indices is None:
                return
            self._post_notice(f"has continued without {self._gradients_of(indices)}", is_final=True)
            missing = [self.parameters[index].name for index in indices]
            error = UnusedParameters(self._world_rank, missing, self.iteration, self.options.rule, indices)
            self.error = text_of(error)
            raise error

    _rebuild_buckets = rebuild

    def _delay_all_reduce(self) -> None:
        """Does nothing: Lightning calls it after the first pass of a static graph, which is averaged already."""

    def prepare_for_backward(self, output: object) -> None:
        """Expects the gradients of a backward pass; libraries call it by torch's name after a forward under `no_sync`.

        Args:
            output: the result of the forward pass. If it has no tensors, as from those libraries, the next pass that
                adds gradients counts.
        """
        watched = watch_outputs(output, partial(_outputs_reached, weakref.ref(self)))
        with self._lock:
            self._refuse_if_awaited()
            self._prepare()
            self._state.arm(watched)
            self._begin_iteration()

    def _prepare(self) -> None:
        if self._stepped is None:
            self._stepped = take_over(self.parameters)
        self._source = None

    def pause(self) -> None:
        """A forward pass that does not synchronise: its gradients belong to no iteration."""
        with self._lock:
            self._refuse_if_awaited()
            self._state.pause()

    def _begin_iteration(self) -> None:
        self.first_gradient_ns = self.computed_ns = self.done_ns = 0
        self._reductions.begin(self._state.iteration, self.group.size() if self.divide_by is None else self.divide_by)

    def _reopen(self) -> None:
        """Begins an iteration in another backward pass of a forward pass whose iteration has ended."""
        if self.joins and not self._state.num_unused_forwards:
            raise DataParallelError(
                "a second backward pass ran after one forward pass under join(), but ranks without inputs take part in "
                "only one. Add up the losses before backward, or call backward under no_sync"
            )
        self._state.reopen()
        self._begin_iteration()

    # ------------------------------------------------------------ passes

    def outputs_reached(self) -> None:
        """Notes that a pass, perhaps one of `torch.autograd.grad`, has reached outputs of a synchronised forward."""
        with self._lock:
            phase = self._state.phase
            if (phase.is_open and not phase.in_pass) or (phase is IDLE and self._syncs()):
                self._begin_pass(adds=False)
            self._state.reach(builds_graph=torch.is_grad_enabled())  # create_graph=True

    def _begin_pass(self, adds: bool) -> None:
        """Begins a pass; `adds` says whether it is known to add gradients."""
        state, distributed = self._state, in_distributed_pass()
        due: Sequence[int] = ()
        if state.ends_with_pass:
            due = range(len(self.parameters)) if distributed else due_parameters(self.parameters, self._nodes)
            if not (adds or due or adds_to_leaves()):
                return  # torch.autograd.grad
            if not state.phase.is_open:
                self._reopen()
        if not distributed:
            self._source = OrdinaryPass(self.options.view and not self.by_hand)
        elif not (state.phase.is_open and isinstance(self._source, DistributedPass)):  # it may take several calls
            self._source = DistributedPass()
        assert self._source is not None
        self._versions = versions_of(self._tensors)
        self._source.at_end(partial(self._pass_ended, state.begin_pass(due)))

    @begins_traceback
    def _pass_ended(self, number: int) -> None:
        with self._lock:
            if not self._state.runs(number):  # a forward pass inside it has ended it
                return
            if self._state.end_pass(number):
                self._noting_errors(self._leave if self.by_hand else self._finish)
            elif self._state.owes_notice():  # rarely, another backward pass makes the missing gradients ready
                missing = self._gradients_of(sorted(self._state.missing))
                self._post_notice(f"ended a backward pass without {missing}", is_final=False)

    def _gradients_of(self, indices: Sequence[int]) -> str:
        return f"gradients of {list_names([self.parameters[index].name for index in indices])}"

    def _post_notice(self, problem: str, is_final: bool) -> None:
        self._reductions.post_notice(self.iteration, f"{problem} in iteration {self.iteration}", is_final)

    def _noting_errors(self, ends: Callable[[], None]) -> None:
        try:
            ends()
        except Exception as exc:
            self.error = text_of(exc)
            raise

    # ------------------------------------------------------------ ends by the program

    def ends_after_pass(self) -> bool:
        """Whether `finalize` must wait until the expected backward pass has ended."""
        return self._state.counts

    def _leave(self) -> None:
        """Starts the remaining reductions; the program ends the iteration."""
        rest = self._state.finish(awaits=True)
        self._left = [(each.grad, 0 if each.grad is None else each.grad._version) for each in self._tensors]
        for number in rest:
            self._launch(number, asynchronous=True)
        self.computed_ns = time.time_ns()

    @begins_traceback
    def finalize(self) -> None:
        """Ends an iteration for the program, after its backward pass or in a hook, when all gradients are ready.

        Raises:
            DataParallelError: no iteration has begun, gradients are missing, or `.grad` or parameters were changed.
        """
        with self._lock:
            if self.by_hand and self._state.end_in_pass():
                self._noting_errors(self._finish)
                return
            if self._state.phase is not AWAITED:
                missing = [self.parameters[index].name for index in sorted(self._state.missing)]
                begun = self._state.phase not in (IDLE, ARMED)
                raise nothing_to_finalize(self.by_hand, missing if begun else [], self.iteration, self._world_rank)
            self._state.end_awaited()
            self._noting_errors(self._end_left)

    def _end_left(self) -> None:
        pairs = zip(self.parameters, self._left, strict=True)
        changed = [each.name for each, (gradient, version) in pairs if not _is_left(each.tensor, gradient, version)]
        self._left = []
        if changed:
            raise self._giving_up(changed_gradients(changed, self.iteration, self._world_rank))
        self._conclude()

    def _refuse_if_awaited(self) -> None:
        if self._state.phase is AWAITED:
            raise not_finalized(self.iteration, self._world_rank)

    # ------------------------------------------------------------ gradients

    def gradient_added(self, index: int) -> None:
        """Notes that an ordinary backward pass has added to a parameter's `.grad`."""
        with self._lock:
            if self._state.phase is AWAITED:
                raise self._giving_up(not_finalized(self.iteration, self._world_rank))
            if self._state.phase is not IDLE or self._state.takes(self._syncs()):
                self._ready(index, captured=False)
                return
            try:
                self._state.add_outside(index)
            except UnexpectedGradient as exc:
                raise self._refusal(exc) from None

    def gradient_captured(self, index: int, gradient: torch.Tensor) -> None:
        """Notes that a distributed backward pass is about to capture a parameter's gradient."""
        with self._lock:
            if not self._state.takes(self._syncs()):
                return
            if self.by_hand:
                raise self._giving_up(
                    DataParallelError(
                        "require_manual_backward_finalization is for loss.backward(): a pass of rpcdist.autograd ends "
                        "when its gradients are averaged. Set it to False before the forward pass"
                    )
                )
            if not self._state.phase.in_pass:
                self._begin_pass(adds=True)
            if isinstance(self._source, DistributedPass):
                self._source.arrive(index, self.parameters[index].tensor, gradient)
            self._ready(index, captured=True)

    def _ready(self, index: int, captured: bool) -> None:
        """Handles a ready gradient, on the thread that computes gradients, so it does little."""
        if self._state.phase is not AVERAGING:
            self._enter()
        try:
            complete = self._state.add(index, captured)
        except UnexpectedGradient as exc:
            raise self._refusal(exc) from None
        for number in complete:
            self._launch(number, asynchronous=True)

    def _enter(self) -> None:
        """Begins the pass and the iteration, if necessary, when a gradient arrives."""
        if not self._state.phase.in_pass:
            self._begin_pass(adds=True)
        if not self._state.phase.is_open:
            self._reopen()
        if self._state.phase is ENTERED:
            self.first_gradient_ns = time.time_ns()

    def _refusal(self, unexpected: UnexpectedGradient) -> DataParallelError:
        return self._giving_up(
            unexpected_gradient(
                unexpected, self.parameters[unexpected.index].name, self.iteration, self._world_rank, self.options.rule
            )
        )

    def _giving_up(self, error: DataParallelError) -> DataParallelError:
        """Notifies the other ranks of an error, since they may wait for this rank's next reduction."""
        self.error = text_of(error)
        self._reductions.post_notice(
            self.iteration, f"has given up iteration {self.iteration}: {self.error}", is_final=True
        )
        return error

    @property
    def _world_rank(self) -> int:
        return self.group.world_rank(self.group.rank())

    # ------------------------------------------------------------ reductions

    def _launch(self, number: int, asynchronous: bool) -> None:
        bucket = self.buckets[number]
        self._reductions.reduce(
            bucket,
            self._gradient,
            in_place=(self._source is None or self._source.lends) and not self.by_hand,
            is_last=bucket is self.buckets[-1],
            asynchronous=asynchronous,
        )

    def _gradient(self, member: Trained) -> torch.Tensor | None:
        """Returns the gradient that this rank contributes for a parameter."""
        gradient = None if self._source is None else self._source.gradient(member)
        if gradient is None or self._state.uses(member.index):
            return gradient
        return gradient.clone()  # the original must not change if no other rank uses the parameter

    def _finish(self) -> None:
        """Starts the remaining reductions, and ends the iteration."""
        rest = self._state.finish()
        self.computed_ns = time.time_ns()
        for number in rest:
            self._launch(number, asynchronous=False)
        self._conclude()

    def _conclude(self) -> None:
        """Waits for the reductions, delivers the results, and agrees on the next buckets with the other ranks."""
        state = self._state
        knew_graph = state.static_use is not None
        self._used = self._share_used()
        for number in state.reduced:
            self._reductions.finish(self.buckets[number], self._deliver)
        self._reductions.conclude()
        if isinstance(self._source, OrdinaryPass):
            state.settle()
            refuse_changes(self.parameters, self._versions, state.iteration, self._world_rank)
            step_and_clear(self._stepped or ())
        self._share_order(knew_graph)
        self.num_buckets_reduced = len(state.reduced)
        self.done_ns = time.time_ns()
        if span_taps and self.first_gradient_ns:
            self._report_times()

    def _report_times(self) -> None:
        """Reports when gradients were computed in this iteration, and when it ended."""
        shift_s = time.monotonic() - time.time()
        ends_ns = {"gradients": self.computed_ns, "iteration": self.done_ns}
        for tap in list(span_taps):
            for what, end_ns in ends_ns.items():
                tap("DDP", f"{what} {self.iteration}", self.first_gradient_ns / 1e9 + shift_s, end_ns / 1e9 + shift_s)

    def _deliver(self, members: list[Trained], reduced: list[torch.Tensor], lasting: bool) -> None:
        """Delivers reduced gradients, except those of parameters that no rank used."""
        assert self._source is not None
        used = self._used
        if used is not None and not all(member.index in used for member in members):
            pairs = [pair for pair in zip(members, reduced, strict=True) if pair[0].index in used]
            members, reduced = [member for member, _ in pairs], [tensor for _, tensor in pairs]
        self._source.deliver(members, reduced, lasting)

    def _share_used(self) -> frozenset[int] | None:
        """Returns the parameters that some rank has used; None if all are used. Others keep their gradients."""
        if not self._state.tracks or self._state.static_use is not None:
            return self._state.static_use
        flags = torch.zeros(2, len(self.parameters), dtype=torch.int32, device=self.parameters[0].tensor.device)
        flags[0, [each.index for each in self.parameters if self._contributes(each)]] = 1
        flags[1, sorted(self._state.in_graph)] = 1
        if not self.options.skip_unused:
            collectives.all_reduce(flags, group=self.group)
        used, in_graph = (frozenset(row.nonzero().flatten().tolist()) for row in flags)
        if self.options.static:
            self._state.static_use = in_graph
        return used

    def _contributes(self, member: Trained) -> bool:
        assert self._source is not None
        return self._state.uses(member.index) and self._source.gradient(member) is not None

    def _share_order(self, knew_graph: bool) -> None:
        """Adopts rank 0's order of readiness, after an iteration in which all parameters became ready."""
        if self.readiness != "unknown" or self.options.dynamic_unused:
            return
        if self.options.static and not knew_graph:
            return  # the first iteration of a static graph records no order
        rest = set(range(len(self.parameters))).difference(self.ready_order)
        mine = [*self.ready_order, *sorted(rest)]
        order = torch.tensor(mine, dtype=torch.int64, device=self.parameters[0].tensor.device)
        collectives.broadcast(order, group=self.group, group_src=0)
        self._order, self.readiness = order.tolist(), "known"

    # ------------------------------------------------------------ a rank without data

    def shadow(self) -> None:
        """Takes part in one iteration of other ranks with gradients of zero; see `DistributedDataParallel.join`."""
        with self._lock:
            self._refuse_if_awaited()
            self.rebuild()
            self._prepare()
            if self._shadows is None:
                self._shadows = NoPass(self._tensors, self.options.view)
            self._source = self._shadows
            complete = self._state.mirror()
            self._begin_iteration()
            for number in complete:
                self._launch(number, asynchronous=True)
            self._finish()

    def end_shadows(self) -> None:
        """Restores this rank's `.grad` when all ranks have joined, since the others' iterations have replaced it."""
        if self._shadows is not None:
            self._shadows.restore()
            self._shadows = None


def _is_left(parameter: torch.Tensor, gradient: torch.Tensor | None, version: int) -> bool:
    return parameter.grad is gradient and (gradient is None or gradient._version == version)


def _outputs_reached(reference: weakref.ref[Reducer]) -> None:
    reducer = reference()
    if reducer is not None:
        reducer.outputs_reached()
