"""A program for torch's RPC: a parameter server that steps once for each batch of gradients, by `async_execution`.

`test_ported_scripts.py` runs it on rpcdist after changing its import lines, and nothing else.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn, optim

WORLD_SIZE = 4
NUM_UPDATES = 10


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 1)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.lock = threading.Lock()
        self.batch_update_size = batch_update_size
        self.gradients: list[list[Tensor]] = []
        self.future_model: torch.futures.Future[nn.Linear] = torch.futures.Future()

    def get_model(self) -> nn.Linear:
        return self.model

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def update_and_fetch_model(server: Any, gradients: list[Tensor]) -> torch.futures.Future[nn.Linear]:
        self: BatchUpdateParameterServer = server.local_value()
        with self.lock:
            self.gradients.append(gradients)
            future = self.future_model
            if len(self.gradients) == self.batch_update_size:
                for parameter, *parts in zip(self.model.parameters(), *self.gradients, strict=True):
                    parameter.grad = torch.stack(parts).mean(dim=0)
                self.optimizer.step()
                self.gradients = []
                self.future_model = torch.futures.Future()
                future.set_result(self.model)
        return future


class Trainer:
    def __init__(self, server: Any) -> None:
        self.server = server

    def train(self) -> tuple[list[float], Tensor]:
        generator = torch.Generator().manual_seed(rpc.get_worker_info().id)
        model = self.server.rpc_sync().get_model()
        losses = []
        for _ in range(NUM_UPDATES):
            inputs = torch.randn(32, 6, generator=generator)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            model = rpc.rpc_sync(
                self.server.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.server, [parameter.grad for parameter in model.cpu().parameters()]),
            )
        return losses, model.weight.detach()


def run_trainer(server: Any) -> tuple[list[float], Tensor]:
    return Trainer(server).train()


def run_ps(trainers: list[str]) -> None:
    server = rpc.RRef(BatchUpdateParameterServer(len(trainers)))
    futures = [rpc.rpc_async(trainer, run_trainer, args=(server,)) for trainer in trainers]
    results = torch.futures.wait_all(futures)
    losses, weights = zip(*results, strict=True)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    mean = [sum(step) / len(step) for step in zip(*losses, strict=True)]
    print(f"batches of {len(trainers)} updates: loss {mean[0]:.3f} -> {mean[-1]:.3f}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=100)
    if rank == 0:
        rpc.init_rpc("ps", rank=rank, world_size=world_size, rpc_backend_options=options)
        run_ps([f"trainer{number}" for number in range(1, world_size)])
    else:
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
