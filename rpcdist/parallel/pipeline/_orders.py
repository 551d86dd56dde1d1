"""What the driver and the runners of a pipeline tell one another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from rpcdist.parallel.pipeline._schedules import Action

__all__ = ["LossFunction", "Order", "Plan", "Report", "StageSource", "clock_s"]

LossFunction = Callable[..., Tensor]
StageSource = nn.Module | Callable[[], nn.Module]
"""A stage, or what makes it at its worker."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every runner of a pipeline knows, from its construction on.

    Attributes:
        key: names the pipeline, on all its workers.
        workers: the names of the workers; stage `s` lives on `workers[s % len(workers)]`.
        num_stages: of the whole pipeline.
        loss_fn: called with the output of the last stage, and with the targets.
    """

    key: str
    workers: tuple[str, ...]
    num_stages: int
    loss_fn: LossFunction | None

    def worker_of(self, stage: int) -> str:
        return self.workers[stage % len(self.workers)]


@dataclass(frozen=True, slots=True)
class Order:
    """What one runner shall do in one step.

    Attributes:
        step: counts up; tensors of earlier steps that arrive late are dropped.
        actions: of this worker, in order.
        inputs: of each micro-batch, for the worker of the first stage.
        targets: of each micro-batch, for the worker of the last stage.
        weights: of each micro-batch in the loss of the batch.
        with_outputs: send the outputs of the last stage back.
        timeout_s: of the whole step.
    """

    step: int
    actions: list[Action]
    inputs: list[tuple[object, ...]]
    targets: list[tuple[object, ...]]
    weights: list[float]
    with_outputs: bool
    timeout_s: float


@dataclass(slots=True)
class Report:
    """What one runner did in one step; times in seconds on its own monotonic clock."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, object] = field(default_factory=dict)
    times: list[tuple[float, float]] = field(default_factory=list)  # start and end of each action


def clock_s() -> float:
    """The clock of this worker's times."""
    return time.monotonic()
