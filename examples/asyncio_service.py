"""$ python examples/asyncio_service.py --waiters 5000
test accuracy 96.7 %, 5000 calls waited for it at a service with 7 threads (10.4 s), picture: out/asyncio_service.png

The first line is the command, the second its last line of output (your digits differ a little). A training service in
the style of `async`/`await`, and a client that uses it in every way that the style offers: exceptions with attributes;
deadlines and cancellation, which end a call or a stream on both sides; thousands of calls that wait for one event, each
a coroutine; and a stream of losses, of which the service stays at most 16 ahead while the client reads slowly, as the
picture shows. The model reads the 1,797 handwritten digits which scikit-learn ships.

It starts its processes itself. Under torchrun rank 0 is the client, and rank 1 the service:

    $ torchrun --nproc-per-node 2 examples/asyncio_service.py
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from _shared import NUM_TRAIN, ExampleOptions, cluster, option


@dataclass(frozen=True)
class Options(ExampleOptions):
    """A training service in async/await, and a client that streams, waits, cancels and sets deadlines."""

    waiters: int = option(5000, "calls that wait for the model")
    epochs: int = option(10, "times through the training images")
    picture: Path = option(Path("out/asyncio_service.png"), "file for the plots of loss and backpressure", Path)

    first_names = ("client", "service")
    roles = "the client and the service"
    needs = ("sklearn", "matplotlib")


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

from collections.abc import AsyncIterator

import torch
from _data import load_digits, new_classifier, percent_right
from _pictures import draw_backpressure
from _progress import Happenings, most_ahead
from torch.nn.functional import cross_entropy

import rpcdist.rpc as rpc
from rpcdist.errors import DeadlineExceeded

BATCH_SIZE = 32
SLOW_ITEMS = 20  # at the beginning of the stream, the client reads this many slowly
PAUSE_S = 0.02  # before it reads each of them


class NotTrained(Exception):
    """An exception with a field of its own; the client gets it with type and field."""

    def __init__(self, steps_to_do: int) -> None:
        super().__init__("the model is not trained yet")
        self.steps_to_do = steps_to_do


class TrainingService(Happenings):
    """Trains one model. All methods are coroutines on one thread, the user loop, so they need no locks."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.num_steps = options.epochs * (NUM_TRAIN // BATCH_SIZE)
        self.train_set, self.test_set = load_digits(options.seed)
        self.model = new_classifier(options.seed)
        self.trained = asyncio.Event()

    async def train(self) -> AsyncIterator[tuple[float, float]]:
        """Yields the loss of every step and the time, and pauses there until the client asks for more."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        images, labels = self.train_set
        try:
            for _ in range(self.num_steps):
                batch = torch.randint(len(labels), (BATCH_SIZE,))
                loss = cross_entropy(self.model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.item(), time.time()  # both processes are on one machine here
                await asyncio.sleep(0)  # a step blocks the loop; this lets other coroutines run between steps
            self.trained.set()
        finally:
            self.note("training ended")

    async def wait_trained(self) -> float:
        """Returns the test accuracy when the model is trained. Any number of calls may wait: they use no threads."""
        self.note("wait began")
        try:
            await self.trained.wait()
        finally:
            self.note("wait ended")
        return await self.accuracy()

    async def accuracy(self) -> float:
        if not self.trained.is_set():
            raise NotTrained(self.num_steps)
        images, labels = self.test_set
        return percent_right(self.model(images), labels)


async def use(service: rpc.RRef[TrainingService], options: Options) -> None:
    """Shows all that in turn."""
    started = time.monotonic()
    try:
        await service.rpc_async().accuracy()
    except NotTrained as error:
        print(f"named failure: {type(error).__name__}: {error}, {error.steps_to_do} steps to do", flush=True)
    await show_ends(service)
    waits = [service.rpc_async(timeout=0).wait_trained() for _ in range(options.waiters)]
    threads = await service.rpc_async().happened("wait began", options.waiters + 2)  # and those that have ended
    print(f"waiting: {len(waits)} calls, all at the service, which has {threads} threads", flush=True)
    await show_backpressure(service, options.picture)
    accuracies: list[float] = await asyncio.gather(*waits)
    what = f"{len(waits)} calls waited for it at a service with {threads} threads ({time.monotonic() - started:.1f} s)"
    print(f"test accuracy {accuracies[0]:.1f} %, {what}, picture: {options.picture}", flush=True)


async def show_ends(service: rpc.RRef[TrainingService]) -> None:
    """A deadline, a call that is cancelled (or the task that awaits it), and a stream that is left."""
    try:
        await service.rpc_async(timeout=0.5).wait_trained()
    except DeadlineExceeded:
        await service.rpc_async().happened("wait ended")
        print("deadline: the call ended after 0.5 s, here and at the service", flush=True)
    wait = service.rpc_async(timeout=0).wait_trained()
    await service.rpc_async().happened("wait began", 2)
    wait.cancel()
    await service.rpc_async().happened("wait ended", 2)
    async with await service.rpc_async().train() as steps:
        async for _ in steps:
            break
    await service.rpc_async().happened("training ended")
    print("cancellation: a waiting call and a stream were left, and ended at the service", flush=True)


async def show_backpressure(service: rpc.RRef[TrainingService], path: Path) -> None:
    """Reads the stream of the training, slowly at first, and draws when each item was yielded and read."""
    items: list[tuple[float, float, float]] = []
    async with await service.rpc_async().train() as steps:
        async for loss, produced_at in steps:
            if len(items) < SLOW_ITEMS:
                await asyncio.sleep(PAUSE_S)  # for the picture
            items.append((loss, produced_at, time.time()))
    losses, yielded_at, read_at = zip(*items, strict=True)
    ahead = most_ahead(yielded_at, read_at[:SLOW_ITEMS])
    print(f"streaming: {len(losses)} losses, at most {ahead} ahead of the slow client", flush=True)
    draw_backpressure(path, losses, yielded_at, read_at, SLOW_ITEMS)


def main() -> None:
    options = Options.parse()
    with cluster(options):  # this process is the client, and the other one serves its calls
        service = rpc.remote("service", TrainingService, (options,))
        asyncio.run(use(service, options))


if __name__ == "__main__":
    main()
