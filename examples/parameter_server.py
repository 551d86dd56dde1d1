"""$ python examples/parameter_server.py --trainers 2
test accuracy 97.8 % (async, 2 trainers, 40 epochs, 3.4 s), picture: out/parameter_server.png

The first line is the command, the second its last line of output (your digits differ a little). One process is the
parameter server, the others are trainers that learn to read the 1,797 handwritten digits which scikit-learn ships.
Each trainer computes gradients on its own share of the images and pushes them to the server, which answers with fresh
parameters. `--mode async` applies every push at once, without any lock (Hogwild: Recht et al., 2011); `--mode sync`
waits for the gradients of all trainers, averages them and takes one step (`rpc.functions.async_execution`).

It starts its processes itself. Under torchrun rank 0 is the server, and all other ranks are trainers:

    $ torchrun --nproc-per-node 3 examples/parameter_server.py --mode sync
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Never

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import cross_entropy

import rpcdist.rpc as rpc

if TYPE_CHECKING:
    from tqdm import tqdm

NUM_IMAGES = 1797
NUM_TRAIN = 1437  # the other 360 images measure the accuracy
MOMENTUM = 0.9
Digits = tuple[Tensor, Tensor]  # images (n, 64) float32 from 0 to 1, labels (n,) int64


@dataclass(frozen=True)
class Options:
    """What the command line says; every process gets a copy."""

    mode: str
    trainers: int
    epochs: int
    batch_size: int
    lr: float
    seed: int
    min_accuracy: float
    picture: Path

    @property
    def steps_per_epoch(self) -> int:
        """The same for all trainers: in synchronous mode nobody may wait for a trainer that has finished."""
        return NUM_TRAIN // self.trainers // self.batch_size


# ---- the model and the data


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """The digits in random order, as a training set and a test set."""
    from sklearn.datasets import load_digits as load_sklearn_digits  # only the server needs it, and it loads slowly

    digits = load_sklearn_digits()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


@torch.no_grad()
def measure_accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of images, in percent, whose label the model finds."""
    images, labels = digits
    is_right: Tensor = model(images).argmax(dim=1) == labels
    return 100 * is_right.double().mean().item()


# ---- the parameter server: its methods run on the server, called by the trainers through a remote reference


class Server:
    """Owns the parameters and the progress bars."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.progress = Progress(options)
        self.model = build_model()
        self.parameters = list(self.model.parameters())

    def fetch(self) -> list[Tensor]:
        """The parameters as they are now; the trainer gets copies, because they travel through the network."""
        return [parameter.detach() for parameter in self.parameters]

    def report(self, trainer: int, epoch: int, accuracy: float) -> None:
        self.progress.epoch_done(trainer, epoch, accuracy)


class HogwildServer(Server):
    """Applies every gradient at once, also when it was computed from parameters that have changed since."""

    @torch.no_grad()
    def push(self, trainer: int, gradients: list[Tensor], loss: float) -> list[Tensor]:
        # No lock: calls of several trainers run on several threads, and the rare update that is lost costs less than
        # making everybody wait.
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=self.options.lr)
        self.progress.step_done(trainer, loss)
        return self.fetch()


class BatchServer(Server):
    """Takes one step when the gradients of all trainers are there."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.optimizer = torch.optim.SGD(self.parameters, lr=options.lr, momentum=MOMENTUM)
        self.lock = threading.Lock()
        self.start_round()

    def start_round(self) -> None:
        self.num_pushed = 0
        self.fresh_parameters: Future[list[Tensor]] = Future()
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    @rpc.functions.async_execution
    def push(self, trainer: int, gradients: list[Tensor], loss: float) -> Future[list[Tensor]]:
        """Returns a future: the trainer's call ends when it completes, and until then no thread waits here."""
        with self.lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient / self.options.trainers
            fresh_parameters = self.fresh_parameters
            self.num_pushed += 1
            is_last = self.num_pushed == self.options.trainers
            if is_last:
                self.optimizer.step()
                self.start_round()
        self.progress.step_done(trainer, loss)
        if is_last:
            # Outside the lock, since this sends the answers. They are sent from the parameters themselves, which no
            # step changes before every trainer has its answer and pushes again.
            fresh_parameters.set_result(self.fetch())
        return fresh_parameters


# ---- the trainers


