"""$ python examples/collectives.py
parameter averaging: test accuracy 95.0 % on each of 3 ranks, 8 rounds

The first line is the command, the second its last line of output (your digits differ a little). The operations of
`rpcdist.collectives` one by one: after each, the program prints the value of every rank. Then `isend` and `recv`, with
which an all_reduce is built. Finally an application: every rank trains a copy of a model on its own part of the
handwritten digits which scikit-learn ships, and from time to time the ranks average their parameters. This is data
parallel training without `DistributedDataParallel`.

It starts its processes itself. It also runs under torchrun:

    $ torchrun --nproc-per-node 3 examples/collectives.py
"""

from __future__ import annotations

from dataclasses import dataclass

from _shared import ExampleOptions, at_least, counted, option, require_accuracy, start


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Shows the collectives one by one, and trains a digit classifier by averaging parameters."""

    ranks: int = counted(3, "number of processes, at least 2")
    rounds: int = option(8, "averages of the parameters")
    min_accuracy: float = at_least("the test accuracy", "PERCENT")

    roles = "the ranks"
    needs = ("sklearn",)

    def check(self) -> None:
        if self.ranks < 2:
            raise ValueError("--ranks: at least 2")


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import load_digits, percent_right
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.collectives as dist


def show(title: str, value: object) -> None:
    """Prints, on rank 0, the value of every rank."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if dist.get_rank() == 0:
        print(f"{title:32}" + "   ".join(f"rank {rank}: {each}" for rank, each in enumerate(values)), flush=True)


def numbers(rank: int) -> Tensor:
    return torch.tensor([rank, 10 + rank])


def show_collectives(rank: int, size: int) -> None:
    """Every rank calls this function, and all make the same calls in the same order."""
    show("every rank starts with", numbers(rank).tolist())
    tensor = numbers(rank)
    dist.broadcast(tensor, src=0)
    show("broadcast from rank 0", tensor.tolist())

    part = torch.empty(2, dtype=torch.int64)
    dist.scatter(part, [numbers(each) for each in range(size)] if rank == 0 else None, src=0)
    show("scatter from rank 0", part.tolist())

    tensor = numbers(rank)
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    show("reduce to rank 0 (sum)", tensor.tolist() if rank == 0 else "-")  # undefined on the others

    gathered = [torch.empty(2, dtype=torch.int64) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(rank), gathered, dst=0)
    show("gather to rank 0", [each.tolist() for each in gathered or []])

    tensor = numbers(rank)
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    show("all_reduce (sum)", tensor.tolist())

    everything = torch.empty(2 * size, dtype=torch.int64)
    dist.all_gather_into_tensor(everything, numbers(rank))
    show("all_gather_into_tensor", everything.tolist())

    dist.reduce_scatter_tensor(part, everything)
    show("reduce_scatter_tensor", part.tolist())

    swapped = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(swapped, 10 * rank + torch.arange(size))
    show("all_to_all_single", swapped.tolist())

    tensor = numbers(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # None is for ranks that are not in the group
    work.wait()  # or `await work`, with other work in between
    show("all_reduce, asynchronous", tensor.tolist())

    pair = dist.new_group([0, 1])  # called by all ranks, also by those that are not members
    tensor = numbers(rank)
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
    show("all_reduce of ranks 0 and 1", tensor.tolist())

    pass_on(numbers(rank), part)
    show("from the previous rank", part.tolist())


def pass_on(leaving: Tensor, coming: Tensor) -> None:
    """Sends to the next rank in the ring, and receives from the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(leaving, dst=(rank + 1) % size)  # not `send`: if all ranks sent first, none would receive
    dist.recv(coming, src=(rank - 1) % size)
    assert sending is not None
    sending.wait()


def ring_all_reduce(tensor: Tensor) -> None:
    """The sum over all ranks, in place, from sends and receives alone.

    The tensor is cut into as many parts as there are ranks. First the parts travel around the ring and grow into sums;
    then the sums travel around it once more (Patarasuk and Yuan, 2009). Each rank sends 2 (n - 1) / n of the tensor.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = tensor.tensor_split(size)
    for step in range(2 * (size - 1)):
        leaving, coming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        received = torch.empty_like(coming)
        pass_on(leaving, received)
        if step < size - 1:
            coming += received
        else:
            coming.copy_(received)


def show_ring(rank: int) -> None:
    by_ring = torch.randn(100_000, generator=torch.Generator().manual_seed(rank))
    built_in = by_ring.clone()
    ring_all_reduce(by_ring)
    dist.all_reduce(built_in)
    show("ring minus built-in all_reduce", f"{(by_ring - built_in).abs().max().item():.0e}")


def train_by_averaging(options: Options) -> float:
    """Repeats: some steps on the own part of the images, then an average of the parameters over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed + rank)  # models with different parameters ...
    train_digits, (test_images, test_labels) = load_digits(options.seed)
    images, labels = (part.chunk(size)[rank] for part in train_digits)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # ... become equal here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for number in range(1, options.rounds + 1):
        for _ in range(25):
            batch = torch.randint(len(labels), (32,))
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        show(
            f"round {number}/{options.rounds}, before averaging",
            f"{percent_right(model(test_images), test_labels):.1f} %",
        )
        for parameter in model.parameters():
            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
        accuracy = percent_right(model(test_images), test_labels)
        show(f"round {number}/{options.rounds}, after averaging", f"{accuracy:.1f} %")
    if rank == 0:
        print(f"parameter averaging: test accuracy {accuracy:.1f} % on each of {size} ranks, {options.rounds} rounds")
    return accuracy


def run_process(rank: int, options: Options) -> None:
    """The work of each process."""
    dist.init_process_group()
    show_collectives(rank, options.ranks)
    show_ring(rank)
    accuracy = train_by_averaging(options)
    dist.destroy_process_group()
    if rank == 0:
        require_accuracy(accuracy, options.min_accuracy)


def main() -> None:
    start(run_process, Options.parse())


if __name__ == "__main__":
    main()
