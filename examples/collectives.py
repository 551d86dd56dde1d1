"""$ python examples/collectives.py
parameter averaging: test accuracy 95.0 % on each of 3 ranks, 8 rounds, 0.9 s

The first line is the command, the second its last line of output (your digits differ a little). The operations of
`rpcdist.collectives` one by one: what every rank has after each is printed. Then `send` and `recv`, and an all_reduce
made of them by hand. In the end what they are good for: every rank trains a copy of a model on its own part of the
handwritten digits which scikit-learn ships, and now and then the ranks average their parameters - data parallel
training without `DistributedDataParallel`.

It starts its processes itself. It also runs under torchrun:

    $ torchrun --nproc-per-node 3 examples/collectives.py
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.collectives as dist

NUM_IMAGES = 1797
NUM_TRAIN = 1437  # the other 360 images measure the accuracy
Digits = tuple[Tensor, Tensor]  # images (n, 64) float32 from 0 to 1, labels (n,) int64


@dataclass(frozen=True)
class Options:
    """What the command line says; every process gets a copy."""

    ranks: int
    rounds: int
    local_steps: int
    batch_size: int
    lr: float
    seed: int
    min_accuracy: float


# ---- the primitives: every rank calls these functions, and all make the same calls in the same order


def show(what: str, mine: object) -> None:
    """Prints on rank 0 what every rank has."""
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    if dist.get_rank() == 0:
        print(f"{what:32}" + "   ".join(f"rank {rank}: {each}" for rank, each in enumerate(everybody)), flush=True)


def one_for_all(rank: int, size: int) -> None:
    """What one rank has, for the others."""
    show("every rank begins with", numbers(rank).tolist())
    tensor = numbers(rank)
    dist.broadcast(tensor, src=0)
    show("broadcast from rank 0", tensor.tolist())

    part = torch.empty(2, dtype=torch.int64)
    parts = [numbers(each) for each in range(size)] if rank == 0 else None
    dist.scatter(part, parts, src=0)
    show("scatter from rank 0", part.tolist())


def all_for_one(rank: int, size: int) -> None:
    """What all have, for one rank."""
    tensor = numbers(rank)
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    show("reduce to rank 0 (sum)", tensor.tolist() if rank == 0 else "-")  # the others' tensors may hold anything

    gathered = [torch.empty(2, dtype=torch.int64) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(rank), gathered, dst=0)
    show("gather to rank 0", [each.tolist() for each in gathered or []])


def all_for_all(rank: int, size: int) -> None:
    """What all have, for everybody."""
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


def later_and_with_some(rank: int, size: int) -> None:
    """Operations that run while the program goes on, and operations of some of the ranks."""
    tensor = numbers(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    meanwhile = sum(range(1000))  # whatever there is to compute
    work.wait()  # or `await work`
    show("all_reduce, asynchronous", (tensor.tolist(), meanwhile))

    pair = dist.new_group([0, 1])  # all ranks call it, members or not
    tensor = numbers(rank)
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
    show("all_reduce of ranks 0 and 1", tensor.tolist())
    dist.barrier()


def numbers(rank: int) -> Tensor:
    return torch.tensor([rank, 10 + rank])


# ---- send and recv


def pass_on(leaving: Tensor, coming: Tensor) -> None:
    """Sends to the next rank, the last one to the first, and receives from the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(leaving, dst=(rank + 1) % size)  # returns at once, else everybody might wait for the next one
    dist.recv(coming, src=(rank - 1) % size)
    assert sending is not None  # that is for ranks outside of the group
    sending.wait()


def around_the_ring(rank: int, size: int) -> None:
    received = torch.empty(2, dtype=torch.int64)
    pass_on(numbers(rank), received)
    show("from the rank before", received.tolist())


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
    """Ours by hand, and the one that is built in."""
    torch.manual_seed(rank)
    mine = torch.randn(1_000_000)
    theirs = mine.clone()
    started = time.perf_counter()
    ring_all_reduce(mine)
    middle = time.perf_counter()
    dist.all_reduce(theirs)
    ended = time.perf_counter()
    apart = (mine - theirs).abs().max().item()
    show("ring by hand - all_reduce", f"{apart:.0e}")
    show("milliseconds of both", f"{1e3 * (middle - started):.1f}, {1e3 * (ended - middle):.1f}")


# ---- parameter averaging


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """The digits in random order, as a training set and a test set; the same on all ranks."""
    from sklearn.datasets import load_digits as load_sklearn_digits  # loads slowly

    digits = load_sklearn_digits()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


