"""`Pipeline`: makes the stages at their workers, and drives them through the steps."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import rpcdist.rpc as rpc
from rpcdist._counters import training
from rpcdist.errors import ConfigError, RpcdistError
from rpcdist.parallel.pipeline._schedules import Action, Schedule
from rpcdist.parallel.pipeline._simulation import Slot, Timeline, format_grid
from rpcdist.parallel.pipeline._stage_runner import StageRunner
from rpcdist.parallel.pipeline._step_driver import (
    Reduction,
    execute_step,
    make_batch,
    make_orders,
    make_schedule,
    restrict,
)
from rpcdist.parallel.pipeline._step_messages import (
    LossFunction,
    PipelineConfig,
    StageSource,
    StepReport,
    clock_s,
    merge,
)
from rpcdist.rpc._executors.blocking import async_form, off_loop

T = TypeVar("T")
NUM_CLOCK_READINGS = 5


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one batch.

    Attributes:
        loss: the loss of the batch, as the unsplit model would compute it.
        losses: the loss of each micro-batch, float, shape (micro-batches,).
        outputs: the outputs of the last stage, merged over the micro-batches; None if they were not requested.
    """

    loss: float
    losses: Tensor
    outputs: object


class Pipeline:
    """A sequential model, split into stages on several workers.

        pipe = Pipeline([embed, blocks, head], ["worker0", "worker1", "worker2"], num_microbatches=8, loss_fn=loss)
        optimizer = pipe.make_optimizer(torch.optim.Adam, lr=1e-3)
        for inputs, targets in batches:
            optimizer.zero_grad()
            pipe.step(inputs, targets)
            optimizer.step()

    Each stage takes what the stage before returns: a value, or a tuple of values for several positional arguments.
    Tensors among them carry gradients back if they require them. After `step` each parameter's `.grad`, at its worker,
    is the gradient of the unsplit model (batch normalisation and dropout see micro-batches, not batches).

    Any process of the job may drive a pipeline, even one of its workers. The stages live as long as this object.
    Its methods may be called on any thread, one at a time.

    Args:
        stages: each a module, which is copied to its worker, or a function that makes it there (importable at the
            worker; `functools.partial` binds arguments).
        workers: names of workers; stage `s` lives on `workers[s % len(workers)]`.
        schedule: "gpipe", "1f1b" or "interleaved" (see `rpcdist.parallel.pipeline.schedule`), or a list of actions
            per worker, as `Action` or as text like "2F0".
        num_microbatches: number of micro-batches in a batch. Their sizes differ by one if the batch is not divisible.
        loss_fn: called as `loss_fn(output, *targets)` at the last stage; returns one number. Importable there.
        loss_reduction: whether `loss_fn` is the "mean" or the "sum" over the examples of a batch.
        devices: the device of each worker's stages, "cuda:0" for example; by default all are on the CPU.
        timeout: limit in seconds of each step and every other operation; 0 for none, by default that of `init_rpc`.

    Raises:
        ConfigError: the arguments do not fit together; for a schedule the text shows its grid.
        Exception: a stage could not be made.
    """

    @off_loop("await asyncio.to_thread(Pipeline, ...)")
    def __init__(
        self,
        stages: Sequence[StageSource],
        workers: Sequence[str],
        *,
        schedule: str | Sequence[Sequence[Action | str]] = "1f1b",
        num_microbatches: int = 4,
        loss_fn: LossFunction | None = None,
        loss_reduction: Reduction = "mean",
        devices: Sequence[str | torch.device] | None = None,
        timeout: float = rpc.constants.UNSET_RPC_TIMEOUT,
    ) -> None:
        _check(workers, loss_reduction, devices)
        self.schedule: Schedule = make_schedule(schedule, len(workers), len(stages), num_microbatches)
        self.num_microbatches = num_microbatches
        self.loss_reduction: Reduction = loss_reduction
        self.timeline: Timeline | None = None
        """The times of the last step that succeeded."""
        places = tuple(map(_with_index, devices)) if devices else (torch.device("cpu"),) * len(workers)
        self._config = PipelineConfig(f"pipeline-{secrets.token_hex(8)}", tuple(workers), len(stages), loss_fn, places)
        self._timeout = timeout
        self._busy = threading.Lock()
        self._step = 0
        self._num_optimizers = 0
        self._runners: list[rpc.RRef[StageRunner]] = [
            rpc.remote(name, StageRunner, args=(self._config, worker, self._of_worker(worker, stages)))
            for worker, name in enumerate(workers)
        ]
        self._ask("zero_grad")  # waits until all runners exist, and raises the error if one cannot be made
        self._clock_offsets_s = [_clock_offset_s(name) for name in workers]

    def __repr__(self) -> str:
        return f"<Pipeline of {self._config.num_stages} stages on {', '.join(self.workers)} [step {self._step}]>"

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers; stage `s` lives on `workers[s % len(workers)]`."""
        return self._config.workers

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return self._config.num_stages

    def grid(self) -> str:
        """The schedule as a table: a row per worker, a column per unit of time if every action takes one."""
        return format_grid(self.schedule)

    def _of_worker(self, worker: int, values: Sequence[T] | Mapping[int, T]) -> dict[int, T]:
        return {stage: values[stage] for stage in self._config.stages_of(worker)}

    def _ask(self, method: str, *args: object) -> list[Any]:
        """Calls a method of all runners at the same time, with the same arguments; waits for the results."""
        return self._ask_each(method, [args] * len(self._runners))

    def _ask_each(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        calls = [
            getattr(runner.rpc_async(self._timeout), method)(*each)
            for runner, each in zip(self._runners, args, strict=True)
        ]
        return rpc.wait_all(calls)

    # ------------------------------------------------------------ batches

    @off_loop("await pipe.step_async(...)")
    def step(self, inputs: object, targets: object, *, with_outputs: bool = False) -> StepResult:
        """Runs forward and backward of one batch, and adds its gradients to those of the parameters.

        Args:
            inputs: a tensor or a tuple of arguments for the first stage; tensors are split along their first dimension.
                Do not change them meanwhile. They get no gradients.
            targets: a tensor or a tuple of arguments for `loss_fn`, split in the same way.
            with_outputs: whether to return the outputs of the last stage, too.

        Raises:
            PipelineError: an action failed; the text names stage, micro-batch and worker. Then all gradients are None,
                so the failed step has no effect, and the next step may be tried.
            PipelineTimeout: a worker waited too long for another.
            ConfigError: the batch cannot be split.
        """
        self._check_loss()
        return self._run(inputs, targets, with_backward=True, with_outputs=with_outputs)

    step_async = async_form(step)

    @off_loop("await pipe.evaluate_async(...)")
    def evaluate(self, inputs: object, targets: object, *, with_outputs: bool = False) -> StepResult:
        """Computes the loss of one batch, without gradients; see `step`. Call `eval()` first if the mode matters."""
        self._check_loss()
        return self._run(inputs, targets, with_backward=False, with_outputs=with_outputs)

    evaluate_async = async_form(evaluate)

    @off_loop("await pipe.forward_async(...)")
    def forward(self, inputs: object) -> Any:
        """Returns the outputs of the last stage for one batch, without gradients."""
        return self._run(inputs, None, with_backward=False, with_outputs=True).outputs

    forward_async = async_form(forward)

    __call__ = forward

    def _check_loss(self) -> None:
        if self._config.loss_fn is None:
            raise ConfigError("this pipeline has no loss: pass loss_fn to Pipeline(...), or call forward()")

    def _run(self, inputs: object, targets: object, *, with_backward: bool, with_outputs: bool) -> StepResult:
        batch = make_batch(inputs, targets, self.num_microbatches, self.loss_reduction)
        actions = restrict(self.schedule, len(batch[0]), with_backward=with_backward)
        if not self._busy.acquire(blocking=False):
            raise RpcdistError(f"{self!r} is busy: another thread is in the middle of a step")
        try:
            self._step += 1
            limit_s = self._timeout_s()
            orders = make_orders(self._step, actions, self._config, batch, with_outputs=with_outputs, timeout_s=limit_s)
            reports = execute_step(self._config, self._runners, orders)
        finally:
            self._busy.release()
        self.timeline = self._timeline(actions, reports)
        for counts in training:
            counts.bubble = self.timeline.bubble
        return _result(reports[self._config.worker_index(self.num_stages - 1)], batch[2])

    def _timeout_s(self) -> float:
        timeout_s = rpc.get_rpc_timeout() if self._timeout == rpc.constants.UNSET_RPC_TIMEOUT else self._timeout
        return timeout_s or math.inf

    # ------------------------------------------------------------ the modules

    @off_loop("await pipe.make_optimizer_async(...)")
    def make_optimizer(self, kind: type[torch.optim.Optimizer], **options: Any) -> PipelineOptimizer:
        """Makes an optimizer for each stage, at its worker: `pipe.make_optimizer(torch.optim.SGD, lr=0.1)`."""
        self._num_optimizers += 1
        self._ask("make_optimizer", self._num_optimizers, kind, options)
        return PipelineOptimizer(self, self._num_optimizers)

    make_optimizer_async = async_form(make_optimizer)

    @off_loop("await pipe.zero_grad_async(...)")
    def zero_grad(self) -> None:
        """Sets the gradients of all parameters to None."""
        self._ask("zero_grad")

    zero_grad_async = async_form(zero_grad)

    @off_loop("await pipe.clip_grad_norm_async(...)")
    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales all gradients so that their norm, over all stages, is at most `max_norm`; returns the old norm."""
        norm = math.sqrt(sum(self._ask("squared_grad_norm")))
        if norm > max_norm:
            self._ask("scale_grads", max_norm / (norm + 1e-6))
        return norm

    clip_grad_norm_async = async_form(clip_grad_norm)

    @off_loop("await pipe.train_async(...)")
    def train(self, mode: bool = True) -> None:
        """Sets training or evaluation mode, like `torch.nn.Module.train`."""
        self._ask("train", mode)

    train_async = async_form(train)

    @off_loop("await pipe.eval_async(...)")
    def eval(self) -> None:
        """The same as `train(False)`."""
        self.train(False)

    eval_async = async_form(eval)

    @off_loop("await pipe.state_dict_async(...)")
    def state_dict(self) -> dict[str, Tensor]:
        """Returns all parameters and buffers, named as in `torch.nn.Sequential(*stages)`, on the CPU."""
        return self._flat("state_dict")

    state_dict_async = async_form(state_dict)

    @off_loop("await pipe.gradients_async(...)")
    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradient of each parameter by its name in `state_dict`, on the CPU."""
        return self._flat("gradients")

    gradients_async = async_form(gradients)

    @off_loop("await pipe.load_state_dict_async(...)")
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a state that `state_dict` returned. Raises `RuntimeError` for names or shapes that do not fit."""
        by_stage: dict[int, dict[str, Tensor]] = {stage: {} for stage in range(self.num_stages)}
        for name, value in state.items():
            stage, _, rest = name.partition(".")
            if not stage.isdecimal() or int(stage) not in by_stage:
                raise ConfigError(f"{name!r} does not begin with the number of one of {self.num_stages} stages")
            by_stage[int(stage)][rest] = value
        self._ask_each("load_state_dict", [(self._of_worker(at, by_stage),) for at in range(len(self.workers))])

    load_state_dict_async = async_form(load_state_dict)

    def _flat(self, method: str) -> dict[str, Any]:
        by_stage: dict[int, dict[str, Any]] = {}
        for found in self._ask(method):
            by_stage.update(found)
        return {f"{stage}.{name}": value for stage, state in sorted(by_stage.items()) for name, value in state.items()}

    # ------------------------------------------------------------ times

    def _timeline(self, actions: Schedule, reports: Sequence[StepReport]) -> Timeline:
        slots = [
            Slot(worker, action, start_s - offset_s, end_s - offset_s)
            for worker, (row, report, offset_s) in enumerate(zip(actions, reports, self._clock_offsets_s, strict=True))
            for action, (start_s, end_s) in zip(row, report.times, strict=True)
        ]
        return Timeline(self.workers, slots, actions)

    def draw_timeline(self, path: str | Path, title: str = "") -> None:
        """Writes a Gantt picture of the last step; see `Timeline.draw`."""
        if self.timeline is None:
            raise RpcdistError("there is no timeline yet: run a step first")
        self.timeline.draw(path, title)


