"""The messages between the driver of a pipeline and the runners at its workers, the micro-batches in them, and errors.

A `Mailbox` holds the tensors that arrive for a step until its actions need them.

[Note: receivers] Neighbours address a runner by the pipeline's key and the worker's index, not by a remote reference,
because references between workers in both directions would keep each other alive. The runner lives as long as the
driver's reference to it.

RpcdistError
└── PipelineError                           a step failed; names stage, micro-batch and worker
    ├── PipelineTimeout (DeadlineExceeded)  it did not end in time
    └── PipelineAborted                     it was ended here because it failed elsewhere
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError
from rpcdist.parallel.pipeline._schedules import Action, Kind
from rpcdist.rpc._current import agent_local
from rpcdist.rpc._devices.handler_streams import ArrivedTensors
from rpcdist.rpc._executors.blocking import blocking


class PipelineError(RpcdistError):
    """A step of a pipeline failed. The gradients of its stages are None now; the next step may be tried.

    Attributes:
        worker: the worker on which it failed.
        stages: the stage, or all stages of the worker if no single stage failed.
        microbatch: the micro-batch; None if no single micro-batch failed.
        what: the action, e.g. "forward of micro-batch 2".
        reason: the type and text of the original exception, which is the `__cause__` on that worker.
    """

    def __init__(self, worker: str, stages: Sequence[int], microbatch: int | None, what: str, reason: str) -> None:
        super().__init__(worker, stages, microbatch, what, reason)
        self.args = (worker, tuple(stages), microbatch, what, reason)  # OSError, a base class, keeps only two
        self.worker = worker
        self.stages = tuple(stages)
        self.microbatch = microbatch
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        stages = f"stage{'s' * (len(self.stages) != 1)} {', '.join(map(str, self.stages))}"
        return f"{self.what} in {stages} on worker {self.worker!r} failed: {self.reason}"


class PipelineTimeout(PipelineError, DeadlineExceeded):
    """A worker waited for its neighbour until the step's limit."""


class PipelineAborted(PipelineError):
    """The step was ended on this worker because it failed on another worker, or because its driver gave up."""


LossFunction = Callable[..., Tensor]
StageSource = nn.Module | Callable[[], nn.Module]
"""A module, or a function that makes the module at its worker."""


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The configuration of a pipeline, which every runner gets at construction.

    Attributes:
        key: identifies the pipeline; the same on all its workers.
        workers: names of the workers; stage `s` is on `workers[s % len(workers)]`.
        loss_fn: called with the output of the last stage, and with the targets.
        devices: the devices of each worker's stages.
    """

    key: str
    workers: tuple[str, ...]
    num_stages: int
    loss_fn: LossFunction | None
    devices: tuple[torch.device, ...]

    def worker_index(self, stage: int) -> int:
        """Returns the index of a stage's worker."""
        return stage % len(self.workers)

    def stages_of(self, worker: int) -> range:
        """Returns the stages of a worker."""
        return range(worker, self.num_stages, len(self.workers))

    def whole_step(self, worker: int, step: int) -> tuple[str, tuple[int, ...], None, str]:
        """Returns the first arguments of a `PipelineError` that names a worker, but none of its actions."""
        return self.workers[worker], tuple(self.stages_of(worker)), None, f"step {step}"


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The work of one runner in one step.

    Attributes:
        step: the number of the step; late tensors of earlier steps are dropped.
        actions: the actions of this worker, in order.
        inputs: one tuple per micro-batch; empty unless the worker has the first stage.
        targets: one tuple per micro-batch; empty unless the worker has the last stage.
        weights: weight of each micro-batch in the loss of the batch; empty unless the worker has the last stage.
        with_outputs: whether the report should have the outputs of the last stage.
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
        outputs: by micro-batch, from the worker of the last stage, if they were requested.
        times: start and end of each action, in seconds on the monotonic clock of the worker.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, object] = field(default_factory=dict)
    times: list[tuple[float, float]] = field(default_factory=list)


def clock_s() -> float:
    """Returns the time of the clock that measures this worker's actions."""
    return time.monotonic()


