"""The runner of a worker: holds the worker's stages of one pipeline, and executes the orders of the driver.

`RemoteStages` is GPipe through distributed autograd: the stages are remote references, and `autograd.backward` runs the
backward. It follows torch's tutorial on pipelines over RPC: `remote` and `rpc_async` carry references from stage to
stage, and `to_here` moves the tensors. It has no schedule: a worker computes micro-batches as they arrive, and all
backwards come after all forwards. `Pipeline` is faster, and has schedules that need less memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rpcdist.rpc as rpc
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import ConfigError, RpcdistError
from rpcdist.parallel.pipeline._schedules import KINDS, Action
from rpcdist.parallel.pipeline._step_execution import Stage, StepExecution
from rpcdist.parallel.pipeline._step_messages import (
    Mailbox,
    PipelineAborted,
    PipelineConfig,
    PipelineTimeout,
    StageSource,
    StepOrder,
    StepReport,
    batch_size,
    receivers,
    split,
    split_sizes,
)
from rpcdist.rpc._devices.handler_streams import HandlerStreams
from rpcdist.torch_optimizers import take_step


class StageRunner:
    """All stages of a pipeline on this worker. The driver calls its methods by RPC."""

    def __init__(self, config: PipelineConfig, worker: int, sources: Mapping[int, StageSource]) -> None:
        self._config = config
        self._worker = worker
        self._device = place = config.devices[worker]
        self.stages = {
            index: Stage(index, self._build(index, source).to(place), place) for index, source in sources.items()
        }
        self._optimizers: dict[int, dict[int, torch.optim.Optimizer]] = {}  # by number and stage
        self._running = threading.Lock()
        # Guards the attributes below against `arrived`, `run` and `abort`, on several threads.
        self._lock = threading.Lock()
        self._mailboxes: dict[int, Mailbox] = {}
        self._ended_step = 0
        receivers()[config.key, worker] = self

    @property
    def _name(self) -> str:
        return self._config.workers[self._worker]

    def _build(self, index: int, source: StageSource) -> nn.Module:
        module = source if isinstance(source, nn.Module) else source()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"stage {index} must be a torch.nn.Module or a function that makes one, but {source!r} made a "
                f"{type(module).__name__}"
            )
        return module

    def _whole_step(self, step: int) -> tuple[str, tuple[int, ...], None, str]:
        return self._config.whole_step(self._worker, step)

    # ------------------------------------------------------------ messages

    def arrived(self, step: int, action: Action, values: Sequence[object]) -> None:
        """Takes the tensors that a neighbour sent for an action of this or a later step; on any thread."""
        if action.stage not in self.stages or action.kind not in KINDS:
            raise RpcdistError(f"tensors for {action} came to worker {self._name!r}, which has no such action")
        with self._lock:
            if step > self._ended_step:
                self._mailbox(step).put(action, values)

    def _mailbox(self, step: int) -> Mailbox:
        return self._mailboxes.setdefault(step, Mailbox(self._device.type == "cuda"))

    def abort(self, step: int, reason: str) -> None:
        """Ends a step and drops its gradients, even if it has run or has not begun."""
        failure = PipelineAborted(*self._whole_step(step), reason)
        with self._lock:
            if step <= self._ended_step:
                is_running = False
            else:
                self._mailbox(step).fail(failure)
                is_running = self._running.locked()
        if not is_running:
            with self._running:
                if step >= self._ended_step:  # otherwise a later step has run, whose gradients are valid
                    self._clear(step)

    def _clear(self, step: int) -> None:
        """Drops the graphs and gradients of a failed step. The caller holds the lock `_running`."""
        for stage in self.stages.values():
            stage.drop_graphs()
            stage.zero_grad()
        with self._lock:
            self._forget(step)

    def _forget(self, step: int) -> None:
        """Drops the tensors that arrived, or will arrive, for a step and those before it. The caller holds the lock."""
        self._ended_step = max(self._ended_step, step)
        for old in [number for number in self._mailboxes if number <= self._ended_step]:
            del self._mailboxes[old]

    # ------------------------------------------------------------ a step

    def run(self, order: StepOrder) -> StepReport:
        """Executes one step.

        Raises:
            PipelineError: an action failed.
            PipelineTimeout: a tensor did not come in time.
            PipelineAborted: the step failed elsewhere.
        """
        deadline = Deadline.after(order.timeout_s).earlier(current_deadline.get())
        with self._lock:
            if order.step <= self._ended_step:  # `abort` came before
                raise PipelineAborted(*self._whole_step(order.step), "it failed elsewhere")
            mailbox = self._mailbox(order.step)
        if not self._running.acquire(timeout=deadline.remaining_s() if deadline.is_finite else -1):
            raise PipelineTimeout(*self._whole_step(order.step), "an earlier step still runs")
        streams: HandlerStreams | None = None
        try:
            if self._device.type == "cuda":
                # The default stream waits for all tensors that have arrived, even for those that another GPU has not
                # computed yet and only a later action needs.
                streams = HandlerStreams([self._device.index])
            report = StepExecution(self._config, self._name, self.stages, order, mailbox, deadline).run()
            with self._lock:
                mailbox.check()  # a later `abort` finds that the step has ended, and clears the gradients itself
                self._forget(order.step)
            return report
        except BaseException:
            self._clear(order.step)
            raise
        finally:
            if streams is not None:
                streams.leave()
            self._running.release()

    # ------------------------------------------------------------ modules and optimizers

    def train(self, mode: bool) -> None:
        for stage in self.stages.values():
            stage.module.train(mode)

    def zero_grad(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad()

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        """Returns the state of each stage's module, on the CPU."""
        return {
            index: {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
            for index, stage in self.stages.items()
            for state in [stage.module.state_dict()]
        }

    def gradients(self) -> dict[int, dict[str, Tensor | None]]:
        """Returns the gradient of every parameter, by stage and name, on the CPU."""
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
        """Makes an optimizer for each stage that has parameters to train, with a number that the driver chooses."""
        made = {}
        for index, stage in self.stages.items():
            parameters = [parameter for parameter in stage.module.parameters() if parameter.requires_grad]
            if parameters:
                made[index] = kind(parameters, **options)
        self._optimizers[number] = made

    def optimizer_step(self, number: int) -> None:
        for optimizer in self._optimizers[number].values():
            take_step(optimizer)

    def optimizer_change(self, number: int, options: dict[str, Any]) -> None:
        """Sets options of all parameter groups, such as the learning rate."""
        for optimizer in self._optimizers[number].values():
            for group in optimizer.param_groups:
                if unknown := options.keys() - group.keys():
                    raise ConfigError(f"{type(optimizer).__name__} has no option {', '.join(sorted(unknown))}")
                group.update(options)

    def optimizer_state_dict(self, number: int) -> dict[int, dict[str, Any]]:
        return {index: optimizer.state_dict() for index, optimizer in self._optimizers[number].items()}

    def optimizer_load_state_dict(self, number: int, state: Mapping[int, dict[str, Any]]) -> None:
        for index, optimizer in self._optimizers[number].items():
            optimizer.load_state_dict(state[index])

    def squared_grad_norm(self) -> float:
        """Returns the sum of the squares of all gradients on this worker."""
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


class RemoteStages:
    """A sequential model, split into stages on several workers. Call it within an autograd context.

        stages = RemoteStages([embed, blocks, head], ["worker1", "worker2", "worker3"], num_microbatches=4)
        optimizer = DistributedOptimizer(torch.optim.SGD, stages.parameter_rrefs(), lr=0.1)
        with rpcdist.autograd.context() as context:
            loss = loss_fn(stages(inputs), targets)
            rpcdist.autograd.backward(context, [loss])
            optimizer.step(context)

    Args:
        stages: each a module, which is copied to its worker, or a function that makes it there. A stage takes and
            returns one tensor.
        workers: names of workers; stage `s` lives on `workers[s % len(workers)]`.
        num_microbatches: number of micro-batches in a batch.

    Raises:
        ConfigError: a number is wrong.
        Exception: a stage could not be made.
    """

    def __init__(self, stages: Sequence[StageSource], workers: Sequence[str], *, num_microbatches: int = 4) -> None:
        if not stages or not workers or num_microbatches < 1:
            raise ConfigError("RemoteStages needs at least one stage, one worker and one micro-batch")
        self.num_microbatches = num_microbatches
        self._stages: list[rpc.RRef[_RemoteStage]] = [
            rpc.remote(workers[index % len(workers)], _RemoteStage, args=(stage,)) for index, stage in enumerate(stages)
        ]
        rpc.wait_all([stage.rpc_async().is_ready() for stage in self._stages])

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the output of the last stage for one batch, computed in micro-batches, as of the unsplit model."""
        sizes = split_sizes(batch_size((inputs,)), self.num_microbatches)
        outputs = [self._start(part) for (part,) in split((inputs,), sizes) if isinstance(part, Tensor)]
        return torch.cat(rpc.wait_all(outputs))

    __call__ = forward

    def _start(self, part: Tensor) -> rpc.Future[Tensor]:
        """Starts the forward of one micro-batch through all stages; does not wait."""
        at: rpc.RRef[Tensor] = rpc.RRef(part)
        for stage in self._stages[:-1]:
            at = stage.remote().forward(at)
        future: rpc.Future[Tensor] = self._stages[-1].rpc_async().forward(at)
        return future

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """Returns references to the parameters of all stages, for a distributed optimizer."""
        found = rpc.wait_all([stage.rpc_async().parameter_rrefs() for stage in self._stages])
        return [rref for of_stage in found for rref in of_stage]


class _RemoteStage:
    """One stage at its worker. Several micro-batches may call it at the same time, on several threads."""

    def __init__(self, source: StageSource) -> None:
        self._module = source if isinstance(source, nn.Module) else source()
        self._computing = threading.Lock()

    def is_ready(self) -> bool:
        return True

    def forward(self, at: rpc.RRef[Tensor]) -> Tensor:
        values = at.to_here()
        with self._computing:  # one at a time, since in parallel they would compete for the cores
            output: Tensor = self._module(values)
            return output

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self._module.parameters()]