def _with_index(device: str | torch.device) -> torch.device:
    """Returns the device with its index, as in a device map."""
    place = torch.device(device)
    return torch.device("cuda", 0) if place.type == "cuda" and place.index is None else place


def _check(workers: Sequence[str], loss_reduction: str, devices: Sequence[object] | None) -> None:
    if len(set(workers)) != len(workers):
        raise ConfigError(
            f"a worker occurs twice in {list(workers)}; name each worker once; it gets several stages in turn"
        )
    if loss_reduction not in ("mean", "sum"):
        raise ConfigError(f"loss_reduction={loss_reduction!r}: must be 'mean' or 'sum'")
    if devices is not None and len(devices) != len(workers):
        raise ConfigError(f"{len(devices)} devices for {len(workers)} workers; pass one for each")


def _result(last: StepReport, weights: Sequence[float]) -> StepResult:
    numbers = range(len(weights))
    cpu = torch.device("cpu")
    parts = [last.losses[number].reshape(()) for number in numbers] if last.losses else []
    losses = torch.stack(parts) if parts else torch.empty(0, device=cpu)
    outputs = merge([last.outputs[number] for number in numbers]) if last.outputs else None
    factors = torch.tensor(weights, dtype=torch.float64, device=cpu)
    total = float((losses.double() * factors).sum()) if parts else math.nan
    return StepResult(total, losses, outputs)


