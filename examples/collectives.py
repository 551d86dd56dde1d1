"""$ python examples/collectives.py
parameter averaging: test accuracy 95.0 % on each of 3 ranks, 8 rounds, 0.9 s

The first line is the command, the second its last line of output (your digits differ a little). The operations of
`rpcdist.collectives` one by one: after each, the program prints the value of every rank. Then `send` and `recv`, and an
all_reduce that is built from them. Finally an application: every rank trains a copy of a model on its own part of the
handwritten digits which scikit-learn ships, and from time to time the ranks average their parameters. This is data
parallel training without `DistributedDataParallel`.

It starts its processes itself. It also runs under torchrun:

    $ torchrun --nproc-per-node 3 examples/collectives.py
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from _shared import ExampleOptions, counted, option, parse, start


@dataclass(frozen=True)
class Options(ExampleOptions):
    ranks: int = counted(3, "number of processes, at least 2")
    rounds: int = option(8, "averages of the parameters")
    local_steps: int = option(25, "steps before each of them")
    batch_size: int = option(32, "images per step and rank")
    lr: float = option(0.3, "learning rate")
    seed: int = option(0, "random seed", int)
    min_accuracy: float = option(0.0, "exit with status 1 when the test is below", float, metavar="PERCENT")

    needs = ("sklearn",)

    def check(self) -> None:
        if self.ranks < 2:
            raise ValueError("--ranks: at least 2")


def parse_options() -> Options:
    about = "Shows the collectives one by one, and trains a digit classifier by averaging parameters."
    return parse(Options, about, "Under torchrun, --ranks may be left out.")


if __name__ == "__main__":
    parse_options()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import load_digits, percent_right
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.collectives as dist

# ---- the primitives: every rank calls these functions, and all make the same calls in the same order


def show(title: str, value: object) -> None:
    """Prints, on rank 0, the value of every rank."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if dist.get_rank() == 0:
        print(f"{title:32}" + "   ".join(f"rank {rank}: {each}" for rank, each in enumerate(values)), flush=True)


def from_one_to_all(rank: int, size: int) -> None:
    """Operations that give data of one rank to all ranks."""
    show("every rank starts with", numbers(rank).tolist())
    tensor = numbers(rank)
    dist.broadcast(tensor, src=0)
    show("broadcast from rank 0", tensor.tolist())

    part = torch.empty(2, dtype=torch.int64)
    parts = [numbers(each) for each in range(size)] if rank == 0 else None
    dist.scatter(part, parts, src=0)
    show("scatter from rank 0", part.tolist())


def from_all_to_one(rank: int, size: int) -> None:
    """Operations that give data of all ranks to one rank."""
    tensor = numbers(rank)
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    show("reduce to rank 0 (sum)", tensor.tolist() if rank == 0 else "-")  # undefined on the others

    gathered = [torch.empty(2, dtype=torch.int64) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(rank), gathered, dst=0)
    show("gather to rank 0", [each.tolist() for each in gathered or []])


def from_all_to_all(rank: int, size: int) -> None:
    """Operations that give data of all ranks to all ranks."""
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        tensor = numbers(rank)
        dist.all_reduce(tensor, op)
        show(f"all_reduce ({op.name.lower()})", tensor.tolist())

    everything = torch.empty(2 * size, dtype=torch.int64)
    dist.all_gather_into_tensor(everything, numbers(rank))
    show("all_gather_into_tensor", everything.tolist())

    part = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, everything)
    show("reduce_scatter_tensor", part.tolist())

    swapped = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(swapped, 10 * rank + torch.arange(size))
    show("all_to_all_single", swapped.tolist())

    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    show("all_gather_object", objects[-1])


def asynchronous_and_in_subgroups(rank: int, size: int) -> None:
    """Operations that run in the background, and operations of a subgroup of the ranks."""
    tensor = numbers(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    meanwhile = sum(range(1000))  # some computation of its own
    work.wait()  # or `await work`
    show("all_reduce, asynchronous", (tensor.tolist(), meanwhile))

    pair = dist.new_group([0, 1])  # called by all ranks, also by those that are not members
    tensor = numbers(rank)
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
    show("all_reduce of ranks 0 and 1", tensor.tolist())
    dist.barrier()


def numbers(rank: int) -> Tensor:
    return torch.tensor([rank, 10 + rank])


# ---- send and recv


def pass_on(leaving: Tensor, coming: Tensor) -> None:
    """Sends to the next rank in the ring, and receives from the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(leaving, dst=(rank + 1) % size)  # not `send`: if all ranks sent first, none would receive
    dist.recv(coming, src=(rank - 1) % size)
    assert sending is not None  # None is for ranks that are not in the group
    sending.wait()


def around_the_ring(rank: int, size: int) -> None:
    received = torch.empty(2, dtype=torch.int64)
    pass_on(numbers(rank), received)
    show("from the previous rank", received.tolist())


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


def compare_all_reduces(rank: int, size: int) -> None:
    """Compares the ring above with the built-in operation: results and times."""
    torch.manual_seed(rank)
    mine = torch.randn(1_000_000)
    theirs = mine.clone()
    started = time.perf_counter()
    ring_all_reduce(mine)
    middle = time.perf_counter()
    dist.all_reduce(theirs)
    ended = time.perf_counter()
    apart = (mine - theirs).abs().max().item()
    show("ring minus built-in all_reduce", f"{apart:.0e}")
    show("ring all_reduce took", f"{1e3 * (middle - started):.1f} ms")
    show("built-in all_reduce took", f"{1e3 * (ended - middle):.1f} ms")


DEMONSTRATIONS = (
    from_one_to_all,
    from_all_to_one,
    from_all_to_all,
    asynchronous_and_in_subgroups,
    around_the_ring,
    compare_all_reduces,
)


# ---- parameter averaging


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_by_averaging(options: Options) -> float:
    """Repeats: some steps on the own part of the images, then an average of the parameters over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed + rank)  # models with different parameters ...
    train_digits, (test_images, test_labels) = load_digits(options.seed)
    images, labels = (part.chunk(size)[rank] for part in train_digits)
    model = build_model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # ... become equal here
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    started = time.monotonic()
    for number in range(1, options.rounds + 1):
        for _ in range(options.local_steps):
            batch = torch.randint(len(labels), (options.batch_size,))
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        alone = percent_right(model(test_images), test_labels)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
        together = percent_right(model(test_images), test_labels)
        show(f"round {number}/{options.rounds}, before averaging", f"{alone:.1f} %")
        show(f"round {number}/{options.rounds}, after averaging", f"{together:.1f} %")
    accuracy = percent_right(model(test_images), test_labels)
    if rank == 0:
        print(
            f"parameter averaging: test accuracy {accuracy:.1f} % on each of {size} ranks, {options.rounds} rounds, "
            f"{time.monotonic() - started:.1f} s",
            flush=True,
        )
    return accuracy


# ---- processes


def run_process(rank: int, options: Options) -> None:
    """What each process does."""
    torch.set_num_threads(1)  # the processes share the cores already
    dist.init_process_group()
    for demonstrate in DEMONSTRATIONS:
        demonstrate(rank, options.ranks)
    accuracy = train_by_averaging(options)
    dist.destroy_process_group()
    if rank == 0 and accuracy < options.min_accuracy:
        sys.exit(f"test accuracy {accuracy:.1f} % is below --min-accuracy {options.min_accuracy:g}")


def main() -> None:
    start(run_process, parse_options())


if __name__ == "__main__":
    main()
