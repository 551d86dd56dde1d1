"""The messages between the driver of a pipeline and the runners at its workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from rpcdist.parallel.pipeline._schedules import Action

LossFunction = Callable[..., Tensor]
StageSource = nn.Module | Callable[[], nn.Module]
"""A module, or a function that makes the module at its worker."""


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The facts about a pipeline that every runner knows from its construction on.

    Attributes:
        key: names the pipeline; the same on all its workers.
        workers: names of the workers; stage `s` lives on `workers[s % len(workers)]`.
        num_stages: number of stages in the whole pipeline.
        loss_fn: called with the output of the last stage, and with the targets.
    """

    key: str
    workers: tuple[str, ...]
    num_stages: int
    loss_fn: LossFunction | None

    def worker_index(self, stage: int) -> int:
        """Index of the worker on which a stage lives."""
        return stage % len(self.workers)

    def stages_of(self, worker: int) -> range:
        """The stages that live on a worker."""
        return range(worker, self.num_stages, len(self.workers))

    def whole_step(self, worker: int, step: int) -> tuple[str, tuple[int, ...], None, str]:
        """The first arguments of a `PipelineError` that blames a worker, but none of its actions."""
        return self.workers[worker], tuple(self.stages_of(worker)), None, f"step {step}"


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The work of one runner in one step.

    Attributes:
        step: counts up; tensors of earlier steps that arrive late are dropped.
        actions: of this worker, in order.
        inputs: one tuple per micro-batch; empty unless the worker has the first stage.
        targets: one tuple per micro-batch; empty unless the worker has the last stage.
        weights: weight of each micro-batch in the loss of the batch; empty unless the worker has the last stage.
        with_outputs: whether the report shall have the outputs of the last stage.
        timeout_s: limit of the whole step.
    """

    step: int
    actions: list[Action]
    inputs: list[tuple[object, ...]]
    targets: list[tuple[object, ...]]
    weights: list[float]
    with_outputs: bool
    timeout_s: float


@dataclass(slots=True)
class StepReport:
    """The results of one runner in one step.

    Attributes:
        losses: by micro-batch, from the worker of the last stage.
        outputs: by micro-batch, from the worker of the last stage, if they were asked for.
        times: start and end of each action, in seconds on the monotonic clock of the worker.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, object] = field(default_factory=dict)
    times: list[tuple[float, float]] = field(default_factory=list)


def clock_s() -> float:
    """The clock of this worker that measures the times of actions."""
    return time.monotonic()
