"""$ python examples/parameter_server.py --trainers 2
test accuracy 97.8 % (async, 2 trainers, 40 epochs, 3.4 s), picture: out/parameter_server.png

The first line is the command, the second its last line of output (your digits differ a little). One process is the
parameter server, the others are trainers that learn to read the 1,797 handwritten digits which scikit-learn ships, each
on its own share of the images. With `--servers 3` each of three servers has a third of the parameters.

--mode async      Trainers push gradients, which are applied at once, and get fresh parameters; with `--staleness 4`, a
                  trainer that is more than 4 steps ahead of the slowest one waits (Ho et al., 2013).
--mode sync       The servers wait for the gradients of all trainers, average them and take one step.
--mode optimizer  Distributed autograd carries gradients to the servers, where `DistributedOptimizer` takes the steps.

`ParameterServer` of `rpcdist.parallel` does all that; what is here is the training, and the processes. --kill 1 kills
trainer 1 in the middle of its work and starts it again; the others go on, and the picture shows when.

It starts its processes itself. Under torchrun the first ranks are the servers, and all others are trainers:

    $ torchrun --nproc-per-node 3 examples/parameter_server.py --mode sync
"""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from _shared import NUM_TRAIN, Bars, ExampleOptions, counted, option, parse, start


@dataclass(frozen=True)
class Options(ExampleOptions):
    mode: str = option("async", "see above", choices=("async", "sync", "optimizer"))
    servers: int = option(1, "number of servers, which share the parameters")
    trainers: int = counted(2, "number of trainers")
    staleness: int | None = option(None, "steps that a trainer may be ahead (default: any)", int, metavar="K")
    kill: int | None = option(None, "kill this trainer once, and start it again", int, metavar="TRAINER")
    epochs: int = option(40, "times that each trainer goes through its images")
    batch_size: int = option(32, "images per step and trainer")
    lr: float = option(0.2, "learning rate")
    seed: int = option(0, "random seed", int)
    device: str = option("cpu", "device of the trainers", str)
    min_accuracy: float = option(0.0, "exit with status 1 when the test is below", float, metavar="PERCENT")
    picture: Path = option(Path("out/parameter_server.png"), "file for the curves", Path)

    roles = "the servers and a trainer"
    needs = ("sklearn", "matplotlib", "tqdm")

    @property
    def num_others(self) -> int:
        return self.servers

    @property
    def steps_per_epoch(self) -> int:
        """Equal for all trainers, so that none waits for another one that has finished."""
        return NUM_TRAIN // self.trainers // self.batch_size

    def check(self) -> None:
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"each of the {self.trainers} trainers has {NUM_TRAIN // self.trainers} images, fewer than a batch of "
                f"{self.batch_size}: choose a smaller --batch-size, or fewer --trainers"
            )
        if self.staleness is not None and (self.mode == "sync" or self.staleness < 0):
            raise ValueError("--staleness is a number of steps, for async and optimizer; in sync no trainer is ahead")
        if self.kill is not None and not 0 <= self.kill < self.trainers:
            raise ValueError(f"--kill {self.kill}: the trainers are 0 to {self.trainers - 1}")
        if self.kill is not None and self.epochs < 2:
            raise ValueError("--kill kills a trainer half-way: --epochs must be 2 or more")

    def __str__(self) -> str:
        servers = f"{self.servers} servers, " if self.servers > 1 else ""
        staleness = "" if self.staleness is None else f"staleness {self.staleness}, "
        killed = "" if self.kill is None else f", trainer {self.kill} killed once"
        return f"{self.mode}, {servers}{staleness}{self.trainers} trainers, {self.epochs} epochs{killed}"


def parse_options() -> Options:
    return parse(
        Options,
        "Trains a digit classifier with parameter servers and trainers. async: each gradient is applied at once; "
        "sync: one step per round of all trainers; optimizer: distributed autograd and optimizer.",
        "Under torchrun, the first ranks are the servers, all others are trainers; --trainers may be left out.",
    )


if __name__ == "__main__":
    parse_options()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import Digits, load_digits, percent_right
from _pictures import draw_trainers
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.errors import WorkerLost
from rpcdist.optim import DistributedOptimizer
from rpcdist.parallel import ParameterServer

# ---- the training