def _clock_offset_s(worker: str) -> float:
    """Returns the seconds by which the worker's clock is ahead of this one, from the fastest of several calls."""
    readings = []
    for _ in range(NUM_CLOCK_READINGS):
        asked_s = clock_s()
        remote_s = rpc.rpc_sync(worker, clock_s)
        answered_s = clock_s()
        readings.append((answered_s - asked_s, remote_s - (asked_s + answered_s) / 2))
    return min(readings)[1]


class PipelineOptimizer:
    """The optimizers of all stages, used as one. Made by `Pipeline.make_optimizer`."""

    def __init__(self, pipeline: Pipeline, number: int) -> None:
        self._pipeline = pipeline
        self._number = number

    @off_loop("await optimizer.step_async(...)")
    def step(self) -> None:
        """Takes one step of every stage's optimizer, all at the same time."""
        self._pipeline._ask("optimizer_step", self._number)

    step_async = async_form(step)

    @off_loop("await optimizer.zero_grad_async(...)")
    def zero_grad(self) -> None:
        """Sets the gradients of all parameters to None."""
        self._pipeline._ask("zero_grad")

    zero_grad_async = async_form(zero_grad)

    @off_loop("await optimizer.change_async(...)")
    def change(self, **options: Any) -> None:
        """Sets options of all parameter groups: `optimizer.change(lr=0.01)`."""
        self._pipeline._ask("optimizer_change", self._number, options)

    change_async = async_form(change)

    @off_loop("await optimizer.state_dict_async(...)")
    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Returns the state of each stage's optimizer, by stage."""
        found: dict[int, dict[str, Any]] = {}
        for of_worker in self._pipeline._ask("optimizer_state_dict", self._number):
            found.update(of_worker)
        return dict(sorted(found.items()))

    state_dict_async = async_form(state_dict)

    @off_loop("await optimizer.load_state_dict_async(...)")
    def load_state_dict(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Loads a state that `state_dict` returned."""
        self._pipeline._ask("optimizer_load_state_dict", self._number, dict(state))

    load_state_dict_async = async_form(load_state_dict)
