"""A program for torch's RPC: one worker holds the model, another trains it through distributed autograd.

It is written in the manner of torch's tutorials, with helpers that call methods by reference. `test_ported_scripts.py`
runs it on rpcdist after changing its import lines, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import nll_loss

WORLD_SIZE = 2
NUM_STEPS = 30


def call_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class ParameterServer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.LogSoftmax(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.model(x)
        return scores

    def get_param_rrefs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def get_dist_gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        return {key.cpu(): value.cpu() for key, value in dist_autograd.get_gradients(context_id).items()}


server: ParameterServer | None = None
server_lock = Lock()


def get_parameter_server() -> ParameterServer:
    """The same one for every trainer."""
    global server
    with server_lock:
        server = server or ParameterServer()
        return server


class TrainerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.server = rpc.remote("parameter_server", get_parameter_server)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = remote_method(ParameterServer.forward, self.server, x)
        return scores


def run_training_loop(rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    net = TrainerNet()
    params = remote_method(ParameterServer.get_param_rrefs, net.server)
    optimizer = DistributedOptimizer(optim.SGD, params, lr=1.0)
    losses = []
    for _ in range(NUM_STEPS):
        inputs = torch.randn(64, 8, generator=generator)
        targets = inputs[:, :4].argmax(dim=1)
        with dist_autograd.context() as context_id:
            loss = nll_loss(net(inputs), targets)
            dist_autograd.backward(context_id, [loss])
            assert remote_method(ParameterServer.get_dist_gradients, net.server, context_id) != {}
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def run_worker(rank: int, world_size: int) -> None:
    if rank == 0:
        rpc.init_rpc(name="parameter_server", rank=rank, world_size=world_size)
    else:
        rpc.init_rpc(name=f"trainer_{rank}", rank=rank, world_size=world_size)
        losses = run_training_loop(rank)
        print(f"trainer {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
