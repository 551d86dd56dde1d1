"""$ python examples/async_rl.py --kill generator
95 % of the lists are sorted right (2 generators, one killed once, 300 steps, 31.0 s), picture: out/async_rl.png

The first line is the command, the second its last line of output (your numbers differ a little). A small transformer
learns to sort digits by trial and error: it writes a list, each place is right or wrong, and what was better than the
other attempts at the same list gets likelier (the loss of PPO, with the mean of the group as GRPO has it).

The trainer takes samples from a buffer, steps, and publishes its weights. The generators write samples, which they
stream, and take newer weights between two digits. The judge says what is right, for many samples at once, and keeps the
buffer, which is bounded, and drops samples whose weights are too old. `Published` of `rpcdist.parallel` carries the
weights: the trainer does not wait for the generators, nor they for it.

--kill generator   The first generator kills itself in the middle of its work, and a new process takes its place: the
                   others go on, and the picture shows who was away when, and how old each sample's weights were.

It starts its processes itself. Under torchrun rank 0 is the trainer, rank 1 the judge, and all others are generators.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from _killed_processes import replace_when_killed
from _shared import ExampleOptions, at_least, count, counted, option, start

NUM_DIGITS, LENGTH = 6, 4  # digits 0 to 5, lists of four
PROMPTS, ATTEMPTS = 16, 8  # lists, and attempts at each, in one batch of samples
BATCHES_PER_STEP = 2


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Teaches a transformer to sort, with a trainer, a judge and generators that do not wait for each other."""

    generators: int = counted(2, "number of generators")
    steps: int = option(300, "steps of the trainer")
    max_age: int = option(4, "samples of weights that are more versions old are dropped")
    kill: Literal["generator"] | None = option(None, "kill a generator once", str, metavar=None, choices=("generator",))
    min_right: float = at_least("the share of lists that are sorted right", "PERCENT")
    picture: Path = option(Path("out/async_rl.png"), "file for the curves", Path)

    roles = "the trainer, the judge and the generators"

    @property
    def first_names(self) -> list[str]:
        return ["trainer", "judge"]

    def __str__(self) -> str:
        killed = ", one killed once" if self.kill else ""
        return f"{count(self.generators, 'generator')}{killed}, {self.steps} steps"


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator

import torch
from _pictures import draw_asynchronous_rewards
from torch import Tensor, nn
from torch.nn.functional import log_softmax

import rpcdist.rpc as rpc
from rpcdist.errors import WorkerLost
from rpcdist.parallel import Published

Batch = dict[str, Tensor]
"""Samples: `tokens`, the logarithms of their probabilities, `versions` of the weights that wrote each, and `right`."""


class Sorter(nn.Module):
    """A causal transformer that reads a list and a mark, and writes the list in order."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_DIGITS + 1, width)  # the last one is the mark
        self.place = nn.Parameter(0.1 * torch.randn(2 * LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_DIGITS)
        self.register_buffer("mask", torch.full((2 * LENGTH, 2 * LENGTH), float("-inf")).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logarithms of the probabilities of what comes after each token."""
        size = tokens.shape[1]
        hidden = self.body(self.embed(tokens) + self.place[:size], mask=self.get_buffer("mask")[:size, :size])
        return log_softmax(self.head(hidden), -1)


# ---------------------------------------------------------------- generators


async def write_samples(seed: int, die_at: int | None) -> AsyncIterator[Batch]:
    """Streams batches of samples, with the newest weights before each digit; at a generator."""
    torch.manual_seed(seed)
    model, weights = Sorter(), Published("sorter")
    version = await weights.pull_into_async(model)  # waits for the first one
    while True:
        lists = torch.randint(NUM_DIGITS, (PROMPTS, LENGTH)).repeat_interleave(ATTEMPTS, 0)
        tokens = torch.cat([lists, torch.full((len(lists), 1), NUM_DIGITS)], 1)
        chosen, versions = [], []
        for _ in range(LENGTH):
            version = await weights.pull_into_async(model, newer_than=version)
            if die_at is not None and version >= die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.no_grad():
                after = model(tokens)[:, -1]
            digit = torch.multinomial(after.exp(), 1)
            tokens = torch.cat([tokens, digit], 1)
            chosen.append(after.gather(1, digit))
            versions.append(version)
        yield {"tokens": tokens, "chosen": torch.cat(chosen, 1), "versions": torch.tensor(versions)}


# ---------------------------------------------------------------- the judge