def train_by_averaging(options: Options) -> float:
    """Local steps on one's own part of the images, then an average of the parameters, again and again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed + rank)  # the models begin differently ...
    train_digits, test_digits = load_digits(options.seed)
    images, labels = (part.chunk(size)[rank] for part in train_digits)
    model = build_model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # ... but for this
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    started = time.monotonic()
    for number in range(1, options.rounds + 1):
        for _ in range(options.local_steps):
            batch = torch.randint(len(labels), (options.batch_size,))
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        alone = measure_accuracy(model, test_digits)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
        together = measure_accuracy(model, test_digits)
        show(f"round {number}/{options.rounds}, before the average", f"{alone:.1f} %")
        show(f"round {number}/{options.rounds}, after it", f"{together:.1f} %")
    accuracy = measure_accuracy(model, test_digits)
    if rank == 0:
        print(
            f"parameter averaging: test accuracy {accuracy:.1f} % on each of {size} ranks, {options.rounds} rounds, "
            f"{time.monotonic() - started:.1f} s",
            flush=True,
        )
    return accuracy


@torch.no_grad()
def measure_accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of images, in percent, whose label the model finds."""
    images, labels = digits
    is_right: Tensor = model(images).argmax(dim=1) == labels
    return 100 * is_right.double().mean().item()


# ---- processes


def run_process(rank: int, options: Options) -> None:
    """The life of one process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process: end at once, without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent blocked it during the imports
    torch.set_num_threads(1)  # the processes share the cores already
    dist.init_process_group(rank=rank, world_size=options.ranks)
    for part in (one_for_all, all_for_one, all_for_all, later_and_with_some, around_the_ring, compare_all_reduces):
        part(rank, options.ranks)
    accuracy = train_by_averaging(options)
    dist.destroy_process_group()
    if rank == 0 and accuracy < options.min_accuracy:
        sys.exit(f"test accuracy {accuracy:.1f} % is below --min-accuracy {options.min_accuracy:g}")


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Lets Ctrl-C wait until the end of the block, and blocks it in the processes that start there.

    They inherit that over their imports of several seconds, during which Ctrl-C would print a traceback each.
    """
    caught: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
    if caught:
        raise KeyboardInterrupt


def spawn_processes(options: Options) -> None:
    """Starts the ranks, and stays their parent: whatever ends one of them ends all."""
    resource_tracker.ensure_running()  # this helper process unblocks SIGINT when it starts, so let it start now
    try:
        with interrupts_deferred():
            processes = mp.spawn(run_process, args=(options,), nprocs=options.ranks, join=False)
        while not processes.join():
            pass
    except mp.ProcessExitedException as error:  # it has said why
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        for process in processes.processes:
            process.terminate()
        for process in processes.processes:
            process.join()
        print("\ninterrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


# ---- the command line


def parse_options() -> tuple[Options, int]:
    """The options, and the port at which the processes find each other."""
    parser = argparse.ArgumentParser(
        description="Shows the collectives one by one, and trains a digit classifier by averaging parameters.",
        epilog="Under torchrun, --ranks may be left out.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("--ranks", type=positive(int), help="number of processes, at least 2 (default: 3)")
    add("--rounds", type=positive(int), default=8, help="averages of the parameters (default: %(default)s)")
    add("--local-steps", type=positive(int), default=25, help="steps before each of them (default: %(default)s)")
    add("--batch-size", type=positive(int), default=32, help="images per step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the models and the batches (default: "
                        "%(default)s)")  # fmt: skip
    parser.add_argument("--min-accuracy", type=float, default=0.0, metavar="PERCENT", help="exit with status 1 when "
                        "the test accuracy is below (default: %(default)s)")  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="port of the rendezvous on this machine (default: any free "
                        "one)")  # fmt: skip
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")
    try:
        arguments["ranks"] = choose_num_ranks(arguments["ranks"])
        options = Options(**arguments)
        check(options)
        return options, port if is_under_torchrun() else reserve_port(port)
    except ValueError as error:
        parser.error(str(error))


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A parser of numbers above zero, for argparse."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := kind(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive {'whole ' if kind is int else ''}number")

    return parse


def is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def choose_num_ranks(wanted: int | None) -> int:
    """As many as --ranks says, or all of torchrun's."""
    if not is_under_torchrun():
        return wanted or 3
    num_ranks = int(os.environ["WORLD_SIZE"])
    if wanted not in (None, num_ranks):
        raise ValueError(f"--ranks {wanted} does not fit torchrun's {num_ranks} processes: leave it out")
    return num_ranks


def check(options: Options) -> None:
    """Finds what would fail later, or with a puzzling text."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("the package scikit-learn is missing: pip install 'rpcdist[examples]'")
    if options.ranks < 2:
        raise ValueError("--ranks: it takes two to communicate")


def reserve_port(port: int) -> int:
    """`port` if nobody uses it, or for 0 one that is free."""
    if not 0 <= port < 65536:
        raise ValueError(f"--port {port}: must be between 0 and 65535")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}. Choose another, or leave it out") from error
        chosen: int = probe.getsockname()[1]
        return chosen


def main() -> None:
    options, port = parse_options()
    if is_under_torchrun():
        run_process(int(os.environ["RANK"]), options)
    else:
        # Importing torch takes each of them seconds, in which nothing else would be seen.
        print(f"starting {options.ranks} rank{'s' * (options.ranks > 1)} ...", flush=True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # the children inherit it
        spawn_processes(options)


if __name__ == "__main__":
    main()
