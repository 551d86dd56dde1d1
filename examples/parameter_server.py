"""$ python examples/parameter_server.py --trainers 2
test accuracy 97.8 % (async, 2 trainers, 40 epochs, 3.4 s), picture: out/parameter_server.png

The first line is the command, the second its last line of output (your digits differ a little). One process is the
parameter server, the others are trainers that learn to read the 1,797 handwritten digits which scikit-learn ships, each
on its own share of the images. With `--servers 3` each of three servers has a third of the parameters.

--mode async      Trainers push gradients, which are applied at once, without any lock (Hogwild: Recht et al., 2011),
                  and get fresh parameters; with `--staleness 4`, a trainer that is more than 4 steps ahead of the
                  slowest one waits (bounded staleness: Ho et al., 2013).
--mode sync       The servers wait for the gradients of all trainers, average them and take one step.
--mode optimizer  Distributed autograd carries gradients to the servers, where `DistributedOptimizer` takes the steps.

--kill 1 kills trainer 1 in the middle of its work and starts it again; the others go on, and the picture shows when.

It starts its processes itself. Under torchrun the first ranks are the servers, and all others are trainers:

    $ torchrun --nproc-per-node 3 examples/parameter_server.py --mode sync
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
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
        if self.kill is not None and (self.mode != "async" or self.staleness is not None or self.epochs < 2):
            raise ValueError("--kill is for --mode async without --staleness, where nobody waits, and 2 epochs")

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
from torch.futures import Future
from torch.nn.functional import cross_entropy, linear

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.errors import WorkerLost
from rpcdist.optim import DistributedOptimizer

SHAPES = ((128, 64), (128,), (10, 128), (10,))  # of the weights and biases of both layers
MOMENTUM = 0.9


# ---- the model, as a function of one vector of parameters, which can be divided anywhere


def initial_parameters(seed: int) -> Tensor:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.utils.parameters_to_vector(layers.parameters()).detach()


def predict(parameters: Tensor, images: Tensor) -> Tensor:
    """The scores (n, 10) of the digits."""
    parts = parameters.split([math.prod(shape) for shape in SHAPES])
    weight, bias, weight_out, bias_out = (part.view(shape) for part, shape in zip(parts, SHAPES, strict=True))
    return linear(linear(images, weight, bias).relu(), weight_out, bias_out)


@torch.no_grad()
def measure_accuracy(parameters: Tensor, digits: Digits) -> float:
    """The percentage of images that the model labels correctly."""
    images, labels = digits
    return percent_right(predict(parameters, images), labels)


# ---- the parameter servers: trainers call their methods through remote references


class Server:
    """Owns a slice of the parameters. Calls of several trainers run on several threads."""

    def __init__(self, options: Options, index: int) -> None:
        shard = initial_parameters(options.seed).tensor_split(options.servers)[index]
        self.options = options
        self.parameter = nn.Parameter(shard.clone())
        self.clocks = Clocks(options.trainers, 0 if options.mode == "sync" else options.staleness)

    def fetch(self) -> Tensor:
        """The current parameters; the trainer gets a copy, as with every value that is sent."""
        return self.parameter

    @rpc.functions.async_execution
    def push(self, trainer: int, gradient: Tensor) -> Future[Tensor]:
        """Applies a gradient. The call ends when the returned future completes; no thread waits for that."""
        self.apply(gradient)
        return self.clocks.tick(trainer).then(lambda _: self.parameter.detach())

    @rpc.functions.async_execution
    def tick(self, trainer: int) -> Future[None]:
        return self.clocks.tick(trainer)

    @torch.no_grad()
    def apply(self, gradient: Tensor) -> None:
        # No lock: a rare lost update costs less than waiting.
        self.parameter.sub_(gradient, alpha=self.options.lr)


class BatchServer(Server):
    """Takes one step when the gradients of all trainers have arrived, so all trainers take the same step."""

    def __init__(self, options: Options, index: int) -> None:
        super().__init__(options, index)
        self.optimizer = torch.optim.SGD([self.parameter], lr=options.lr, momentum=MOMENTUM)
        self.lock = threading.Lock()
        self.gradients: list[Tensor] = []

    def apply(self, gradient: Tensor) -> None:
        with self.lock:
            self.gradients.append(gradient)
            if len(self.gradients) == self.options.trainers:
                self.parameter.grad = torch.stack(self.gradients).mean(dim=0)
                self.optimizer.step()
                self.gradients.clear()


class Clocks:
    """Counts the steps of each trainer, and holds those that are more than `staleness` ahead of the slowest."""

    def __init__(self, num_trainers: int, staleness: int | None) -> None:
        self.steps = [0] * num_trainers
        self.staleness = math.inf if staleness is None else staleness
        self.waiting: list[tuple[int, Future[None]]] = []
        self.lock = threading.Lock()

    def tick(self, trainer: int) -> Future[None]:
        """Counts a step of a trainer; the future completes when it may take the next one."""
        turn: Future[None] = Future()
        with self.lock:
            self.steps[trainer] += 1
            self.waiting.append((self.steps[trainer], turn))
            newest = min(self.steps) + self.staleness
            free = [waiting for step, waiting in self.waiting if step <= newest]
            self.waiting = [(step, waiting) for step, waiting in self.waiting if step > newest]
        for each in free:  # outside the lock, since this sends the answers
            each.set_result(None)
        return turn


Servers = Sequence[rpc.RRef[Server]]


def fetch(servers: Servers) -> Tensor:
    """All parameters; in a context of distributed autograd, their gradients go back to the servers."""
    return torch.cat(rpc.wait_all([server.rpc_async().fetch() for server in servers]))


# ---- the trainers


def train(
    servers: Servers, progress: rpc.RRef[Progress], trainer: int, share: Digits, test_digits: Digits, options: Options
) -> None:
    """Trains on its share, from the first epoch that is not done; the first server calls this on each trainer."""
    first_epoch = 1 + progress.rpc_sync().num_epochs_done(trainer)
    torch.manual_seed(options.seed + 1 + trainer + first_epoch)
    images, labels = (part.to(options.device) for part in share)
    learner = (OptimizerLearner if options.mode == "optimizer" else PushLearner)(servers, trainer, options)
    for epoch in range(first_epoch, options.epochs + 1):
        if trainer == options.kill and first_epoch == 1 and epoch == 1 + options.epochs // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        order = torch.randperm(len(labels))[: options.steps_per_epoch * options.batch_size]
        losses = [learner.step((images[batch], labels[batch])) for batch in order.split(options.batch_size)]
        accuracy = measure_accuracy(fetch(servers), test_digits)
        progress.rpc_sync().epoch_done(trainer, epoch, losses, accuracy)


class PushLearner:
    """Computes gradients with a copy of the parameters and pushes them; the reply has the next parameters."""

    def __init__(self, servers: Servers, trainer: int, options: Options) -> None:
        self.servers, self.trainer, self.device = servers, trainer, options.device
        self.parameters = fetch(servers)

    def step(self, batch: Digits) -> float:
        """Takes a step; returns the loss before it."""
        parameters = self.parameters.detach().to(self.device).requires_grad_()
        loss = cross_entropy(predict(parameters, batch[0]), batch[1])
        (gradient,) = torch.autograd.grad(loss, parameters)
        parts = gradient.cpu().tensor_split(len(self.servers))
        pushed = [s.rpc_async().push(self.trainer, part) for s, part in zip(self.servers, parts, strict=True)]
        self.parameters = torch.cat(rpc.wait_all(pushed))
        return loss.item()


class OptimizerLearner:
    """Fetches the parameters and computes the loss; distributed autograd and optimizer do the rest."""

    def __init__(self, servers: Servers, trainer: int, options: Options) -> None:
        self.servers, self.trainer, self.options = servers, trainer, options
        parameters = [server.remote().fetch() for server in servers]  # references: the values stay on the servers
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=options.lr)

    def step(self, batch: Digits) -> float:
        with autograd.context() as context_id:
            loss = cross_entropy(predict(fetch(self.servers).to(self.options.device), batch[0]), batch[1])
            autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        if self.options.staleness is not None:
            self.servers[0].rpc_sync().tick(self.trainer)
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
    kind = BatchServer if options.mode == "sync" else Server
    servers = [rpc.remote(f"server{index}", kind, (options, index)) for index in range(options.servers)]
    shares = zip(*(part.chunk(options.trainers) for part in train_digits), strict=True)
    progress = Progress(options)
    arguments = [(servers, rpc.RRef(progress), i, share, test_digits, options) for i, share in enumerate(shares)]
    with ThreadPoolExecutor(options.trainers) as threads:
        list(threads.map(partial(drive_trainer, progress), range(options.trainers), arguments))
    seconds = progress.elapsed_s()
    progress.bars.close()
    accuracy = measure_accuracy(fetch(servers), test_digits)
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
