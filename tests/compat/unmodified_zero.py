"""A program for torch, started by torchrun: ZeRO, and `Join` for ranks that have different numbers of inputs."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    num_inputs = 0
    with Join([model, optimizer]):
        for _ in range(3 + rank):
            num_inputs += 1
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    weights = [torch.empty(4, 4) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.equal(weights[0], weight) for weight in weights)
    print(f"rank {rank}: {num_inputs} inputs, {type(optimizer).__module__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
