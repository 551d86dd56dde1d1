"""A program for torch in the manner of its DDP tutorial: processes by `mp.spawn`, a checkpoint, a comm hook.

Then the processes run another program, `unmodified_zero.py`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import distributed as dist  # another spelling than that of the tutorial
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel  # one of them stays torch's
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from unmodified_zero import main as train_with_zero


def train(rank: int, world_size: int, port: str, folder: str) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    inputs = torch.randn(32, 10)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 8), nn.SyncBatchNorm(8), nn.Linear(8, 1)))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert losses[-1] < losses[0]
    path = Path(folder, "model.pt")
    if rank == 0:
        torch.save(model.state_dict(), path)
    torch.distributed.barrier()
    model.load_state_dict(torch.load(path, weights_only=True))
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)
    print(f"rank {rank}: total {total.item():g}, DDP of {type(model).__module__}, not of {DataParallel.__module__}")
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))  # as torchrun sets it
    train_with_zero()


if __name__ == "__main__":
    mp.spawn(train, args=(2, sys.argv[1], sys.argv[2]), nprocs=2)