def train(server: rpc.RRef[Server], trainer: int, share: Digits, test_digits: Digits, options: Options) -> None:
    """Run on a trainer, called by the server."""
    torch.manual_seed(options.seed + 1 + trainer)
    images, labels = share
    model = build_model()
    load_parameters(model, server.rpc_sync().fetch())
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(labels))
        for step in range(options.steps_per_epoch):
            batch = order[step * options.batch_size : (step + 1) * options.batch_size]
            gradients, loss = compute_gradients(model, images[batch], labels[batch])
            load_parameters(model, server.rpc_sync().push(trainer, gradients, loss))
        server.rpc_sync().report(trainer, epoch, measure_accuracy(model, test_digits))


def compute_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[list[Tensor], float]:
    loss = cross_entropy(model(images), labels)
    return list(torch.autograd.grad(loss, list(model.parameters()))), loss.item()


@torch.no_grad()
def load_parameters(model: nn.Module, fresh: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), fresh, strict=True):
        parameter.copy_(value)


# ---- what the user sees


@dataclass
class History:
    """What one trainer did, as the server saw it."""

    losses: list[float] = field(default_factory=list)  # one per step
    accuracies: list[tuple[float, float]] = field(default_factory=list)  # (seconds, percent of the test set) per epoch


class Progress:
    """One bar per trainer on a terminal, a line per epoch elsewhere. It lives on the server, so lines never mix.

    Each trainer's calls come one after the other, but those of different trainers on different threads: every method
    touches only its own trainer's bar and history (tqdm locks the terminal).
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.histories = [History() for _ in range(options.trainers)]
        self.bars: list[tqdm[Never]] = []

    def start(self) -> None:
        self.started = time.monotonic()
        self.bars = make_bars(self.options)

    def step_done(self, trainer: int, loss: float) -> None:
        self.histories[trainer].losses.append(loss)
        if self.bars:
            self.bars[trainer].update()

    def epoch_done(self, trainer: int, epoch: int, accuracy: float) -> None:
        history = self.histories[trainer]
        history.accuracies.append((self.elapsed_s(), accuracy))
        loss = sum(history.losses[-self.options.steps_per_epoch :]) / self.options.steps_per_epoch
        status = f"loss {loss:.3f}, test accuracy {accuracy:.1f} %"
        if self.bars:
            self.bars[trainer].set_postfix_str(status, refresh=False)
        else:
            print(f"trainer {trainer}: epoch {epoch}/{self.options.epochs}, {status}", flush=True)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def close(self) -> None:
        for bar in self.bars:
            bar.close()


def make_bars(options: Options) -> list[tqdm[Never]]:
    """No bars where nobody would see them move: in a pipe, a file, or a log."""
    if not sys.stderr.isatty():
        return []
    from tqdm import tqdm

    total = options.epochs * options.steps_per_epoch
    return [
        tqdm(total=total, desc=f"trainer {trainer}", unit="step", position=trainer, dynamic_ncols=True)
        for trainer in range(options.trainers)
    ]


def draw(progress: Progress, options: Options, accuracy: float) -> None:
    """Writes the picture: the loss of every trainer over its steps, and its test accuracy over time."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import layout_engine, pyplot

    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout=layout)
    for trainer, history in enumerate(progress.histories):
        look = {"color": f"C{trainer}", "label": f"trainer {trainer}"}
        left.plot(history.losses, color=look["color"], alpha=0.15, linewidth=0.7, zorder=1)
        left.plot(running_mean(history.losses, options.steps_per_epoch), **look)
        right.plot(*zip(*history.accuracies, strict=True), marker=".", linewidth=1, **look)
    left.set(title="Training loss (faint: of each batch)", xlabel="step of the trainer", yscale="log")
    right.set(title="Test accuracy in % after each epoch", xlabel="seconds", ylim=(None, 100.5))
    right.axhline(accuracy, color="gray", linestyle="--", linewidth=1, label=f"{accuracy:.1f} % at the end", zorder=1)
    for axes, place in ((left, "upper right"), (right, "lower right")):
        axes.legend(loc=place, frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    kind = "asynchronous (Hogwild)" if options.mode == "async" else "batch-synchronous"
    figure.suptitle(f"Parameter server, {kind}, {options.trainers} trainers", fontweight="bold")
    figure.savefig(options.picture, dpi=130)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the last `width` values at each place, or of as many as there are."""
    return [sum(values[max(0, end - width) : end]) / min(width, end) for end in range(1, len(values) + 1)]


# ---- processes


def run_server(options: Options) -> float:
    """Gives every trainer its share, waits until all are done, and returns the test accuracy."""
    train_digits, test_digits = load_digits(options.seed)
    server = (HogwildServer if options.mode == "async" else BatchServer)(options)
    server_rref = rpc.RRef(server)
    shares = zip(*(part.chunk(options.trainers) for part in train_digits), strict=True)
    server.progress.start()
    runs = [
        rpc.rpc_async(f"trainer{i}", train, args=(server_rref, i, share, test_digits, options), timeout=0)  # no limit
        for i, share in enumerate(shares)
    ]
    rpc.wait_all(runs)
    seconds = server.progress.elapsed_s()
    server.progress.close()
    accuracy = measure_accuracy(server.model, test_digits)
    draw(server.progress, options, accuracy)
    print(
        f"test accuracy {accuracy:.1f} % ({options.mode}, {options.trainers} trainers, {options.epochs} epochs, "
        f"{seconds:.1f} s), picture: {options.picture}",
        flush=True,
    )
    return accuracy


def run_process(rank: int, options: Options) -> None:
    """The life of one process: rank 0 serves, the others train when they are told to."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process: end at once, without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent blocked it during the imports
    torch.set_num_threads(1)  # the processes share the cores already
    name = "server" if rank == 0 else f"trainer{rank - 1}"
    rpc.init_rpc(name, rank=rank, world_size=options.trainers + 1)
    accuracy = run_server(options) if rank == 0 else None
    rpc.shutdown()  # waits for everybody: a trainer serves calls until the server has finished
    if accuracy is not None and accuracy < options.min_accuracy:
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
    """Starts the server and the trainers, and stays their parent: whatever ends one of them ends all."""
    resource_tracker.ensure_running()  # this helper process unblocks SIGINT when it starts, so let it start now
    try:
        with interrupts_deferred():
            processes = mp.spawn(run_process, args=(options,), nprocs=options.trainers + 1, join=False)
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
        description="Trains a digit classifier with one parameter server and several trainers.",
        epilog="Under torchrun, rank 0 is the server, all other ranks are trainers, and --trainers may be left out.",
    )
    parser.add_argument("--mode", choices=("async", "sync"), default="async", help="apply each gradient at once, or "
                        "one step per round of all trainers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--trainers", type=positive(int), metavar="N", help="number of trainers (default: 2)")
    parser.add_argument("--epochs", type=positive(int), default=40, metavar="N", help="times that each trainer goes "
                        "through its share of the images (default: %(default)s)")  # fmt: skip
    parser.add_argument("--batch-size", type=positive(int), default=32, metavar="N", help="images per step and trainer "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--lr", type=positive(float), default=0.2, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data split, the model and the batches (default: "
                        "%(default)s)")  # fmt: skip
    parser.add_argument("--min-accuracy", type=float, default=0.0, metavar="PERCENT", help="exit with status 1 when "
                        "the test accuracy is below (default: %(default)s)")  # fmt: skip
    parser.add_argument("--picture", type=Path, default=Path("out/parameter_server.png"), metavar="FILE",
                        help="where the loss and accuracy curves go (default: %(default)s)")  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="port of the rendezvous on this machine (default: any free "
                        "one)")  # fmt: skip
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")
    try:
        arguments["trainers"] = choose_num_trainers(arguments["trainers"])
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


