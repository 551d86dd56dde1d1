"""fairscale's DistributedPipeline trains for some steps: a chain, and a graph with two branches, over two workers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from client_results import report, run_workers
from fairscale.experimental.nn.distributed_pipeline import DistributedLoss, DistributedPipeline, PipelineModulesGraph
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

DEVICES = ("worker0/cpu", "worker1/cpu")


class Layer(nn.Linear):
    """The same at each worker."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape))


class Split(nn.Module):
    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(value, 2, dim=1)


class Join(nn.Module):
    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.cat(values, dim=1)


def chain() -> PipelineModulesGraph:
    graph = PipelineModulesGraph()
    first, second = DEVICES
    kinds = ((first, Layer, (4, 4)), (second, nn.Tanh, ()), (second, Layer, (4, 4)))
    graph.add_sequence([RemoteModule(device, kind, arguments) for device, kind, arguments in kinds], [0])
    return graph


def branches() -> PipelineModulesGraph:
    graph = PipelineModulesGraph()
    first, split = RemoteModule(DEVICES[0], Layer, (4, 4)), RemoteModule(DEVICES[0], Split)
    graph.add_sequence([first, split], [0], 2)
    inner = [RemoteModule(device, Layer, (2, 2)) for device in DEVICES]
    for index, layer in enumerate(inner):
        graph.add_layer(layer, [(split, index)])
    graph.add_layer(RemoteModule(DEVICES[1], Join), inner)
    return graph


def train(graph: PipelineModulesGraph, checkpoint: str) -> dict[str, object]:
    pipeline = DistributedPipeline(graph, chunks=4, checkpoint=checkpoint)
    criterion = DistributedLoss(nn.MSELoss)
    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_rrefs(), lr=0.1)
    inputs = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context_id:
            loss = criterion(pipeline(inputs), rpc.RRef(inputs.detach()))
            loss.backward(context_id)
            losses.append(loss.to_here().item().hex())
            optimizer.step(context_id)
    parameters = [rref.to_here().detach().flatten().tolist() for rref in pipeline.parameter_rrefs()]
    return {"losses": losses, "parameters": [float(value).hex() for each in parameters for value in each]}


def work(rank: int, port: int, results: Any) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for name, make, checkpoint in (
            ("chain", chain, "never"),
            ("chain with checkpoints", chain, "except_last"),
            ("branches", branches, "never"),
        ):
            results.put((name, train(make(), checkpoint)))
    rpc.shutdown()


def main() -> None:
    outcomes, exits = run_workers(work, 2)
    found: dict[str, object] = {"exits": exits, **dict(outcomes)}
    report(found)
    sys.exit(exits != [0, 0] or len(found) < 4)


if __name__ == "__main__":
    main()