def new_model(options: Options) -> nn.Module:
    torch.manual_seed(options.seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def new_server(options: Options) -> ParameterServer:
    """The parameters on the servers; the object may be sent to the trainers."""
    return ParameterServer(
        new_model(options),
        [f"server{index}" for index in range(options.servers)],
        torch.optim.SGD,
        lr=options.lr,
        momentum=0.9 if options.mode == "sync" else 0.0,
        mode="sync" if options.mode == "sync" else "async",
        staleness=options.staleness,
        trainers=[f"trainer{index}" for index in range(options.trainers)],
    )


@torch.no_grad()
def measure_accuracy(server: ParameterServer, model: nn.Module, digits: Digits) -> float:
    """The percentage of images that the model on the servers labels correctly."""
    images, labels = digits
    server.load_into(model)
    return percent_right(model(images.to(next(model.parameters()).device)).cpu(), labels)


def train(
    server: ParameterServer, progress: rpc.RRef[Progress], trainer: int, share: Digits, test: Digits, options: Options
) -> None:
    """Trains on its share, from the first epoch that is not done; the first server calls this on each trainer."""
    first_epoch = 1 + progress.rpc_sync().num_epochs_done(trainer)
    images, labels = (part.to(options.device) for part in share)
    learner = (OptimizerLearner if options.mode == "optimizer" else PushLearner)(server, options)
    torch.manual_seed(options.seed + 1 + trainer + first_epoch)
    for epoch in range(first_epoch, options.epochs + 1):
        if trainer == options.kill and first_epoch == 1 and epoch == 1 + options.epochs // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        order = torch.randperm(len(labels))[: options.steps_per_epoch * options.batch_size]
        losses = [learner.step(images[batch], labels[batch]) for batch in order.split(options.batch_size)]
        accuracy = measure_accuracy(server, learner.model, test)
        progress.rpc_sync().epoch_done(trainer, epoch, losses, accuracy)
    server.leave()  # the others need not wait for this trainer any more


class PushLearner:
    """Computes gradients with a copy of the model and pushes them; the reply has the next parameters."""

    def __init__(self, server: ParameterServer, options: Options) -> None:
        self.server, self.model = server, new_model(options).to(options.device)
        server.load_into(self.model)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Takes a step; returns the loss before it."""
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        self.server.step(self.model)
        return loss.item()


class OptimizerLearner:
    """Fetches the parameters and computes the loss; distributed autograd and optimizer do the rest."""

    def __init__(self, server: ParameterServer, options: Options) -> None:
        self.server, self.model, self.device = server, new_model(options).to(options.device), options.device
        self.optimizer = DistributedOptimizer(torch.optim.SGD, server.parameter_rrefs(), lr=options.lr)

    def step(self, images: Tensor, labels: Tensor) -> float:
        with autograd.context() as context_id:
            parameters = {name: value.to(self.device) for name, value in self.server.pull(requires_grad=True).items()}
            loss = cross_entropy(functional_call(self.model, parameters, (images,)), labels)
            autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        self.server.tick()
        return loss.item()


# ---- progress


class Progress:
    """What the trainers report. Each method touches its own trainer's lists only, so no lock is needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.losses: list[list[float]] = [[] for _ in range(options.trainers)]  # by trainer, one per step
        self.accuracies: list[list[tuple[float, float]]] = [[] for _ in self.losses]  # (seconds, percent) per epoch
        names = [f"trainer {trainer}" for trainer in range(options.trainers)]
        self.bars = Bars(names, options.epochs * options.steps_per_epoch, "step")
        self.absence: list[tuple[int, float]] = []  # of the killed trainer: when it died and when it was back
        self.started = time.monotonic()

    def num_epochs_done(self, trainer: int) -> int:
        return len(self.accuracies[trainer])

    def mark(self, trainer: int, what: str) -> None:
        """The trainer was killed, or is back."""
        self.absence.append((len(self.losses[trainer]), self.elapsed_s()))
        print(f"trainer {trainer}: {what} after {self.elapsed_s():.1f} s", flush=True)

    def epoch_done(self, trainer: int, epoch: int, losses: list[float], accuracy: float) -> None:
        self.losses[trainer] += losses
        self.accuracies[trainer].append((self.elapsed_s(), accuracy))
        status = f"loss {fmean(losses):.3f}, test accuracy {accuracy:.1f} %"
        self.bars.advance(trainer, len(losses), f"epoch {epoch}/{self.options.epochs}", status)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started


# ---- processes


def drive(options: Options) -> float:
    """Run by rank 0: creates the servers, gives every trainer its share, and returns the test accuracy."""
    train_digits, test_digits = load_digits(options.seed)
    server = new_server(options)
    shares = zip(*(part.chunk(options.trainers) for part in train_digits), strict=True)
    progress = Progress(options)
    arguments = [(server, rpc.RRef(progress), i, share, test_digits, options) for i, share in enumerate(shares)]
    with ThreadPoolExecutor(options.trainers) as threads:
        list(threads.map(partial(drive_trainer, progress), range(options.trainers), arguments))
    seconds = progress.elapsed_s()
    progress.bars.close()
    accuracy = measure_accuracy(server, new_model(options), test_digits)
    draw_trainers(options.picture, f"Parameter server: {options}", progress.losses, progress.accuracies,
                  options.steps_per_epoch, progress.absence, options.kill)  # fmt: skip
    print(f"test accuracy {accuracy:.1f} % ({options}, {seconds:.1f} s), picture: {options.picture}", flush=True)
    return accuracy


def drive_trainer(progress: Progress, trainer: int, arguments: tuple[object, ...]) -> None:
    """Has one trainer train; when it dies as it was told to, its successor goes on."""
    name = f"trainer{trainer}"
    while True:
        try:
            return rpc.rpc_sync(name, train, arguments, timeout=0)  # no limit
        except WorkerLost:
            if trainer != progress.options.kill or progress.absence:
                raise
        progress.mark(trainer, "killed")
        rpc.wait_for_worker(name)
        progress.mark(trainer, "back")


def run_process(rank: int, options: Options) -> None:
    """What each process of the launcher does; the one of the trainer that is killed starts it, and starts it again."""
    if options.kill is None or rank != options.servers + options.kill:
        return run_worker(rank, options)
    while True:
        worker = get_context("spawn").Process(target=run_worker, args=(rank, options))
        worker.start()
        worker.join()
        if worker.exitcode != -signal.SIGKILL:
            sys.exit(worker.exitcode)


def run_worker(rank: int, options: Options) -> None:
    """Rank 0 drives the training, the others serve its calls."""
    torch.set_num_threads(1)  # the processes share the cores already
    name = f"server{rank}" if rank < options.servers else f"trainer{rank - options.servers}"
    rpc.init_rpc(name)
    accuracy = drive(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: they serve calls until rank 0 has finished
    if accuracy is not None and accuracy < options.min_accuracy:
        sys.exit(f"test accuracy {accuracy:.1f} % is below --min-accuracy {options.min_accuracy:g}")


def main() -> None:
    start(run_process, parse_options())


if __name__ == "__main__":
    main()
