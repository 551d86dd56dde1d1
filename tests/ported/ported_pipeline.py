"""A program for torch's RPC: a model in two shards, whose micro-batches go from worker to worker as references.

`test_ported_scripts.py` runs it on rpcdist after changing its import lines, and nothing else.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

WORLD_SIZE = 3
NUM_BATCHES = 15


class Shard(nn.Module):
    def __init__(self, device: str, seed: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lock = threading.Lock()
        self.device = device
        self.seq = nn.Sequential(nn.Linear(num_inputs, num_outputs), nn.Tanh()).to(device)

    def forward(self, x_rref: Any) -> Tensor:
        x = x_rref.to_here().to(self.device)
        with self.lock:
            out = self.seq(x)
        return out.cpu()  # type: ignore[no-any-return]

    def parameter_rrefs(self) -> list[Any]:
        return [RRef(parameter) for parameter in self.parameters()]


class DistModel(nn.Module):
    def __init__(self, split_size: int, workers: list[str]) -> None:
        super().__init__()
        self.split_size = split_size
        self.p1_rref = rpc.remote(workers[0], Shard, args=("cpu", 0, 6, 24), timeout=0)
        self.p2_rref = rpc.remote(workers[1], Shard, args=("cpu", 1, 24, 3), timeout=0)

    def forward(self, xs: Tensor) -> Tensor:
        out_futures = []
        for x in iter(xs.split(self.split_size, dim=0)):
            x_rref = RRef(x)
            y_rref = self.p1_rref.remote().forward(x_rref)
            z_fut = self.p2_rref.rpc_async().forward(y_rref)
            out_futures.append(z_fut)
        return torch.cat(torch.futures.wait_all(out_futures))

    def parameter_rrefs(self) -> list[Any]:
        remote_params: list[Any] = []
        remote_params.extend(self.p1_rref.remote().parameter_rrefs().to_here())
        remote_params.extend(self.p2_rref.remote().parameter_rrefs().to_here())
        return remote_params


def run_master(split_size: int) -> None:
    torch.manual_seed(2)
    model = DistModel(split_size, ["worker1", "worker2"])
    loss_fn = nn.MSELoss()
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
    inputs = torch.randn(32, 6)
    labels = torch.sin(inputs[:, :3] + inputs[:, 3:])
    losses = []
    for _ in range(NUM_BATCHES):
        with dist_autograd.context() as context_id:
            loss = loss_fn(model(inputs), labels)
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
        losses.append(loss.item())
    print(f"micro-batches of {split_size}: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=128)
    name = "master" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        for split_size in (4, 32):
            run_master(split_size)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