def choose_num_trainers(wanted: int | None) -> int:
    """As many as --trainers says, or all ranks but one of torchrun's."""
    if not is_under_torchrun():
        return wanted or 2
    num_trainers = int(os.environ["WORLD_SIZE"]) - 1
    if num_trainers < 1:
        raise ValueError("torchrun must start at least 2 processes, a server and a trainer: --nproc-per-node 2")
    if wanted not in (None, num_trainers):
        raise ValueError(f"--trainers {wanted} does not fit torchrun's {num_trainers + 1} processes: leave it out")
    return num_trainers


def check(options: Options) -> None:
    """Finds what would fail at the end of the run, or with a puzzling text."""
    for module in ("sklearn", "matplotlib", "tqdm"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"the package {module} is missing: pip install 'rpcdist[examples]'")
    if options.steps_per_epoch < 1:
        share = NUM_TRAIN // options.trainers
        raise ValueError(
            f"each of the {options.trainers} trainers has {share} images, fewer than a batch of "
            f"{options.batch_size}: choose a smaller --batch-size, or fewer --trainers"
        )
    if options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {options.picture}: the name must end in .png, .pdf or .svg")
    try:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--picture {options.picture}: its folder cannot be made ({error.strerror})") from error


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
        print(f"starting the server and {options.trainers} trainer{'s' * (options.trainers > 1)} ...", flush=True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # the children inherit it
        spawn_processes(options)


if __name__ == "__main__":
    main()
