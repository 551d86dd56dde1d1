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

import argparse
import importlib.util
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Never

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import cross_entropy, linear

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist import launch, placement_from_environment
from rpcdist.errors import ConfigError, WorkerLost
from rpcdist.optim import DistributedOptimizer

if TYPE_CHECKING:
    from tqdm import tqdm

NUM_IMAGES = 1797
NUM_TRAIN = 1437  # the other 360 images measure the accuracy
SHAPES = ((128, 64), (128,), (10, 128), (10,))  # of the weights and biases of both layers
MOMENTUM = 0.9
Digits = tuple[Tensor, Tensor]  # images (n, 64) float32 from 0 to 1, labels (n,) int64


@dataclass(frozen=True)
class Options:
    """The options of the command line; every process gets a copy."""

    mode: str
    servers: int
    trainers: int
    epochs: int
    batch_size: int
    lr: float
    seed: int
    device: str
    min_accuracy: float
    picture: Path
    staleness: int | None = None  # no limit
    kill: int | None = None  # this trainer dies once

    @property
    def steps_per_epoch(self) -> int:
        """Equal for all trainers, so that none waits for another one that has finished."""
        return NUM_TRAIN // self.trainers // self.batch_size

    def __str__(self) -> str:
        servers = f"{self.servers} servers, " if self.servers > 1 else ""
        staleness = "" if self.staleness is None else f"staleness {self.staleness}, "
        killed = "" if self.kill is None else f", trainer {self.kill} killed once"
        return f"{self.mode}, {servers}{staleness}{self.trainers} trainers, {self.epochs} epochs{killed}"


# ---- the model, as a function of one vector of parameters, which can be divided anywhere; and the data


def initial_parameters(seed: int) -> Tensor:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.utils.parameters_to_vector(layers.parameters()).detach()


def predict(parameters: Tensor, images: Tensor) -> Tensor:
    """The scores (n, 10) of the digits."""
    parts = parameters.split([math.prod(shape) for shape in SHAPES])
    weight, bias, weight_out, bias_out = (part.view(shape) for part, shape in zip(parts, SHAPES, strict=True))
    return linear(linear(images, weight, bias).relu(), weight_out, bias_out)


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """The digits in random order, as a training set and a test set."""
    from sklearn.datasets import load_digits as load_sklearn_digits  # slow to import, and only one process needs it

    digits = load_sklearn_digits()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


@torch.no_grad()
def measure_accuracy(parameters: Tensor, digits: Digits) -> float:
    """The percentage of images that the model labels correctly."""
    images, labels = digits
    is_right: Tensor = predict(parameters, images).argmax(dim=1) == labels
    return 100 * is_right.double().mean().item()


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


# ---- progress and picture


