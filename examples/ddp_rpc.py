"""$ python examples/ddp_rpc.py --trainers 2
test accuracy 92.2 % (guessing: 21.3 %; 2 trainers, 1 server, 5 epochs, 10.0 s), picture: out/ddp_rpc.png

The first line is the command, the second its last line of output (your digits differ a little). Which package of
Python's standard library does a function come from? The model looks at the words in its source. The table of words, a
sparse `EmbeddingBag`, is large and lives on parameter servers (`--servers`), each with its share of the words. The
dense layers are small and exist on every trainer, under `DistributedDataParallel`. A master drives them all by remote
calls.

One distributed backward pass per step and trainer brings sparse gradients to the servers, and the average over all
trainers to the dense layers; one distributed optimizer steps both.

It starts its processes itself. Under torchrun rank 0 is the master, the next ones are servers, the others trainers:

    $ torchrun --nproc-per-node 4 examples/ddp_rpc.py
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from _data import library_functions
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.autograd as dist_autograd
import rpcdist.collectives as dist
import rpcdist.rpc as rpc
from rpcdist import launch, placement_from_environment
from rpcdist.optim import DistributedOptimizer
from rpcdist.parallel import DistributedDataParallel

# Some systems leave a few of them out.
PACKAGES = (
    "asyncio",
    "email",
    "encodings",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)


@dataclass(frozen=True)
class Options:
    """The options of the command line; every process gets a copy."""

    trainers: int
    servers: int
    epochs: int
    batch_size: int
    words: int
    width: int
    lr: float
    seed: int
    min_accuracy: float
    device: str
    picture: Path

    @property
    def world_size(self) -> int:
        return 1 + self.servers + self.trainers

    def name(self, rank: int) -> str:
        if rank == 0:
            return "master"
        return f"server{rank - 1}" if rank <= self.servers else f"trainer{rank - 1 - self.servers}"


# ---- the text


@dataclass(frozen=True)
class Functions:
    """Functions as bags of words: the words of all functions, and the start of the bag of each function."""

    words: Tensor  # (number of words) int64
    starts: Tensor  # (number of functions) int64
    labels: Tensor  # (number of functions) int64: the package

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, chosen: Tensor) -> Functions:
        """The chosen functions, in this order."""
        ends = torch.cat([self.starts[1:], torch.tensor([len(self.words)])])
        bags = [self.words[self.starts[number] : ends[number]] for number in chosen]
        lengths = torch.tensor([len(bag) for bag in bags])
        return Functions(torch.cat(bags), lengths.cumsum(0) - lengths, self.labels[chosen])


@dataclass(frozen=True)
class Library:
    """The data set, as the master reads it."""

    packages: list[str]
    names: list[str]  # of the test functions
    train: Functions
    test: Functions


def read_library(options: Options) -> Library:
    """The functions of the standard library; one eighth of them is the test set."""
    functions = {package: those for package in PACKAGES if (those := list(library_functions(package)))}
    packages = list(functions)
    found = [(name, words, label) for label, package in enumerate(packages) for name, words in functions[package]]
    frequent = Counter(word for _, words, _ in found for word in words).most_common(options.words)
    number_of = {word: number for number, (word, _) in enumerate(frequent)}
    bags = [torch.tensor([number_of[word] for word in words if word in number_of] or [0]) for _, words, _ in found]
    lengths = torch.tensor([len(bag) for bag in bags])
    labels = torch.tensor([label for _, _, label in found])
    everything = Functions(torch.cat(bags), lengths.cumsum(0) - lengths, labels)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(options.seed))
    test, train = order[: len(order) // 8], order[len(order) // 8 :]
    return Library(packages, [found[int(number)][0] for number in test], everything.pick(train), everything.pick(test))


# ---- the parameter servers


class WordTable(nn.Module):
    """The rows of one server: every `servers`-th word of the table."""

    def __init__(self, number: int, options: Options) -> None:
        super().__init__()
        torch.manual_seed(options.seed + number)
        self.device = options.device
        rows = -(-options.words // options.servers)
        self.bags = nn.EmbeddingBag(rows, options.width, mode="sum", sparse=True).to(options.device)
        nn.init.normal_(self.bags.weight, std=0.1)

    def forward(self, rows: Tensor, starts: Tensor) -> Tensor:
        sums: Tensor = self.bags(rows.to(self.device), starts.to(self.device)).cpu()
        return sums

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """References for the optimizers, which update the table on its server."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class RemoteTables:
    """The whole table, as used by a trainer: the words of a function -> the mean of their vectors."""

    def __init__(self, tables: list[rpc.RRef[WordTable]]) -> None:
        self.tables = tables

    def __call__(self, functions: Functions) -> Tensor:
        lengths = torch.diff(functions.starts, append=torch.tensor([len(functions.words)]))
        sums = [
            table.rpc_async().forward(*self.share(functions, lengths, number))
            for number, table in enumerate(self.tables)
        ]
        total: Tensor = sum(rpc.wait_all(sums), torch.zeros(()))
        return total / lengths[:, None]

    def share(self, functions: Functions, lengths: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The rows that a batch needs from one server, and the start of each bag in them."""
        is_there = functions.words % len(self.tables) == number
        bag_of_word = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        counts = torch.bincount(bag_of_word[is_there], minlength=len(lengths))
        return functions.words[is_there] // len(self.tables), counts.cumsum(0) - counts

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rref for table in self.tables for rref in table.rpc_sync().parameter_rrefs()]


# ---- the trainers: the master calls their methods


class Trainer:
    """A copy of the dense layers, and a share of the functions."""

    def __init__(
        self, tables: list[rpc.RRef[WordTable]], share: Functions, num_packages: int, options: Options
    ) -> None:
        torch.manual_seed(options.seed)  # equal on all trainers; DistributedDataParallel would ensure that too
        self.options = options
        self.share = share
        self.tables = RemoteTables(tables)
        dense = nn.Sequential(nn.Linear(options.width, 64), nn.ReLU(), nn.Linear(64, num_packages))
        self.dense = DistributedDataParallel(dense.to(options.device))
        own = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.Adagrad, own + self.tables.parameter_rrefs(), lr=options.lr)

    def train(self, epoch: int, num_steps: int) -> list[float]:
        """The loss of each step. All trainers take the same number of steps."""
        order = torch.randperm(len(self.share), generator=torch.Generator().manual_seed(epoch))
        return [self.step(self.share.pick(chosen)) for chosen in order.split(self.options.batch_size)[:num_steps]]

    def step(self, batch: Functions) -> float:
        with dist_autograd.context() as context_id:
            loss = cross_entropy(
                self.dense(self.tables(batch).to(self.options.device)), batch.labels.to(self.options.device)
            )
            dist_autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        return loss.item()

    def dense_parameters(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.dense.parameters()).detach().cpu()

    @torch.no_grad()
    def guess(self, functions: Functions) -> Tensor:
        """The package of each function. Without DistributedDataParallel, so that one trainer may call this alone."""
        guesses: Tensor = self.dense.module(self.tables(functions).to(self.options.device)).argmax(dim=1).cpu()
        return guesses


# ---- the master


@dataclass
class History:
    """The course of the training."""

    losses: list[float] = field(default_factory=list)  # of each step, the mean of the trainers
    accuracies: list[float] = field(default_factory=list)  # in percent, after each epoch


def run_master(options: Options) -> float:
    """Creates the tables and the trainers on their workers, trains, and returns the test accuracy."""
    library = read_library(options)
    print(
        f"{len(library.train)} functions to learn from, {len(library.test)} to test, {options.words} words", flush=True
    )
    tables = [rpc.remote(f"server{number}", WordTable, args=(number, options)) for number in range(options.servers)]
    trainers = [
        rpc.remote(f"trainer{number}", Trainer, args=(tables, share, len(library.packages), options))
        for number, share in enumerate(
            map(library.train.pick, torch.arange(len(library.train)).chunk(options.trainers))
        )
    ]
    started = time.monotonic()
    history = History()
    guesses = torch.empty(0)
    for epoch in range(1, options.epochs + 1):
        run_epoch(trainers, epoch, len(library.train), history, options)
        guesses = trainers[0].rpc_sync().guess(library.test)
        history.accuracies.append(100 * (guesses == library.test.labels).double().mean().item())
        print(f"epoch {epoch}/{options.epochs}: test accuracy {history.accuracies[-1]:.1f} %", flush=True)
    seconds = time.monotonic() - started
    copies = rpc.wait_all([trainer.rpc_async().dense_parameters() for trainer in trainers])
    apart = max((copy - copies[0]).abs().max().item() for copy in copies)
    print(f"the dense layers of {count(options.trainers, 'trainer')} differ by {apart:g}")  # 0: DDP keeps them equal
    show_examples(library, guesses)
    draw(history, library, guesses, options)
    guessing = 100 * torch.bincount(library.test.labels).max().item() / len(library.test)
    print(
        f"test accuracy {history.accuracies[-1]:.1f} % (guessing: {guessing:.1f} %; "
        f"{count(options.trainers, 'trainer')}, {count(options.servers, 'server')}, {count(options.epochs, 'epoch')}, "
        f"{seconds:.1f} s), picture: {options.picture}",
        flush=True,
    )
    return history.accuracies[-1]


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def run_epoch(
    trainers: list[rpc.RRef[Trainer]], epoch: int, num_functions: int, history: History, options: Options
) -> None:
    num_steps = max(1, num_functions // options.trainers // options.batch_size)
    losses = rpc.wait_all([trainer.rpc_async(timeout=0).train(epoch, num_steps) for trainer in trainers])
    history.losses += [sum(step) / len(step) for step in zip(*losses, strict=True)]


def show_examples(library: Library, guesses: Tensor) -> None:
    print("Some predictions:")
    for name, guess, label in list(zip(library.names, guesses, library.test.labels, strict=True))[:4]:
        verdict = "right" if guess == label else f"wrong, it is {library.packages[label]}"
        print(f"  def {name}(...) is from {library.packages[guess]} ({verdict})")


def draw(history: History, library: Library, guesses: Tensor, options: Options) -> None:
    """Writes the picture: the loss, the accuracy, and the confusion matrix of the packages."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import layout_engine, pyplot

    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 5), layout=layout)
    left.plot(history.losses, linewidth=0.8)
    left.set(title="Training loss", xlabel="step", ylim=(0, None))
    middle.plot(range(1, options.epochs + 1), history.accuracies, "o-", color="C1")
    middle.set(title="Test accuracy in %", xlabel="epoch", ylim=(0, 100), xticks=range(1, options.epochs + 1))
    for axes in (left, middle):
        axes.spines[["top", "right"]].set_visible(False)
    num_packages = len(library.packages)
    pairs = library.test.labels * num_packages + guesses
    table = torch.bincount(pairs, minlength=num_packages**2).double().unflatten(0, (num_packages, num_packages))
    right.imshow(table / table.sum(dim=1, keepdim=True).clamp(min=1), cmap="Blues", vmin=0, vmax=1)
    right.set_xticks(range(num_packages), library.packages, rotation=60, ha="right")
    right.set_yticks(range(num_packages), library.packages)
    right.set(title=f"{history.accuracies[-1]:.1f} % are right", xlabel="predicted package", ylabel="actual package")
    figure.suptitle("Which package does a function come from?", fontweight="bold")
    figure.savefig(options.picture, dpi=130)


