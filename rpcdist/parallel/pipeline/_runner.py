"""The worker's side of a pipeline: executes its actions in order, and sends their tensors on.

    thread of the call `run`      executes the list; waits in the mailbox for what an action needs
    threads that serve `push`     put arriving tensors into the mailbox, also before `run` is here

Tensors are pushed by the worker that made them, so they travel while both ends compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

import rpcdist.rpc as rpc
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.parallel.pipeline._errors import PipelineAborted, PipelineError, PipelineTimeout
from rpcdist.parallel.pipeline._mailbox import Mailbox
from rpcdist.parallel.pipeline._microbatches import as_tuple
from rpcdist.parallel.pipeline._optimizers import StageOptimizers
from rpcdist.parallel.pipeline._schedules import Action, Kind
from rpcdist.parallel.pipeline._stage import Stage

__all__ = ["LossFunction", "Order", "Plan", "Report", "Runner", "StageSource", "clock_s", "push"]

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


# [Note: registry]
#     Neighbours find a runner by the pipeline's key and the worker's place, not by a remote reference: references from
#     worker to worker and back would keep one another alive. The runner itself lives as long as the driver's reference.
_runners: WeakValueDictionary[tuple[str, int], Runner] = WeakValueDictionary()


def push(key: str, worker: int, step: int, stage: int, kind: Kind, part: int, values: list[object]) -> None:
    """Called by a neighbour: brings what an action needs."""
    runner = _runners.get((key, worker))
    if runner is None:
        raise RpcdistError(f"the pipeline {key} has ended on this worker")
    runner.arrived(step, Action(stage, kind, part), values)


def clock_s() -> float:
    """The clock of this worker's times."""
    return time.monotonic()


