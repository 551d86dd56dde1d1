"""$ python examples/asyncio_service.py --waiters 5000
test accuracy 96.7 %, 5000 calls waited for it at a service with 7 threads (10.4 s), picture: out/asyncio_service.png

The first line is the command, the second its last line of output (your digits differ a little). A training service in
the style of `async`/`await`, and a client that uses it in every way that the style offers:

1. **Waiting**: thousands of calls wait at the service for one event, the trained model. Each is a coroutine there.
2. **Streaming**: the service trains in an async generator and yields the loss. The client reads slowly at first, and
   the service stays at most 16 items ahead (backpressure); the picture shows it.
3. **Cancellation**: leaving a stream, or cancelling a task, ends the coroutine at the service too.
4. **Deadlines**: a call that takes too long ends on both sides; the service sees how much time is left.
5. **Named failures**: an exception of the service arrives as itself, with its attributes and the service's name.

The model reads the 1,797 handwritten digits which scikit-learn ships. It starts its processes itself. Under torchrun
rank 0 is the client, and rank 1 the service:

    $ torchrun --nproc-per-node 2 examples/asyncio_service.py
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.rpc as rpc
from rpcdist import launch, placement_from_environment
from rpcdist.deadline import current_deadline
from rpcdist.errors import DeadlineExceeded

NUM_IMAGES = 1797
NUM_TRAIN = 1437  # the other 360 images measure the accuracy
BATCH_SIZE = 32
SLOW_ITEMS = 20  # at the beginning of the stream, the client reads this many slowly
PAUSE_S = 0.02  # before it reads each of them


@dataclass(frozen=True)
class Options:
    """The options of the command line; every process gets a copy."""

    waiters: int
    epochs: int
    lr: float
    seed: int
    min_accuracy: float
    device: str
    picture: Path

    @property
    def num_steps(self) -> int:
        return self.epochs * (NUM_TRAIN // BATCH_SIZE)


# ---- the service: all of its methods are coroutines on one thread, the user loop, so they need no locks


class NotTrained(Exception):
    """An exception with a field of its own; the client gets it with type and field."""

    def __init__(self, steps_done: int) -> None:
        super().__init__(steps_done)
        self.steps_done = steps_done

    def __str__(self) -> str:
        return f"the model is not trained yet: {self.steps_done} steps done"


@dataclass(frozen=True)
class Step:
    """An item of the stream."""

    number: int
    loss: float
    produced_at: float  # time.time(): both processes are on one machine here


class TrainingService:
    """Trains one model, and lets others watch and wait."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.train_set, self.test_set = load_digits(options)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(options.device)
        self.steps_done = 0
        self.trained = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.watches: list[tuple[str, int, asyncio.Event]] = []

    async def train(self) -> AsyncIterator[Step]:
        """Yields after every step, and pauses there until the client asks for more."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.options.lr, momentum=0.9)
        images, labels = self.train_set
        try:
            for number in range(1, self.options.num_steps + 1):
                batch = torch.randint(len(labels), (BATCH_SIZE,))
                loss = cross_entropy(self.model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.steps_done = number
                yield Step(number, loss.item(), time.time())
                await asyncio.sleep(0)  # a step blocks the loop; this lets other coroutines run between steps
            self.trained.set()
        finally:
            self.count("training ended" if self.trained.is_set() else "training left")

    async def wait_trained(self) -> float:
        """Returns the test accuracy when the model is trained. Any number of calls may wait: they use no threads."""
        self.count("wait began")
        try:
            await self.trained.wait()
        except asyncio.CancelledError:
            self.count("wait cancelled")
            raise
        return self.accuracy()

    async def read(self, images: Tensor) -> list[int]:
        """The digits in images (n, 64)."""
        if not self.trained.is_set():
            raise NotTrained(self.steps_done)
        digits: list[int] = self.model(images.to(self.options.device)).argmax(dim=1).tolist()
        return digits

    async def wait_for_ever(self) -> None:
        deadline = current_deadline.get()
        assert deadline is not None
        print(f"the service got a call with {deadline.remaining_s():.1f} s left", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            self.count("waiting for ever ended")

    def count(self, event: str) -> None:
        self.counts[event] += 1
        for watched, count, reached in self.watches:
            if watched == event and self.counts[event] >= count:
                reached.set()

    async def happened(self, event: str, count: int = 1) -> int:
        """Waits until `event` has happened `count` times; returns how many threads the service has."""
        reached = asyncio.Event()
        self.watches.append((event, count, reached))
        if self.counts[event] < count:
            await reached.wait()
        return threading.active_count()

    @torch.no_grad()
    def accuracy(self) -> float:
        """The percentage of test images that the model labels correctly."""
        images, labels = self.test_set
        is_right: Tensor = self.model(images).argmax(dim=1) == labels
        return 100 * is_right.double().mean().item()


def load_digits(options: Options) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (n, 64) from 0 to 1 and labels (n) in random order, as a training set and a test set."""
    from sklearn.datasets import load_digits as load_sklearn_digits

    digits = load_sklearn_digits()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(options.seed))
    images = torch.as_tensor(digits.data, dtype=torch.float32)[order].to(options.device) / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order].to(options.device)
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