# ---- processes


def run_process(rank: int, options: Options) -> None:
    """What each process does: rank 0 is the master, the others serve its calls."""
    torch.set_num_threads(1)  # the processes share the cores already
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but torch warns unless it is set
    number = rank - 1 - options.servers
    if number >= 0:  # the trainers form a process group; its keys in the job's store get a prefix
        store, *_ = next(dist.rendezvous("env://"))
        trainers_store = dist.PrefixStore("trainers", store)
        dist.init_process_group("tcp", store=trainers_store, rank=number, world_size=options.trainers)
    rpc.init_rpc(options.name(rank))
    accuracy = run_master(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: the others serve calls until the master has finished
    if number >= 0:
        dist.destroy_process_group()
    if accuracy is not None and accuracy < options.min_accuracy:
        sys.exit(f"test accuracy {accuracy:.1f} % is below --min-accuracy {options.min_accuracy:g}")


# ---- the command line


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="Learns which package a function comes from: tables of words on servers, dense layers under DDP.",
        epilog="Under torchrun, rank 0 is the master, the next --servers ranks are servers, and the others trainers.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("--trainers", type=positive(int), help="number of trainers (default: 2)")
    add("--servers", type=positive(int), default=1, help="the table is divided among them (default: %(default)s)")
    add("--epochs", type=positive(int), default=5, help="times through all functions (default: %(default)s)")
    add("--batch-size", type=positive(int), default=32, help="functions per step and trainer (default: %(default)s)")
    add("--words", type=positive(int), default=8000, help="rows of the table (default: %(default)s)")
    add("--width", type=positive(int), default=48, help="width of a word's vector (default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.05, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--min-accuracy", type=float, default=0.0, metavar="PERCENT", help="exit with status 1 when "
                        "the test accuracy is below (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="device of the parts (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("out/ddp_rpc.png"), metavar="FILE",
                        help="file for the loss and the confusion matrix (default: %(default)s)")  # fmt: skip
    arguments = vars(parser.parse_args())
    try:
        arguments["trainers"] = choose_num_trainers(arguments["trainers"], arguments["servers"])
        options = Options(**arguments)
        check(options)
        return options
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


def choose_num_trainers(wanted: int | None, servers: int) -> int:
    """The value of --trainers, or all ranks of torchrun's that are neither the master nor a server."""
    place = placement_from_environment()
    if place is None:
        return wanted or 2
    num_trainers = place.world_size - 1 - servers
    if num_trainers < 1 or wanted not in (None, num_trainers):
        raise ValueError(
            f"torchrun must start the master, {count(servers, 'server')} and the trainers: --nproc-per-node "
            f"{1 + servers + (wanted or 2)}"
        )
    return num_trainers


def check(options: Options) -> None:
    """Raises `ValueError` for options that would fail late, or with a message that is hard to understand."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the package matplotlib is missing: pip install 'rpcdist[examples]'")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch finds no GPU here")
    if options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {options.picture}: the name must end in .png, .pdf or .svg")
    options.picture.parent.mkdir(parents=True, exist_ok=True)


def main() -> None:
    options = parse_options()
    if placement_from_environment() is None:
        # Importing torch takes each process seconds, in which nothing else would be seen.
        print(f"starting the master and {options.world_size - 1} workers ...", flush=True)
    launch(run_process, (options,), workers=options.world_size)


if __name__ == "__main__":
    main()
