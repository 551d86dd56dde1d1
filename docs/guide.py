"""$ python guide.py
The steps of guide.md, which explains them. What follows `# ->` is what the line prints.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import rpcdist
import rpcdist.autograd as dist_autograd
import rpcdist.collectives as dist
from rpcdist import rpc
from rpcdist.nn import RemoteModule
from rpcdist.optim import DistributedOptimizer
from rpcdist.parallel import DistributedDataParallel, Pipeline


async def sum_of_powers() -> int:
    return sum(await asyncio.gather(*[rpc.rpc_async("worker1", pow, args=(2, n)) for n in range(10)]))


class Average:
    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> float:
        self.values.append(value)
        return sum(self.values) / len(self.values)


def add_from_elsewhere(average: rpc.RRef[Average], value: float) -> float:
    return average.rpc_sync().add(value)


class Kitchen:
    def __init__(self) -> None:
        self.ready = asyncio.Event()

    async def wait_for_dinner(self) -> str:
        await self.ready.wait()
        return "soup"

    async def cook(self, steps: int) -> AsyncIterator[str]:
        for step in range(1, steps + 1):
            yield f"{step}/{steps}"
        self.ready.set()


async def dine() -> tuple[list[str], set[str]]:
    kitchen = rpc.remote("worker1", Kitchen)
    guests = [kitchen.rpc_async().wait_for_dinner() for _ in range(1000)]
    progress = [step async for step in await kitchen.rpc_async().cook(3)]
    return progress, set(await asyncio.gather(*guests))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.sum(dim=1, keepdim=True).tanh()


def train_copy(rank: int, world_size: int, address: str) -> float:
    dist.init_process_group("tcp", init_method=address, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(60):
        inputs, targets = batch(step * world_size + rank)  # each has batches of its own
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()  # the gradients are the mean over all workers
        optimizer.step()
    total = torch.stack([parameter.sum() for parameter in model.parameters()]).sum().detach()
    dist.destroy_process_group()
    return total.item()


def make_stage(number: int) -> nn.Module:
    """Called on the worker of the stage."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh()) if number == 0 else nn.Linear(16, 1)


def main() -> None:
    # 2. Calls
    print(rpc.rpc_sync("worker1", pow, args=(2, 10)))  # -> 1024
    futures = [rpc.rpc_async(f"worker{number}", torch.full, args=((2,), float(number))) for number in (1, 2)]
    print(torch.stack(rpc.wait_all(futures)).tolist())  # -> [[1.0, 1.0], [2.0, 2.0]]
    print(asyncio.run(sum_of_powers()))  # -> 1023
    try:
        rpc.rpc_sync("worker2", int, args=("seven",))
    except ValueError as error:
        caught = error
    print(str(caught))  # -> invalid literal for int() with base 10: 'seven'
    print("worker2" in str(caught.__cause__))  # -> True

    # 3. Objects that stay where they are
    average = rpc.remote("worker1", Average)  # made on worker1, and it stays there
    print(average.rpc_sync().add(1.0))  # -> 1.0
    print(rpc.rpc_sync("worker2", add_from_elsewhere, args=(average, 4.0)))  # -> 2.5
    print(average.owner_name())  # -> worker1
    print(average.to_here().values)  # -> [1.0, 4.0]

    # 4. Functions that wait
    print(asyncio.run(dine()))  # -> (['1/3', '2/3', '3/3'], {'soup'})

    # 5. Gradients through calls
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    with dist_autograd.context() as context_id:
        product = rpc.rpc_sync("worker1", torch.mul, args=(x, w))
        loss = rpc.rpc_sync("worker2", torch.sum, args=(product,))
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
    print(gradients[x].tolist(), gradients[w].tolist())  # -> [3.0, 4.0] [1.0, 2.0]

    # 6. Training what is elsewhere
    torch.manual_seed(0)
    first = RemoteModule("worker1", nn.Linear, args=(4, 16))
    last = nn.Linear(16, 1)  # here
    parameters = first.remote_parameters() + [rpc.RRef(parameter) for parameter in last.parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.02)
    for step in range(100):
        inputs, targets = batch(step)
        with dist_autograd.context() as context_id:
            loss = mse_loss(last(first.forward(inputs).tanh()), targets)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)  # on both workers
    print(loss.item() < 0.05)  # -> True

    # 7. Copies in step
    address = f"file:///tmp/guide-{os.getpid()}"  # a new file: the address of this process group
    futures = [rpc.rpc_async(worker, train_copy, args=(worker, 3, address)) for worker in range(3)]
    print(len(set(rpc.wait_all(futures))))  # -> 1

    # 8. A pipeline
    pipe = Pipeline(
        [partial(make_stage, 0), partial(make_stage, 1)],
        ["worker1", "worker2"],
        schedule="1f1b",
        num_microbatches=4,
        loss_fn=mse_loss,
    )
    print(pipe.grid().splitlines()[1])  # -> worker 1:     1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    steps = pipe.make_optimizer(torch.optim.Adam, lr=0.02)
    for step in range(60):
        steps.zero_grad()
        result = pipe.step(*batch(step))  # forward and backward on both workers
        steps.step()
    print(result.loss < 0.1)  # -> True


if __name__ == "__main__":
    with rpcdist.LocalCluster(3):  # this process is worker0, and starts worker1 and worker2
        main()
