"""The messages between the driver of a pipeline and the runners at its workers, the micro-batches in them, and errors.

RpcdistError
└── PipelineError                           a step failed; names stage, micro-batch and worker
    ├── PipelineTimeout (DeadlineExceeded)  it did not end in time
    └── PipelineAborted                     it was ended here because it failed elsewhere
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError
from rpcdist.parallel.pipeline._schedules import Action


class PipelineError(RpcdistError):
    """A step of a pipeline failed. The gradients of its stages are None now; the next step may be tried.

    Attributes:
        worker: where it failed.
        stages: the stage, or all stages of the worker if none of them is to blame.
        microbatch: the micro-batch; None if none is to blame.
        what: the action, e.g. "forward of micro-batch 2".
        reason: the type and the text of the original exception, which is the `__cause__` where it happened.
    """

    def __init__(self, worker: str, stages: Sequence[int], microbatch: int | None, what: str, reason: str) -> None:
        super().__init__(worker, stages, microbatch, what, reason)
        self.args = (worker, tuple(stages), microbatch, what, reason)  # an OSError among the bases keeps two of them
        self.worker = worker
        self.stages = tuple(stages)
        self.microbatch = microbatch
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        stages = f"stage{'s' * (len(self.stages) != 1)} {', '.join(map(str, self.stages))}"
        return f"{self.what} in {stages} on worker {self.worker!r} failed: {self.reason}"


class PipelineTimeout(PipelineError, DeadlineExceeded):
    """A worker waited for its neighbour until the time given to the step was over."""


class PipelineAborted(PipelineError):
    """The step was ended here because it failed on another worker, or because its driver gave up."""


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
        devices: of the stages of each worker.
    """

    key: str
    workers: tuple[str, ...]
    num_stages: int
    loss_fn: LossFunction | None
    devices: tuple[torch.device, ...]

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


def as_tuple(values: object) -> tuple[object, ...]:
    """The input or output of a stage as a tuple: that of a tuple or list, or of one value."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def batch_size(values: Sequence[object]) -> int:
    """The length of the first dimension of all tensors. Raises `ConfigError` if they differ or there are none."""
    sizes = {value.size(0) for value in values if isinstance(value, Tensor) and value.dim() > 0}
    if len(sizes) != 1:
        raise ConfigError(
            f"the tensors of a batch must agree about their first dimension, its size, but there are {sorted(sizes)}"
            if sizes
            else "a batch needs at least one tensor with a first dimension, which is cut into micro-batches"
        )
    (size,) = sizes
    if size == 0:
        raise ConfigError("the batch is empty")
    return size


def split_sizes(size: int, num_parts: int) -> list[int]:
    """`size` in at most `num_parts` positive parts that differ by at most one, larger ones first."""
    num_parts = min(size, num_parts)
    return [size // num_parts + (part < size % num_parts) for part in range(num_parts)]


def split(values: tuple[object, ...], sizes: Sequence[int]) -> list[tuple[object, ...]]:
    """One tuple per micro-batch: tensors are cut along their first dimension (views), other values are repeated."""
    columns = [
        value.split(list(sizes)) if isinstance(value, Tensor) and value.dim() > 0 else [value] * len(sizes)
        for value in values
    ]
    return [tuple(row) for row in zip(*columns, strict=True)]


def merge(parts: Sequence[object]) -> object:
    """The outputs of all micro-batches as those of the batch: tensors are joined along their first dimension.

    Tensors without dimensions become one with a first dimension over the micro-batches; tuples are merged place by
    place; other values become a list.
    """
    first = parts[0]
    if isinstance(first, tuple | list):
        rows = cast(Sequence[Sequence[object]], parts)
        return tuple(merge(list(column)) for column in zip(*rows, strict=True))
    if isinstance(first, Tensor):
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return torch.cat(tensors) if first.dim() > 0 else torch.stack(tensors)
    return list(parts)