# ---- the client


@dataclass
class History:
    """The losses that the client received, and when each item was produced and consumed."""

    losses: list[float] = field(default_factory=list)
    produced_at: list[float] = field(default_factory=list)
    consumed_at: list[float] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.losses.append(step.loss)
        self.produced_at.append(step.produced_at)
        self.consumed_at.append(time.time())

    def most_ahead(self) -> int:
        """The largest number of items that the service was ahead of the client while the client was slow."""
        slow = self.consumed_at[:SLOW_ITEMS]
        return max(
            sum(produced <= now for produced in self.produced_at) - read for read, now in enumerate(slow, start=1)
        )


async def use(service: rpc.RRef[TrainingService], options: Options) -> float:
    """Shows the five features in turn, and returns the test accuracy."""
    started = time.monotonic()
    await show_named_failure(service)
    await show_deadline(service)
    await show_cancellation(service)
    waits = [asyncio.ensure_future(wait_trained(service)) for _ in range(options.waiters)]
    threads = await service.rpc_async().happened("wait began", options.waiters + 1)  # and the one that was cancelled
    print(f"waiting: {len(waits)} calls, all at the service, which has {threads} threads", flush=True)
    history = await watch(service, options)
    print(
        f"streaming: {len(history.losses)} losses, at most {history.most_ahead()} ahead of the slow client", flush=True
    )
    accuracies = await asyncio.gather(*waits)
    draw(history, options)
    print(
        f"test accuracy {accuracies[0]:.1f} %, {len(accuracies)} calls waited for it at a service with {threads} "
        f"threads ({time.monotonic() - started:.1f} s), picture: {options.picture}",
        flush=True,
    )
    return accuracies[0]


async def show_named_failure(service: rpc.RRef[TrainingService]) -> None:
    try:
        await service.rpc_async().read(torch.zeros(1, 64))
    except NotTrained as error:
        where = str(error.__cause__).strip().splitlines()[0]  # the rest is the traceback at the service
        print(f"named failure, {where[0].lower()}{where[1:]} {type(error).__name__}: {error}", flush=True)


async def show_deadline(service: rpc.RRef[TrainingService]) -> None:
    try:
        await service.rpc_async(timeout=0.5).wait_for_ever()
    except DeadlineExceeded:
        await service.rpc_async().happened("waiting for ever ended")
        print("deadline: the call ended after 0.5 s, here and at the service", flush=True)


async def show_cancellation(service: rpc.RRef[TrainingService]) -> None:
    """Once by cancelling a task, once by leaving a stream."""
    wait = asyncio.ensure_future(wait_trained(service))
    await service.rpc_async().happened("wait began")
    wait.cancel()
    await service.rpc_async().happened("wait cancelled")
    async with aclosing(await service.rpc_async().train()) as steps:
        async for step in steps:
            if step.number == 3:
                break
    await service.rpc_async().happened("training left")
    print("cancellation: a waiting call and a stream were left, and ended at the service", flush=True)


