"""Plans a step: chooses the schedule, cuts the batch into micro-batches, and makes the order of each worker. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rpcdist.errors import ConfigError
from rpcdist.parallel.pipeline._microbatches import as_tuple, batch_size, split, split_sizes
from rpcdist.parallel.pipeline._schedules import Action, Schedule, forward_only, parse_action, schedule
from rpcdist.parallel.pipeline._simulation import validate
from rpcdist.parallel.pipeline._step_messages import PipelineConfig, StepOrder

Reduction = Literal["mean", "sum"]


def make_schedule(
    wanted: str | Sequence[Sequence[Action | str]], num_workers: int, num_stages: int, num_microbatches: int
) -> Schedule:
    """The schedule that the user named or wrote, checked. Raises `ConfigError`."""
    if num_workers < 1 or num_stages < 1:
        raise ConfigError("a pipeline needs at least one stage and one worker")
    if num_stages % num_workers:
        raise ConfigError(
            f"{num_stages} stages cannot be spread evenly over {num_workers} workers: stage s lives on worker "
            f"s % {num_workers}, and all have equally many"
        )
    if isinstance(wanted, str):
        return schedule(wanted, num_workers, num_microbatches, num_stages // num_workers)
    made = [[parse_action(action) if isinstance(action, str) else action for action in row] for row in wanted]
    if len(made) != num_workers:
        raise ConfigError(f"the schedule has {len(made)} lists of actions, but there are {num_workers} workers")
    validate(made, num_stages, num_microbatches)
    return made


def restrict(actions: Schedule, num_microbatches: int, *, with_backward: bool) -> Schedule:
    """The part of a schedule that a small batch needs: the actions of the first micro-batches.

    The part can be executed if the whole schedule can: an action waits for actions of the same micro-batch only.
    """
    kept = actions if with_backward else forward_only(actions)
    return [[action for action in row if action.microbatch < num_microbatches] for row in kept]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, cut into micro-batches.

    Attributes:
        inputs: the arguments of the first stage, for each micro-batch.
        targets: the arguments of the loss function, for each micro-batch; empty if there is no loss.
        weights: weight of each micro-batch in the loss of the batch.
    """

    inputs: list[tuple[object, ...]]
    targets: list[tuple[object, ...]]
    weights: list[float]


def make_batch(inputs: object, targets: object, num_microbatches: int, reduction: Reduction) -> Batch:
    """Cuts a batch into micro-batches; `targets` is None where there is no loss. Raises `ConfigError`."""
    input_values = as_tuple(inputs)
    target_values = () if targets is None else as_tuple(targets)
    size = batch_size((*input_values, *target_values))
    sizes = split_sizes(size, num_microbatches)
    weights = [part / size if reduction == "mean" else 1.0 for part in sizes]
    return Batch(split(input_values, sizes), split(target_values, sizes) if target_values else [], weights)


def make_orders(
    step: int, actions: Schedule, config: PipelineConfig, batch: Batch, *, with_outputs: bool, timeout_s: float
) -> list[StepOrder]:
    """The order of each worker: that of the first stage gets the inputs, that of the last stage the targets."""
    last = config.worker_index(config.num_stages - 1)
    return [
        StepOrder(
            step,
            row,
            batch.inputs if worker == 0 else [],
            batch.targets if worker == last else [],
            batch.weights if worker == last else [],
            with_outputs,
            timeout_s,
        )
        for worker, row in enumerate(actions)
    ]