class Judge:
    """Judges samples, and keeps them until the trainer takes them. Its methods are coroutines: they need no lock."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.to_judge: list[tuple[Tensor, asyncio.Future[Tensor]]] = []
        self.buffer: deque[Batch] = deque()
        self.changed = asyncio.Condition()
        self.absences: list[tuple[str, float, float]] = []  # who, from when until when
        self.num_judged = self.num_verdicts = self.num_dropped = 0
        self.is_over = False

    async def collect(self, generator: str, seed: int) -> None:
        """Takes the stream of a generator until the end; of its replacement, too, when it dies."""
        die_at = self.options.steps // 3 if self.options.kill and generator == "generator0" else None
        while not self.is_over:
            try:
                async for batch in rpc.rpc_stream(generator, write_samples, args=(seed, die_at), timeout=60):
                    batch["right"] = await self.judge(batch["tokens"])
                    await self.put(batch)
                    if self.is_over:
                        return
            except WorkerLost:
                if self.is_over:
                    return
                lost_at = time.time()
                print(f"{generator}: killed", flush=True)
                await rpc.wait_for_worker_async(generator, timeout=60)
                self.absences.append((generator, lost_at, time.time()))
                print(f"{generator}: back after {time.time() - lost_at:.1f} s", flush=True)
                seed, die_at = seed + 1000, None

    async def judge(self, tokens: Tensor) -> Tensor:
        """The places that are right; one pass answers simultaneous requests."""
        answer = asyncio.get_running_loop().create_future()
        self.to_judge.append((tokens, answer))
        if len(self.to_judge) == 1:
            asyncio.get_running_loop().call_soon(self.answer_all)
        right: Tensor = await answer
        return right

    def answer_all(self) -> None:
        asked, self.to_judge = self.to_judge, []
        tokens = torch.cat([each for each, _ in asked])
        right = (tokens[:, LENGTH + 1 :] == tokens[:, :LENGTH].sort(1).values).float()
        for (_, answer), part in zip(asked, right.split([len(each) for each, _ in asked]), strict=True):
            if not answer.done():
                answer.set_result(part)
        self.num_judged += len(asked)
        self.num_verdicts += 1

    async def put(self, batch: Batch) -> None:
        """Waits while the buffer is full; then the stream stands still, and so does its generator."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.buffer) < BATCHES_PER_STEP or self.is_over)
            self.buffer.append(batch)
            self.changed.notify_all()

    async def take(self, version: int) -> list[Batch]:
        """Batches for one step of a trainer that has published this version; those that are too old are dropped."""
        async with self.changed:
            while True:
                young = [each for each in self.buffer if each["versions"].min() >= version - self.options.max_age]
                self.num_dropped += len(self.buffer) - len(young)
                self.buffer = deque(young)
                self.changed.notify_all()
                if len(young) >= BATCHES_PER_STEP:
                    return [self.buffer.popleft() for _ in range(BATCHES_PER_STEP)]
                await self.changed.wait()

    async def end(self) -> tuple[list[tuple[str, float, float]], int, int, int]:
        """Ends the streams; returns the absences, and the numbers of judged lists, verdicts and dropped lists."""
        async with self.changed:
            self.is_over = True
            self.buffer.clear()
            self.changed.notify_all()
        return self.absences, self.num_judged, self.num_verdicts, self.num_dropped


# ---------------------------------------------------------------- the trainer


def train(options: Options) -> float:
    """Run by rank 0: starts everything, learns, and returns the percentage of lists that were sorted right at last."""
    torch.manual_seed(options.seed)
    model = Sorter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, options.steps)
    weights = Published("sorter")
    version = weights.publish(model)
    judge = rpc.remote("judge", Judge, (options,))
    generators = rpc.wait_for_workers("generator", options.generators)
    streams = [judge.rpc_async(timeout=0).collect(each.name, options.seed + each.id) for each in generators]
    started = time.time()
    rewards: list[tuple[float, float]] = []  # when, and the share of lists that are right
    ages: list[tuple[float, int]] = []  # when, and how many versions old the weights of a batch were
    for step in range(options.steps):
        batches = judge.rpc_sync(timeout=60).take(version)
        ages += [(time.time() - started, version - int(each["versions"].min())) for each in batches]
        tokens, chosen, right = (torch.cat([each[key] for each in batches]) for key in ("tokens", "chosen", "right"))
        attempts = right.view(-1, ATTEMPTS, LENGTH)
        better = (attempts - attempts.mean(1, keepdim=True)) / (attempts.std(1, keepdim=True) + 0.1)
        better = better.view(-1, LENGTH)
        now = model(tokens[:, :-1])[:, LENGTH:].gather(2, tokens[:, LENGTH + 1 :, None])[..., 0]
        ratio = (now - chosen).exp()  # the weights have changed since the sample was written
        loss = -torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        slower.step()
        version = weights.publish(model)
        rewards.append((time.time() - started, float(right.all(1).float().mean())))
        if step % 50 == 49:
            recent = sum(each for _, each in rewards[-20:]) / 20
            print(f"step {step + 1}: {100 * recent:.0f} % of the lists are sorted right", flush=True)
    seconds = time.time() - started
    absences, num_judged, num_verdicts, num_dropped = judge.rpc_sync(timeout=60).end()
    rpc.wait_all(streams)
    last = rewards[-20:]
    right_percent = 100 * sum(each for _, each in last) / len(last)
    away = [(name, begin - started, end - started) for name, begin, end in absences]
    draw_asynchronous_rewards(options.picture, f"Sorting: {options}", rewards, ages, away)
    print(f"{num_judged} batches judged in {num_verdicts} passes, {num_dropped} dropped as too old", flush=True)
    print(
        f"{right_percent:.0f} % of the lists are sorted right ({options}, {seconds:.1f} s), picture: {options.picture}",
        flush=True,
    )
    return right_percent


# ---------------------------------------------------------------- processes


def run_process(rank: int, options: Options) -> None:
    """The work of each process of the launcher."""
    if options.kill and options.names[rank] == "generator0":
        replace_when_killed(run_worker, rank, options)
    run_worker(rank, options)


def run_worker(rank: int, options: Options) -> None:
    """Rank 0 trains, the others serve its calls."""
    name = options.names[rank]
    rpc.init_rpc(name, role=name.rstrip("0123456789"))
    right_percent = train(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: they serve calls until rank 0 has finished
    if right_percent is not None and right_percent < options.min_right:
        sys.exit(f"{right_percent:.0f} % of the lists are sorted right, less than --min-right {options.min_right:g}")


def main() -> None:
    start(run_process, Options.parse())


if __name__ == "__main__":
    main()