class Runner:
    """All stages of a pipeline that live on this worker.

    Args:
        plan: of the pipeline.
        worker: the place of this worker in it.
        sources: of its stages, by index.
        device: where they live.
    """

    def __init__(self, plan: Plan, worker: int, sources: Mapping[int, StageSource], device: str) -> None:
        self._plan = plan
        self._worker = worker
        place = torch.device(device)
        self.stages = {
            index: Stage(index, self._build(index, source).to(place), place) for index, source in sources.items()
        }
        self.optimizers = StageOptimizers(self.stages)
        self._running = threading.Lock()
        self._lock = threading.Lock()  # of what follows; push, run and abort come on different threads
        self._mailboxes: dict[int, Mailbox] = {}
        self._ended_step = 0
        _runners[plan.key, worker] = self

    def __repr__(self) -> str:
        return f"<Runner of {self._plan.key} on {self._name}: {list(self.stages.values())}>"

    @property
    def _name(self) -> str:
        return self._plan.workers[self._worker]

    def _build(self, index: int, source: StageSource) -> nn.Module:
        module = source if isinstance(source, nn.Module) else source()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"stage {index} must be a torch.nn.Module or a function that makes one, but {source!r} made a "
                f"{type(module).__name__}"
            )
        return module

    def _place(self, step: int) -> tuple[str, list[int], None, str]:
        """What an error says that no single action is to blame for."""
        return self._name, sorted(self.stages), None, f"step {step}"

    # ------------------------------------------------------------ messages

    def arrived(self, step: int, action: Action, values: Sequence[object]) -> None:
        """Takes what an action of this or a later step needs; on any thread."""
        with self._lock:
            if step > self._ended_step:
                self._mailbox(step).put(action, values)

    def _mailbox(self, step: int) -> Mailbox:
        return self._mailboxes.setdefault(step, Mailbox())

    def abort(self, step: int, reason: str) -> None:
        """Ends a step, which runs now, has run, or will never run; its gradients are dropped."""
        failure = PipelineAborted(*self._place(step), reason)
        with self._lock:
            if step <= self._ended_step:
                is_running = False
            else:
                self._mailbox(step).fail(failure)
                is_running = self._running.locked()
        if not is_running:
            with self._running:
                if step >= self._ended_step:  # else a later step has run meanwhile, and its gradients are good
                    self._clear(step)

    def _clear(self, step: int) -> None:
        """Leaves nothing of a failed step; the lock `_running` is held."""
        for stage in self.stages.values():
            stage.drop_graphs()
            stage.zero_grad()
        self._end(step)

    def _end(self, step: int) -> None:
        with self._lock:
            self._forget(step)

    def _forget(self, step: int) -> None:
        """Drops what arrived for a step or earlier ones, and what will; the lock is held."""
        self._ended_step = max(self._ended_step, step)
        for old in [number for number in self._mailboxes if number <= self._ended_step]:
            del self._mailboxes[old]

    # ------------------------------------------------------------ a step

    def run(self, order: Order) -> Report:
        """Executes one step.

        Raises:
            PipelineError: an action failed.
            PipelineTimeout: a tensor did not come in time.
            PipelineAborted: the step failed elsewhere.
        """
        deadline = Deadline.after(order.timeout_s).earlier(current_deadline.get())
        with self._lock:
            if order.step <= self._ended_step:  # `abort` came first
                raise PipelineAborted(*self._place(order.step), "it failed elsewhere")
            mailbox = self._mailbox(order.step)
        if not self._running.acquire(timeout=deadline.remaining_s() if deadline.is_finite else -1):
            raise PipelineTimeout(*self._place(order.step), "an earlier step still runs")
        try:
            report = _Execution(self._plan, self._name, self.stages, order, mailbox, deadline).run()
            with self._lock:
                mailbox.check()  # an `abort` that comes later finds the step ended, and clears the gradients itself
                self._forget(order.step)
            return report
        except BaseException:
            self._clear(order.step)
            raise
        finally:
            self._running.release()

    # ------------------------------------------------------------ the rest of the module interface

    def train(self, mode: bool) -> None:
        for stage in self.stages.values():
            stage.module.train(mode)

    def zero_grad(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad()

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        """Of each stage, on the CPU."""
        return {
            index: {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
            for index, stage in self.stages.items()
            for state in [stage.module.state_dict()]
        }

    def gradients(self) -> dict[int, dict[str, Tensor | None]]:
        """The gradient of every parameter, by stage and name, on the CPU."""
        return {
            index: {
                name: None if parameter.grad is None else parameter.grad.cpu()
                for name, parameter in stage.module.named_parameters()
            }
            for index, stage in self.stages.items()
        }

    def load_state_dict(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        for index, stage in self.stages.items():
            stage.module.load_state_dict(state[index])

    def make_optimizer(self, number: int, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.optimizers.make(number, kind, options)

    def optimizer_step(self, number: int) -> None:
        self.optimizers.step(number)

    def optimizer_change(self, number: int, options: dict[str, Any]) -> None:
        self.optimizers.change(number, options)

    def optimizer_state_dict(self, number: int) -> dict[int, dict[str, Any]]:
        return self.optimizers.state_dict(number)

    def optimizer_load_state_dict(self, number: int, state: Mapping[int, dict[str, Any]]) -> None:
        self.optimizers.load_state_dict(number, state)

    def squared_grad_norm(self) -> float:
        """The sum of the squares of all gradients here."""
        norms = [
            parameter.grad.detach().double().pow(2).sum()
            for stage in self.stages.values()
            for parameter in stage.module.parameters()
            if parameter.grad is not None
        ]
        return float(sum(norm.item() for norm in norms))

    def scale_grads(self, factor: float) -> None:
        for stage in self.stages.values():
            for parameter in stage.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


class _Execution:
    """One step on one worker; used once, by one thread."""

    def __init__(
        self, plan: Plan, name: str, stages: Mapping[int, Stage], order: Order, mailbox: Mailbox, deadline: Deadline
    ) -> None:
        self._plan = plan
        self._name = name
        self._stages = stages
        self._order = order
        self._mailbox = mailbox
        self._deadline = deadline
        self._with_grad = any(action.kind == "B" for action in order.actions)
        self._sent: list[tuple[Action, rpc.Future[None]]] = []
        self._report = Report()

    def run(self) -> Report:
        with torch.set_grad_enabled(self._with_grad):
            for action in self._order.actions:
                self._do(action)
        for action, future in self._sent:  # until then their memory may not change
            with self._blaming(action, "sending the result of the "):
                future.wait()
        return self._report

    def _do(self, action: Action) -> None:
        with self._blaming(action):
            self._mailbox.check()
            stage = self._stages[action.stage]
            values = self._needed(action)
            start_s = clock_s()
            results = (
                self._forward(stage, action, values) if action.kind == "F" else self._backward(stage, action, values)
            )
            self._report.times.append((start_s, clock_s()))
            if results is not None:
                self._send(action, results)

    def _blaming(self, action: Action, doing: str = "") -> _Blame:
        return _Blame(self._name, action, doing + action.words)

    # ------------------------------------------------------------ computing

    def _forward(self, stage: Stage, action: Action, values: Sequence[object]) -> Sequence[object] | None:
        part = action.microbatch
        output = stage.forward(part, values, with_grad=self._with_grad)
        if stage.index + 1 < self._plan.num_stages:
            outputs = as_tuple(output)
            if self._with_grad:
                stage.keep(part, outputs)
            return outputs
        if self._order.targets:
            loss = self._loss(stage, output, self._order.targets[part])
            if self._with_grad:
                stage.keep(part, [loss])
            self._report.losses[part] = loss.detach().cpu()
        if self._order.with_outputs:
            self._report.outputs[part] = _for_sending(output)
        return None

    def _loss(self, stage: Stage, output: object, targets: Sequence[object]) -> Tensor:
        assert self._plan.loss_fn is not None  # the driver has checked it
        moved = [value.to(stage.device) if isinstance(value, Tensor) else value for value in targets]
        loss = self._plan.loss_fn(output, *moved)
        if loss.numel() != 1:
            raise ValueError(f"loss_fn must return one number, but its result has the shape {tuple(loss.shape)}")
        return loss

    def _backward(self, stage: Stage, action: Action, values: Sequence[object]) -> Sequence[object] | None:
        gradients = stage.backward(
            action.microbatch, [value if isinstance(value, Tensor) else None for value in values]
        )
        return gradients if stage.index > 0 else None

    # ------------------------------------------------------------ moving

    def _needed(self, action: Action) -> Sequence[object]:
        """What an action starts from: the batch, the loss, or what a neighbour has sent."""
        if action.kind == "F" and action.stage == 0:
            return self._order.inputs[action.microbatch]
        if action.kind == "B" and action.stage + 1 == self._plan.num_stages:
            loss = self._report.losses[action.microbatch]
            return [torch.full_like(loss, self._order.weights[action.microbatch])]
        return self._mailbox.take(action, self._deadline)

    def _send(self, action: Action, results: Sequence[object]) -> None:
        receiver = Action(action.stage + (1 if action.kind == "F" else -1), action.kind, action.microbatch)
        if receiver.stage in self._stages:
            self._mailbox.put(receiver, results)
            return
        worker = receiver.stage % len(self._plan.workers)
        values = [_for_sending(value) for value in results]
        arguments = (
            self._plan.key,
            worker,
            self._order.step,
            receiver.stage,
            receiver.kind,
            receiver.microbatch,
            values,
        )
        timeout_s = self._deadline.remaining_s() if self._deadline.is_finite else 0
        future = rpc.rpc_async(self._plan.workers[worker], push, args=arguments, timeout=timeout_s)
        future.is_quiet = True  # `run` waits for it, unless the step fails anyway
        self._sent.append((action, future))


def _for_sending(value: object) -> object:
    """Without the graph, but with the wish for a gradient, and in memory that can be sent from."""
    if isinstance(value, tuple | list):
        return tuple(_for_sending(item) for item in value)
    return value.detach().cpu().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


class _Blame:
    """Turns any exception into a `PipelineError` that says what failed."""

    __slots__ = ("_action", "_name", "_what")

    def __init__(self, name: str, action: Action, what: str) -> None:
        self._name = name
        self._action = action
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if exc is None or isinstance(exc, PipelineError):
            return
        error = PipelineTimeout if isinstance(exc, DeadlineExceeded) else PipelineError
        text = f"{type(exc).__name__}: {exc}"
        raise error(self._name, (self._action.stage,), self._action.microbatch, self._what, text) from exc
