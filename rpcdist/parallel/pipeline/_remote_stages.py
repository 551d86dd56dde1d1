"""GPipe through distributed autograd: the stages are remote references, and `autograd.backward` runs the backward.

It follows torch's tutorial on pipelines over RPC: `remote` and `rpc_async` carry references from stage to stage, and
`to_here` moves the tensors. There is no schedule: a worker computes micro-batches as they arrive, and all backwards
come after all forwards. `Pipeline` is faster, and has schedules that need less memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError
from rpcdist.parallel.pipeline._step_messages import StageSource, batch_size, split, split_sizes


class RemoteStages:
    """A sequential model, cut into stages that live on several workers. Call it inside of an autograd context.

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
        """The output of the last stage for one batch, shape as if the model were not cut; computed in micro-batches."""
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
        """References to the parameters of all stages, for a distributed optimizer."""
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
        with self._computing:  # one after the other: in parallel they would compete for the cores
            output: Tensor = self._module(values)
            return output

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self._module.parameters()]
