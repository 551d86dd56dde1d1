"""The driver's part of a step: makes all runners execute their orders, and ends the step everywhere after a failure.

Pure functions plan it: the schedule, the batch split into micro-batches, and the order of each worker.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Literal

import rpcdist.rpc as rpc
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError, WorkerLost, described_error, text_of
from rpcdist.parallel.pipeline._schedules import Action, Schedule, forward_only, parse_action, schedule
from rpcdist.parallel.pipeline._simulation import validate
from rpcdist.parallel.pipeline._stage_runner import StageRunner
from rpcdist.parallel.pipeline._step_messages import (
    PipelineAborted,
    PipelineConfig,
    PipelineError,
    PipelineTimeout,
    StepOrder,
    StepReport,
    as_tuple,
    batch_size,
    split,
    split_sizes,
)
from rpcdist.time_limits import ANSWER_GRACE_S, CONNECTION_CLOSE_LIMIT_S

Reduction = Literal["mean", "sum"]


def make_schedule(
    wanted: str | Sequence[Sequence[Action | str]], num_workers: int, num_stages: int, num_microbatches: int
) -> Schedule:
    """Returns the user's schedule, checked. Raises `ConfigError`."""
    if num_workers < 1 or num_stages < 1:
        raise ConfigError("a pipeline needs at least one stage and one worker")
    if num_stages % num_workers:
        raise ConfigError(
            f"{num_stages} stages cannot be spread evenly over {num_workers} workers: stage s is on worker "
            f"s % {num_workers}, and all workers need equally many"
        )
    if isinstance(wanted, str):
        return schedule(wanted, num_workers, num_microbatches, num_stages // num_workers)
    made = [[parse_action(action) if isinstance(action, str) else action for action in row] for row in wanted]
    if len(made) != num_workers:
        raise ConfigError(f"the schedule has {len(made)} lists of actions, but there are {num_workers} workers")
    validate(made, num_stages, num_microbatches)
    return made


def restrict(actions: Schedule, num_microbatches: int, *, with_backward: bool) -> Schedule:
    """Returns the part of a schedule for a small batch: the actions of the first micro-batches.

    It can be executed if the whole schedule can, because an action waits only for actions of the same micro-batch.
    """
    kept = actions if with_backward else forward_only(actions)
    return [[action for action in row if action.microbatch < num_microbatches] for row in kept]


Batch = tuple[list[tuple[object, ...]], list[tuple[object, ...]], list[float]]
"""For each micro-batch, the arguments of the first stage and of the loss function, and the weight of its loss."""


def make_batch(inputs: object, targets: object, num_microbatches: int, reduction: Reduction) -> Batch:
    """Splits a batch into micro-batches; `targets` is None without a loss. Raises `ConfigError`."""
    input_values = as_tuple(inputs)
    target_values = () if targets is None else as_tuple(targets)
    size = batch_size((*input_values, *target_values))
    sizes = split_sizes(size, num_microbatches)
    weights = [part / size if reduction == "mean" else 1.0 for part in sizes]
    return split(input_values, sizes), split(target_values, sizes) if target_values else [], weights


def make_orders(
    step: int, actions: Schedule, config: PipelineConfig, batch: Batch, *, with_outputs: bool, timeout_s: float
) -> list[StepOrder]:
    """Makes the order of each worker; the first stage's has the inputs, the last stage's the targets."""
    inputs, targets, weights = batch
    last = config.worker_index(config.num_stages - 1)
    return [
        StepOrder(
            step,
            row,
            inputs if worker == 0 else [],
            targets if worker == last else [],
            weights if worker == last else [],
            with_outputs,
            timeout_s,
        )
        for worker, row in enumerate(actions)
    ]


def execute_step(
    config: PipelineConfig, runners: Sequence[rpc.RRef[StageRunner]], orders: Sequence[StepOrder]
) -> list[StepReport]:
    """Makes all runners execute their orders; returns their reports in the order of the workers.

    Raises:
        PipelineError: an action failed, or a worker.
        PipelineTimeout: the step did not end in time.
    """
    step, timeout_s = orders[0].step, orders[0].timeout_s
    # A runner ends the step at its timeout with an error that names the missing tensor. The driver waits longer for it.
    limit_s = timeout_s + ANSWER_GRACE_S if math.isfinite(timeout_s) else 0
    calls: list[rpc.Future[StepReport]] = []
    try:
        for runner, order in zip(runners, orders, strict=True):
            calls.append(runner.rpc_async(limit_s).run(order))
            calls[-1].is_quiet = True  # the driver reports only one error, perhaps that of another call
        for done in rpc.as_completed(calls):
            done.value()
        return [call.value() for call in calls]
    except Exception as exc:
        error = _end_failed(config, runners, step, calls, exc)
    except BaseException:
        _end_failed(config, runners, step, calls, RpcdistError("the driver was interrupted"))
        raise
    raise error  # not in the `except` block: `from` would replace its `__cause__`, the remote traceback


def _end_failed(
    config: PipelineConfig,
    runners: Sequence[rpc.RRef[StageRunner]],
    step: int,
    calls: Sequence[rpc.Future[StepReport]],
    exc: Exception,
) -> Exception:
    """Ends the step on all workers; returns the error that caused the others."""
    aborts = [runner.rpc_async(CONNECTION_CLOSE_LIMIT_S).abort(step, text_of(exc)) for runner in runners]
    for abort in aborts:
        abort.is_quiet = True
    deadline = Deadline.after(CONNECTION_CLOSE_LIMIT_S)
    for call in [*aborts, *calls]:
        with contextlib.suppress(Exception):
            call.wait(deadline.wait_s())
    errors = [exc, *(error for call in calls if call.done() and (error := call.exception()) is not None)]
    stuck = [_stuck(config, worker, step) for worker, call in enumerate(calls) if not call.done()]
    return min([*(_located(config, step, calls, error) for error in errors), *stuck], key=_rank)


def _located(
    config: PipelineConfig, step: int, calls: Sequence[rpc.Future[StepReport]], error: BaseException
) -> Exception:
    """Returns the error if it names the place of the failure, otherwise an error that does."""
    if isinstance(error, PipelineError):
        return error
    worker = next((at for at, call in enumerate(calls) if call.done() and call.exception() is error), None)
    if worker is None:
        return error if isinstance(error, Exception) else RpcdistError(text_of(error))
    if isinstance(error, DeadlineExceeded):
        return _stuck(config, worker, step)
    located = PipelineError(*config.whole_step(worker, step), described_error(error))
    located.__cause__ = error
    return located


def _stuck(config: PipelineConfig, worker: int, step: int) -> PipelineTimeout:
    """Makes the error for a worker that does not notice the end of the step."""
    reason = "it is still busy with a forward or backward that takes too long"
    return PipelineTimeout(*config.whole_step(worker, step), reason)


def _rank(error: Exception) -> int:
    """Orders errors: one with a small rank causes those with larger ranks."""
    if isinstance(error, PipelineAborted):
        return 4
    if isinstance(error, PipelineTimeout):
        return 1 if error.microbatch is None else 3  # a worker that is not ready, or one that waits for it
    if isinstance(error, PipelineError):
        return 1 if isinstance(error.__cause__, WorkerLost) else 0
    return 2