async def wait_trained(service: rpc.RRef[TrainingService]) -> float:
    accuracy: float = await service.rpc_async(timeout=0).wait_trained()
    return accuracy


async def watch(service: rpc.RRef[TrainingService], options: Options) -> History:
    """Reads the stream of the training, slowly at first."""
    history = History()
    async with aclosing(await service.rpc_async().train()) as steps:
        async for step in steps:
            if len(history.losses) < SLOW_ITEMS:
                await asyncio.sleep(PAUSE_S)  # for the picture
            history.add(step)
            if step.number % (options.num_steps // 10) == 0:
                print(f"step {step.number}/{options.num_steps}: loss {step.loss:.3f}", flush=True)
    return history


# ---- the picture


def draw(history: History, options: Options) -> None:
    """Writes the picture: the loss, and the progress of service and client while the client was slow."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import layout_engine, pyplot

    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout=layout)
    left.plot(history.losses, linewidth=0.8)
    left.set(title="Loss of each step, as it was streamed", xlabel="step", yscale="log")
    shown = slice(0, SLOW_ITEMS * 3)
    start = history.produced_at[0]
    for times, name in ((history.produced_at, "the service yields"), (history.consumed_at, "the client reads")):
        right.step(
            [moment - start for moment in times[shown]], range(1, len(times[shown]) + 1), where="post", label=name
        )
    right.set(title=f"Backpressure: the first {SLOW_ITEMS} are read slowly", xlabel="seconds", ylabel="items")
    right.legend(loc="upper left", frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A training service in async/await", fontweight="bold")
    figure.savefig(options.picture, dpi=130)


# ---- processes


def run_client(options: Options) -> float:
    service = rpc.remote("service", TrainingService, args=(options,))
    return asyncio.run(use(service, options))


def run_process(rank: int, options: Options) -> None:
    """What each process does: rank 0 is the client, rank 1 the service."""
    torch.set_num_threads(1)  # the processes share the cores already
    rpc.init_rpc(("client", "service")[rank])
    accuracy = run_client(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: the service serves until the client has finished
    if accuracy is not None and accuracy < options.min_accuracy:
        sys.exit(f"test accuracy {accuracy:.1f} % is below --min-accuracy {options.min_accuracy:g}")


# ---- the command line


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="A training service in async/await, and a client that streams, waits, cancels and sets deadlines.",
        epilog="Under torchrun, rank 0 is the client and rank 1 the service.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("--waiters", type=positive(int), default=5000, help="calls that wait for the model (default: %(default)s)")
    add("--epochs", type=positive(int), default=10, help="times through the training images (default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.1, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--min-accuracy", type=float, default=0.0, metavar="PERCENT", help="exit with status 1 when "
                        "the test accuracy is below (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="where the service trains (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("out/asyncio_service.png"), metavar="FILE",
                        help="file for the plots of loss and backpressure (default: %(default)s)")  # fmt: skip
    arguments = vars(parser.parse_args())
    try:
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


def check(options: Options) -> None:
    """Raises `ValueError` for options that would fail late, or with a message that is hard to understand."""
    place = placement_from_environment()
    if place is not None and place.world_size != 2:
        raise ValueError("torchrun must start 2 processes, the client and the service: --nproc-per-node 2")
    for module in ("sklearn", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"the package {module} is missing: pip install 'rpcdist[examples]'")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch finds no GPU here")
    if options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {options.picture}: the name must end in .png, .pdf or .svg")
    options.picture.parent.mkdir(parents=True, exist_ok=True)


def main() -> None:
    options = parse_options()
    if placement_from_environment() is None:
        # Importing torch takes each process seconds, in which nothing else would be seen.
        print("starting the client and the service ...", flush=True)
    launch(run_process, (options,), workers=2)


if __name__ == "__main__":
    main()
