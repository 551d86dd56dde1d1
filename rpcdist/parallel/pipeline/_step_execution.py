"""Executes the actions of one worker in one step, in order, and pushes their tensors to the neighbours.

thread of the call `StageRunner.run`    executes the actions, and sends their results
threads of the pool                     put arriving tensors into the mailbox, also before `run` was called

The worker that made a tensor pushes it to the next one, so the transfer overlaps with computation on both. A tensor on
a GPU is lent to the other worker, like those of all calls, and copied from there to the GPU of the next stage. No
thread waits for a GPU until losses and outputs are copied for the driver at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, described_error
from rpcdist.parallel.pipeline._schedules import Action
from rpcdist.parallel.pipeline._step_messages import (
    Mailbox,
    PipelineConfig,
    PipelineError,
    PipelineTimeout,
    StepOrder,
    StepReport,
    as_tuple,
    clock_s,
    push,
)
from rpcdist.profile_ranges import span_taps
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._current import current_agent

_engine: Final[Any] = Variable._execution_engine  # torch's stubs lack its methods


class Stage:
    """Runs forwards and backwards of one module, on the calling thread.

    The graph of a micro-batch ends at the stage's inputs, which are leaves, and starts at the edges of its outputs. The
    edges are kept, but not the outputs, so that their memory is free when the next stage has them.

    Args:
        module: takes the outputs of the stage before as positional arguments; returns a value or a tuple of values.
    """

    def __init__(self, index: int, module: nn.Module, device: torch.device) -> None:
        self.index = index
        self.module = module
        self.device = device
        # The ends of each micro-batch's graph, None for values without a gradient.
        self._inputs: dict[int, list[Tensor | None]] = {}
        self._outputs: dict[int, list[GradientEdge | None]] = {}

    def forward(self, microbatch: int, values: Sequence[object], *, with_grad: bool) -> object:
        """Returns the module's output for one micro-batch. Pass the values from which its backward starts to `keep`."""
        arguments = [self._own(value) for value in values]
        if with_grad:
            self._inputs[microbatch] = [
                value if isinstance(value, Tensor) and value.requires_grad else None for value in arguments
            ]
        return self.module(*arguments)

    def _own(self, value: object) -> object:
        """Returns a leaf on the device of this stage, so that the sender's graph ends here, even on the same worker."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(self.device, non_blocking=True).requires_grad_(value.requires_grad)

    def keep(self, microbatch: int, outputs: Sequence[object]) -> None:
        """Keeps the edges of the values from which the backward of a micro-batch starts."""
        self._outputs[microbatch] = [
            get_gradient_edge(value) if isinstance(value, Tensor) and value.requires_grad else None for value in outputs
        ]

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds the gradients of one micro-batch to those of the parameters; returns those of the stage's inputs.

        Args:
            microbatch: its graph is dropped.
            gradients: one for each kept output; None for an output without a gradient.
        """
        inputs, outputs = self._inputs.pop(microbatch), self._outputs.pop(microbatch, [])
        if len(gradients) != len(outputs):
            raise RuntimeError(f"{len(outputs)} outputs were sent on, but {len(gradients)} gradients came back")
        roots = [
            (edge, gradient.to(self.device, non_blocking=True))
            for edge, gradient in zip(outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if roots:
            edges, values = zip(*roots, strict=True)
            # Like `torch.autograd.backward`, whose check of the shapes imports sympy; the engine checks them as well.
            _engine.run_backward(edges, values, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return [None if value is None else value.grad for value in inputs]

    def drop_graphs(self) -> None:
        """Drops the graphs of a failed step."""
        self._inputs.clear()
        self._outputs.clear()

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)


@dataclass(eq=False, repr=False)
class StepExecution:
    """One step on one worker; used once, by one thread."""

    _config: PipelineConfig
    _name: str
    _stages: Mapping[int, Stage]
    _order: StepOrder
    _mailbox: Mailbox
    _deadline: Deadline
    _sent: list[tuple[Action, Callable[[], object]]] = field(default_factory=list)
    _report: StepReport = field(default_factory=StepReport)

    def __post_init__(self) -> None:
        self._agent = current_agent()
        self._with_grad = any(action.kind == "B" for action in self._order.actions)

    def run(self) -> StepReport:
        with torch.set_grad_enabled(self._with_grad):
            for action in self._order.actions:
                self._do(action)
        for action, wait in self._sent:  # their memory must not change before
            with self._blaming(action, "sending the result of the "):
                wait()
        if self._report.losses or self._report.outputs:
            self._wait_for_copies()
        return self._report

    def _do(self, action: Action) -> None:
        with self._blaming(action):
            self._mailbox.check()
            stage = self._stages[action.stage]
            values = self._needed(action)
            start_s = clock_s()
            compute = self._forward if action.kind == "F" else self._backward
            results = compute(stage, action, values)
            end_s = clock_s()
            self._report.times.append((start_s, end_s))
            for tap in list(span_taps):
                tap("pipeline", f"{action} of step {self._order.step}", start_s, end_s)
            if results is not None:
                self._send(action, results)

    @contextmanager
    def _blaming(self, action: Action, doing: str = "") -> Iterator[None]:
        """Turns any exception into a `PipelineError` that names the failed action."""
        try:
            yield
        except PipelineError:
            raise
        except BaseException as exc:
            error = PipelineTimeout if isinstance(exc, DeadlineExceeded) else PipelineError
            what = doing + action.words
            raise error(self._name, (action.stage,), action.microbatch, what, described_error(exc)) from exc

    # ------------------------------------------------------------ computing

    def _forward(self, stage: Stage, action: Action, values: Sequence[object]) -> Sequence[object] | None:
        microbatch = action.microbatch
        output = stage.forward(microbatch, values, with_grad=self._with_grad)
        if stage.index + 1 < self._config.num_stages:
            outputs = as_tuple(output)
            if self._with_grad:
                stage.keep(microbatch, outputs)
            return outputs
        if self._order.targets:
            loss = self._loss(stage, output, self._order.targets[microbatch])
            if self._with_grad:
                stage.keep(microbatch, [loss])
            self._report.losses[microbatch] = _on_host(loss)
        if self._order.with_outputs:
            self._report.outputs[microbatch] = _converted(output, _on_host)
        return None

    def _loss(self, stage: Stage, output: object, targets: Sequence[object]) -> Tensor:
        assert self._config.loss_fn is not None  # the driver has checked it
        moved = [value.to(stage.device) if isinstance(value, Tensor) else value for value in targets]
        loss = self._config.loss_fn(output, *moved)
        if loss.numel() != 1:
            raise ValueError(f"loss_fn must return one number, but its result has the shape {tuple(loss.shape)}")
        return loss

    def _backward(self, stage: Stage, action: Action, values: Sequence[object]) -> Sequence[object] | None:
        gradients = stage.backward(
            action.microbatch, [value if isinstance(value, Tensor) else None for value in values]
        )
        return gradients if stage.index > 0 else None

    # ------------------------------------------------------------ moving tensors

    def _needed(self, action: Action) -> Sequence[object]:
        """Returns the values from which an action starts: from the batch, from the loss, or from a neighbour."""
        if action.kind == "F" and action.stage == 0:
            return self._order.inputs[action.microbatch]
        if action.kind == "B" and action.stage + 1 == self._config.num_stages:
            loss = self._report.losses[action.microbatch]
            return [torch.full_like(loss, self._order.weights[action.microbatch])]
        return self._mailbox.take(action, self._deadline)

    def _send(self, action: Action, results: Sequence[object]) -> None:
        receiver = Action(action.stage + (1 if action.kind == "F" else -1), action.kind, action.microbatch)
        if receiver.stage in self._stages:
            self._mailbox.put(receiver, results)
            return
        worker = self._config.worker_index(receiver.stage)
        values = _converted(list(results), Tensor.detach)
        # The device maps of the options do not apply: the tensors go to the device of the next stage.
        devices = {leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_cpu}
        device_map = {device: self._config.devices[worker] for device in devices} or None
        place = receiver.stage, receiver.kind, receiver.microbatch
        arguments = (self._config.key, worker, self._order.step, *place, values)
        timeout_s = self._deadline.remaining_s() if self._deadline.is_finite else 0
        # Not a future, which the pool would complete: this thread waits for the call, unless the step fails.
        receiver_id = self._agent.directory.resolve(self._config.workers[worker])
        pushed = Invocation(push, arguments, None, timeout_s, None, device_map)
        self._sent.append((action, self._agent.caller.begin(receiver_id, pushed)))

    def _wait_for_copies(self) -> None:
        """Waits until the copies of losses and outputs are on the CPU."""
        device = self._stages[self._config.num_stages - 1].device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _converted(value: object, convert: Callable[[Tensor], Tensor]) -> object:
    """Returns the value with each of its tensors converted; they require gradients if the originals do."""
    return tree_map_only(Tensor, lambda tensor: convert(tensor).requires_grad_(tensor.requires_grad), value)


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU, without its graph; from a GPU, it is complete when the current stream is done."""
    return tensor.detach().to("cpu", non_blocking=True)
