"""$ python examples/ddp_rpc.py --trainers 2
test accuracy 92.2 % (guessing: 21.3 %; 2 trainers, 1 server, 5 epochs, 10.0 s), picture: out/ddp_rpc.png

The first line is the command, the second its last line of output (your digits differ a little). Which package of
Python's standard library does a function come from? The model looks at the words in its source. The table of words is
large and lives on parameter servers (`--servers`), each with its share of the rows: a `ShardedEmbedding`. The dense
layers are small and exist on every trainer, under `DistributedDataParallel`. A master drives them all by remote calls.

One backward pass per step and trainer computes the gradients of both: those of the dense layers are averaged over the
trainers, those of the rows that the step has used go to their servers.

It starts its processes itself. Under torchrun rank 0 is the master, the next ones are servers, the others trainers:

    $ torchrun --nproc-per-node 4 examples/ddp_rpc.py
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from _shared import ExampleOptions, at_least, count, counted, option, require_accuracy, start


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Learns which package a function comes from: tables of words on servers, dense layers under DDP."""

    trainers: int = counted(2, "number of trainers")
    servers: int = option(1, "number of servers, which share the table")
    epochs: int = option(5, "times through all functions")
    min_accuracy: float = at_least("the test accuracy", "PERCENT")
    picture: Path = option(Path("out/ddp_rpc.png"), "file for the loss and the confusion matrix", Path)

    roles = "the master, the servers and the trainers"

    @property
    def first_names(self) -> list[str]:
        return ["master", *(f"server{number}" for number in range(self.servers))]


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import Functions, load_functions
from _pictures import draw_confusion
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.collectives as dist
import rpcdist.rpc as rpc
from rpcdist.parallel import DistributedDataParallel, ShardedEmbedding

NUM_WORDS = 8000
WIDTH = 48  # of a word's vector
BATCH_SIZE = 32  # functions per step and trainer
LEARNING_RATE = 0.05


class Trainer:
    """A copy of the dense layers, and a share of the functions. The master calls its methods."""

    def __init__(self, table: ShardedEmbedding, share: Functions, num_packages: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.table, self.share = table, share
        dense = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, num_packages))
        self.dense = DistributedDataParallel(dense)
        self.optimizer = torch.optim.Adagrad(dense.parameters(), lr=LEARNING_RATE)

    def train(self, epoch: int, num_steps: int) -> list[float]:
        """The loss of each step. All trainers take the same number of steps."""
        order = torch.randperm(len(self.share), generator=torch.Generator().manual_seed(epoch))
        return [self.step(self.share.pick(chosen)) for chosen in order.split(BATCH_SIZE)[:num_steps]]

    def step(self, batch: Functions) -> float:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.dense(self.mean_vectors(batch)), batch.labels)
        loss.backward()  # averages the gradients of the dense layers
        self.optimizer.step()
        self.table.step()  # sends those of the rows
        return loss.item()

    def mean_vectors(self, functions: Functions) -> Tensor:
        """The mean of the vectors of each function's words, (functions, WIDTH); only these rows are sent."""
        lengths = torch.diff(functions.starts, append=torch.tensor([len(functions.words)]))
        return torch.segment_reduce(self.table(functions.words), "mean", lengths=lengths)

    def dense_parameters(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.dense.parameters()).detach()

    @torch.no_grad()
    def guess(self, functions: Functions) -> Tensor:
        """The package of each function. Without DistributedDataParallel, so that one trainer may call this alone."""
        guesses: Tensor = self.dense.module(self.mean_vectors(functions)).argmax(dim=1)
        return guesses


def run_master(options: Options) -> float:
    """Creates the table and the trainers on their workers, trains, and returns the test accuracy."""
    library = load_functions(NUM_WORDS, options.seed)
    print(f"{len(library.train)} functions to learn from, {len(library.test)} to test, {NUM_WORDS} words", flush=True)
    weight = 0.1 * torch.randn(NUM_WORDS, WIDTH, generator=torch.Generator().manual_seed(options.seed))
    table = ShardedEmbedding(
        NUM_WORDS, WIDTH, options.first_names[1:], torch.optim.Adagrad, weight=weight, lr=LEARNING_RATE
    )
    shares = torch.arange(len(library.train)).chunk(options.trainers)
    trainers = [
        rpc.remote(name, Trainer, (table, library.train.pick(share), len(library.packages), options.seed))
        for name, share in zip(options.names[1 + options.servers :], shares, strict=True)
    ]
    num_steps = max(1, len(shares[-1]) // BATCH_SIZE)  # the last share may be smaller than the others
    started = time.monotonic()
    losses: list[float] = []
    accuracies: list[float] = []
    for epoch in range(1, options.epochs + 1):
        of_trainers = rpc.wait_all([trainer.rpc_async(timeout=0).train(epoch, num_steps) for trainer in trainers])
        losses += [sum(step) / len(step) for step in zip(*of_trainers, strict=True)]
        guesses = trainers[0].rpc_sync().guess(library.test)
        accuracies.append(100 * (guesses == library.test.labels).double().mean().item())
        print(f"epoch {epoch}/{options.epochs}: test accuracy {accuracies[-1]:.1f} %", flush=True)
    seconds = time.monotonic() - started
    copies = rpc.wait_all([trainer.rpc_async().dense_parameters() for trainer in trainers])
    apart = max((copy - copies[0]).abs().max().item() for copy in copies)
    print(f"the dense layers of {count(options.trainers, 'trainer')} differ by {apart:g}")  # 0: DDP keeps them equal
    for name, guess, label in list(zip(library.names, guesses, library.test.labels, strict=True))[:4]:
        verdict = "right" if guess == label else f"wrong, it is {library.packages[label]}"
        print(f"  def {name}(...) is from {library.packages[guess]} ({verdict})")
    draw_confusion(
        options.picture, losses, accuracies, library.packages, library.test.labels.tolist(), guesses.tolist()
    )
    guessing = 100 * torch.bincount(library.test.labels).max().item() / len(library.test)
    workers = f"{count(options.trainers, 'trainer')}, {count(options.servers, 'server')}"
    what = f"guessing: {guessing:.1f} %; {workers}, {count(options.epochs, 'epoch')}, {seconds:.1f} s"
    print(f"test accuracy {accuracies[-1]:.1f} % ({what}), picture: {options.picture}", flush=True)
    return accuracies[-1]


def run_process(rank: int, options: Options) -> None:
    """The work of each process: rank 0 is the master, the others serve its calls."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but torch warns unless it is set
    number = rank - 1 - options.servers
    if number >= 0:  # the trainers form a process group; its keys in the job's store get a prefix
        store, *_ = next(dist.rendezvous("env://"))
        trainers_store = dist.PrefixStore("trainers", store)
        dist.init_process_group("tcp", store=trainers_store, rank=number, world_size=options.trainers)
    rpc.init_rpc(options.names[rank])
    accuracy = run_master(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: the others serve calls until the master has finished
    if number >= 0:
        dist.destroy_process_group()
    if accuracy is not None:
        require_accuracy(accuracy, options.min_accuracy)


def main() -> None:
    start(run_process, Options.parse())


if __name__ == "__main__":
    main()
