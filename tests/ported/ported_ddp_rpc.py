"""A program for torch: dense layers under DDP on two trainers, a remote table on a parameter server, and a master.

`test_ported_scripts.py` runs it on rpcdist after changing its import lines, and nothing else.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.optim as optim
from torch import Tensor
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORLD_SIZE = 4  # two trainers, the master, the parameter server
NUM_EMBEDDINGS = 24
EMBEDDING_DIM = 8


class HybridModel(torch.nn.Module):
    def __init__(self, remote_emb_module: Any) -> None:
        super().__init__()
        self.remote_emb_module = remote_emb_module
        self.fc = DDP(torch.nn.Linear(EMBEDDING_DIM, 4))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = self.fc(self.remote_emb_module.forward(indices, offsets))
        return found


def _run_trainer(remote_emb_module: Any, rank: int) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    model = HybridModel(remote_emb_module)
    params = model.remote_emb_module.remote_parameters()
    for param in model.fc.parameters():
        params.append(RRef(param))
    opt = DistributedOptimizer(optim.SGD, params, lr=0.5)
    criterion = torch.nn.CrossEntropyLoss()
    bags = torch.randint(NUM_EMBEDDINGS // 4, (64, 3)) + torch.arange(64)[:, None] % 4 * (NUM_EMBEDDINGS // 4)
    data = TensorDataset(bags, torch.arange(64) % 4)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=rank)
    losses = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for indices, target in DataLoader(data, batch_size=8, sampler=sampler):
            with dist_autograd.context() as context_id:
                output = model(indices.flatten(), torch.arange(0, indices.numel(), 3))
                loss = criterion(output, target)
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
            losses.append(loss.item())
    total = torch.tensor(losses)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (total / dist.get_world_size()).tolist(), model.fc.module.weight.detach()


def run_worker(rank: int, world_size: int) -> None:
    port = int(os.environ["MASTER_PORT"])
    rpc_backend_options = TensorPipeRpcBackendOptions()
    rpc_backend_options.init_method = f"tcp://localhost:{port + 1}"  # a port beside that of the process group
    if rank == 2:
        rpc.init_rpc("master", rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)
        remote_emb_module = RemoteModule(
            "ps", torch.nn.EmbeddingBag, args=(NUM_EMBEDDINGS, EMBEDDING_DIM), kwargs={"mode": "sum"}
        )
        futs = []
        for trainer_rank in [0, 1]:
            fut = rpc.rpc_async(f"trainer{trainer_rank}", _run_trainer, args=(remote_emb_module, trainer_rank))
            futs.append(fut)
        (losses, weight), (_, other) = [fut.wait() for fut in futs]
        assert torch.equal(weight, other)
        print(f"hybrid model: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    elif rank <= 1:
        dist.init_process_group(backend="gloo", rank=rank, world_size=2, init_method=f"tcp://localhost:{port}")
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)
    rpc.shutdown()
    if rank <= 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