def as_tuple(values: object) -> tuple[object, ...]:
    """Returns the input or output of a stage, a tuple, a list or one value, as a tuple."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def batch_size(values: Sequence[object]) -> int:
    """Returns the length of the first dimension of all tensors. Raises `ConfigError` if they differ or are missing."""
    sizes = {value.size(0) for value in values if isinstance(value, Tensor) and value.dim() > 0}
    if len(sizes) != 1:
        raise ConfigError(
            f"the tensors of a batch must have the same size in their first dimension, but have {sorted(sizes)}"
            if sizes
            else "a batch needs at least one tensor with a first dimension, which is split into micro-batches"
        )
    (size,) = sizes
    if size == 0:
        raise ConfigError("the batch is empty")
    return size


def split_sizes(size: int, num_parts: int) -> list[int]:
    """Splits `size` into at most `num_parts` positive parts that differ by at most one, larger ones first."""
    num_parts = min(size, num_parts)
    return [size // num_parts + (part < size % num_parts) for part in range(num_parts)]


def split(values: tuple[object, ...], sizes: Sequence[int]) -> list[tuple[object, ...]]:
    """Returns one tuple per micro-batch: splits tensors along their first dimension (views), repeats other values."""
    columns = [
        value.split(list(sizes)) if isinstance(value, Tensor) and value.dim() > 0 else [value] * len(sizes)
        for value in values
    ]
    return [tuple(row) for row in zip(*columns, strict=True)]


def merge(parts: Sequence[object]) -> object:
    """Merges the outputs of all micro-batches: tensors are joined along their first dimension.

    Tensors without dimensions are stacked over the micro-batches; tuples are merged element by element; other values
    become a list.
    """
    first = parts[0]
    if isinstance(first, tuple | list):
        rows = cast(Sequence[Sequence[object]], parts)
        return tuple(merge(list(column)) for column in zip(*rows, strict=True))
    if isinstance(first, Tensor):
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return torch.cat(tensors) if first.dim() > 0 else torch.stack(tensors)
    return list(parts)


class Mailbox:
    """The tensors of one worker and one step. Any thread may call `put`; one thread calls `take`.

    Args:
        on_gpu: whether tensors may be on a GPU and not computed yet; then the current streams of the taking thread
            wait for them.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._condition = threading.Condition()
        self._arrived: dict[Action, tuple[Sequence[object], ArrivedTensors | None]] = {}
        self._failure: BaseException | None = None

    def put(self, action: Action, values: Sequence[object]) -> None:
        """Stores the tensors that `action` needs; those on GPUs are in the current streams of this thread."""
        streams = ArrivedTensors.of(values) if self._on_gpu else None
        with self._condition:
            self._arrived[action] = values, streams
            self._condition.notify()

    def fail(self, failure: BaseException) -> None:
        """Ends the step: `take` and `check` raise the first `failure`."""
        with self._condition:
            if self._failure is None:
                self._failure = failure
            self._condition.notify()

    def check(self) -> None:
        """Raises if the step has ended."""
        if self._failure is not None:
            raise self._failure

    def take(self, action: Action, deadline: Deadline) -> Sequence[object]:
        """Waits for the tensors that `action` needs, removes and returns them.

        Raises:
            DeadlineExceeded: the tensors did not come in time.
            BaseException: the failure that was passed to `fail`.
        """
        if not self._is_over(action):
            with blocking(), self._condition:  # an arriving message needs a thread of the pool
                self._condition.wait_for(lambda: self._is_over(action), deadline.wait_s())
        self.check()
        with self._condition:
            if action not in self._arrived:
                raise DeadlineExceeded("its inputs did not arrive in time")
            values, streams = self._arrived.pop(action)
        if streams is not None:
            streams.join_gpus()
        return values

    def _is_over(self, action: Action) -> bool:
        return action in self._arrived or self._failure is not None


receivers: Callable[[], WeakValueDictionary[tuple[str, int], Any]] = agent_local(WeakValueDictionary)
"""The `StageRunner`s, by the key of the pipeline and the index of the worker."""


def push(key: str, worker: int, step: int, stage: int, kind: Kind, microbatch: int, values: list[object]) -> None:
    """Delivers tensors for an action. A neighbour calls it by RPC."""
    receiver = receivers().get((key, worker))
    if receiver is None:
        raise RpcdistError(f"the pipeline {key} has ended on this worker")
    receiver.arrived(step, Action(stage, kind, microbatch), values)