class Progress:
    """One bar per trainer on a terminal, a line per epoch elsewhere. One process prints them all, so lines never mix.

    Each trainer's calls come one after the other, but those of different trainers on different threads: every method
    touches only its own trainer's bar and lists (tqdm locks the terminal).
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.losses: list[list[float]] = [[] for _ in range(options.trainers)]  # by trainer, one per step
        self.accuracies: list[list[tuple[float, float]]] = [[] for _ in self.losses]  # (seconds, percent) per epoch
        self.bars: list[tqdm[Never]] = []
        if sys.stderr.isatty():  # in a pipe, a file or a log, bars would be noise
            from tqdm import tqdm

            bar = partial(tqdm, total=options.epochs * options.steps_per_epoch, unit="step", dynamic_ncols=True)
            self.bars = [bar(desc=f"trainer {trainer}", position=trainer) for trainer in range(options.trainers)]
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
        if self.bars:
            self.bars[trainer].set_postfix_str(status, refresh=False)
            self.bars[trainer].update(len(losses))
        else:
            print(f"trainer {trainer}: epoch {epoch}/{self.options.epochs}, {status}", flush=True)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started


def draw(progress: Progress, options: Options, accuracy: float) -> None:
    """Writes the picture: the loss of every trainer over its steps, and its test accuracy over time."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import layout_engine, pyplot

    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout=layout)
    for trainer, losses in enumerate(progress.losses):
        look = {"color": f"C{trainer}", "label": f"trainer {trainer}"}
        means = [fmean(losses[max(0, end - options.steps_per_epoch) : end]) for end in range(1, len(losses) + 1)]
        left.plot(losses, color=look["color"], alpha=0.15, linewidth=0.7, zorder=1)
        left.plot(means, **look)
        right.plot(*zip(*progress.accuracies[trainer], strict=True), marker=".", linewidth=1, **look)
    if len(progress.absence) == 2:
        (step, died_s), (_, back_s) = progress.absence
        text = f"trainer {options.kill} is killed,\nand back {back_s - died_s:.1f} s later"
        left.axvline(step, color="black", linestyle=":", linewidth=1)
        left.text(step, left.get_ylim()[1], f" {text}", verticalalignment="top", fontsize="small")
        right.axvspan(died_s, back_s, color=f"C{options.kill}", alpha=0.15, label=f"without trainer {options.kill}")
    left.set(title="Training loss (faint: of each batch)", xlabel="step of the trainer", yscale="log")
    right.set(title="Test accuracy in % after each epoch", xlabel="seconds", ylim=(None, 100.5))
    right.axhline(accuracy, color="gray", linestyle="--", linewidth=1, label=f"{accuracy:.1f} % at the end", zorder=1)
    for axes, place in ((left, "upper right"), (right, "lower right")):
        axes.legend(loc=place, frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Parameter server: {options}", fontweight="bold")
    figure.savefig(options.picture, dpi=130)


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
    for bar in progress.bars:
        bar.close()
    accuracy = measure_accuracy(fetch(servers), test_digits)
    draw(progress, options, accuracy)
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


# ---- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a digit classifier with parameter servers and trainers. async: each gradient is applied at "
        "once; sync: one step per round of all trainers; optimizer: distributed autograd and optimizer.",
        epilog="Under torchrun, the first ranks are the servers, all others are trainers; --trainers may be left out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, unset = parser.add_argument, argparse.SUPPRESS
    add("--mode", choices=("async", "sync", "optimizer"), default="async", help="see above")
    add("--servers", type=positive(int), default=1, metavar="N", help="number of servers, which share the parameters")
    add("--trainers", type=positive(int), default=unset, metavar="N", help="number of trainers (default: 2)")
    add("--staleness", type=int, default=unset, metavar="K", help="steps that a trainer may be ahead (default: any)")
    add("--kill", type=int, default=unset, metavar="TRAINER", help="kill this trainer once, and start it again")
    add("--epochs", type=positive(int), default=40, metavar="N", help="times that each trainer goes through its images")
    add("--batch-size", type=positive(int), default=32, metavar="N", help="images per step and trainer")
    add("--lr", type=positive(float), default=0.2, help="learning rate")
    add("--seed", type=int, default=0, help="random seed")
    add("--device", default="cpu", help="device of the trainers")
    add("--min-accuracy", type=float, default=0.0, metavar="PERCENT", help="exit with status 1 when the test is below")
    add("--picture", type=Path, default=Path("out/parameter_server.png"), metavar="FILE", help="file for the curves")
    add("--port", type=int, default=0, help="port of the rendezvous on this machine; 0 is any free one")
    return parser


def parse_options(parser: argparse.ArgumentParser) -> tuple[Options, int]:
    """The options, and the port at which the processes find each other."""
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")
    try:
        arguments["trainers"] = choose_num_trainers(arguments.get("trainers"), arguments["servers"])
        options = Options(**arguments)
        check(options)
        return options, port
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


def choose_num_trainers(wanted: int | None, num_servers: int) -> int:
    """The value of --trainers, or all of torchrun's ranks that are not servers."""
    place = placement_from_environment()
    if place is None:
        return wanted or 2
    num_trainers = place.world_size - num_servers
    if num_trainers < 1:
        raise ValueError(f"torchrun must also start a trainer: at least --nproc-per-node {num_servers + 1}")
    if wanted not in (None, num_trainers):
        raise ValueError(f"--trainers {wanted} does not fit torchrun, which has room for {num_trainers}: leave it out")
    return num_trainers


def check(options: Options) -> None:
    """Raises `ValueError` for options that would fail late, or with a message that is hard to understand."""
    for module in ("sklearn", "matplotlib", "tqdm"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"the package {module} is missing: pip install 'rpcdist[examples]'")
    if options.steps_per_epoch < 1:
        share = NUM_TRAIN // options.trainers
        raise ValueError(
            f"each of the {options.trainers} trainers has {share} images, fewer than a batch of "
            f"{options.batch_size}: choose a smaller --batch-size, or fewer --trainers"
        )
    if options.staleness is not None and (options.mode == "sync" or options.staleness < 0):
        raise ValueError(
            "--staleness is a number of steps, for the modes async and optimizer; in sync no trainer is ahead"
        )
    if options.kill is not None and not 0 <= options.kill < options.trainers:
        raise ValueError(f"--kill {options.kill}: the trainers are 0 to {options.trainers - 1}")
    if options.kill is not None and (options.mode != "async" or options.staleness is not None or options.epochs < 2):
        raise ValueError(
            "--kill is for --mode async without --staleness, where nobody waits for the dead, and 2 epochs"
        )
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch finds no GPU here")
    if options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {options.picture}: the name must end in .png, .pdf or .svg")
    try:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--picture {options.picture}: its folder cannot be made ({error.strerror})") from error


def main() -> None:
    parser = make_parser()
    options, port = parse_options(parser)
    if placement_from_environment() is None:
        # Importing torch takes each process seconds, in which nothing else would be seen.
        servers = f"{options.servers} servers" if options.servers > 1 else "the server"
        print(f"starting {servers} and {options.trainers} trainer{'s' * (options.trainers > 1)} ...", flush=True)
    try:
        launch(run_process, (options,), workers=options.servers + options.trainers, master_port=port)
    except ConfigError as error:
        parser.error(f"--port: {error}")


if __name__ == "__main__":
    main()
