"""$ python examples/pipeline_parallel.py --workers 2
validation loss 2.31 (guessing by frequency: 3.07; 1f1b, 2 workers, 160 steps, 18.0 s), picture: out/pipeline.png

The first line is the command, the second its last line of output (your digits differ a little). A small transformer
learns to guess the next character of Python, from the source of its own standard library. It is cut into stages
on several workers: each batch goes through them in micro-batches, so that all can compute at once. The loss is in
nats per character, on files that it has not seen. The picture shows the computations of each worker in the last step,
and beneath them the ideal timeline of the schedule, in which sending takes no time; try `--schedule interleaved`.

It starts its processes itself. Under torchrun every rank is a worker, and rank 0 is also the driver:

    $ torchrun --nproc-per-node 2 examples/pipeline_parallel.py --schedule gpipe
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from _shared import ExampleOptions, cluster, counted, option, require_loss


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Trains a small transformer on Python's standard library, cut into stages on several workers."""

    workers: int = counted(2, "length of the pipeline")
    schedule: str = option("1f1b", "order of the computations", choices=("gpipe", "1f1b", "interleaved"))
    microbatches: int = option(4, "parts of a batch")
    steps: int = option(160, "batches to learn from")
    max_loss: float = option(math.inf, "exit with status 1 when the validation loss is above", float, metavar="NATS")
    picture: Path = option(Path("out/pipeline.png"), "file for the timeline of the last step", Path)

    roles = "the workers"

    @property
    def num_stages(self) -> int:
        """Two per worker in the interleaved schedule, which needs several."""
        return self.workers * (2 if self.schedule == "interleaved" else 1)

    @property
    def num_layers(self) -> int:
        return max(4, self.num_stages)

    def check(self) -> None:
        if self.schedule == "interleaved" and self.microbatches % self.workers:
            raise ValueError(f"--microbatches {self.microbatches}: must be a multiple of --workers for 'interleaved'")


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

from functools import partial

import torch
from _data import ALPHABET, guessing_loss, library_text, numbers_of_characters, split_text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rpcdist.parallel import Pipeline

WIDTH = 64  # of a layer
NUM_HEADS = 4  # of its attention
BATCH_SIZE = 32
LENGTH = 64  # characters per text
LEARNING_RATE = 0.004  # the highest


class Embedding(nn.Module):
    """Characters (batch, length) int64 -> vectors (batch, length, width) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.characters(x) + self.positions(torch.arange(x.size(1)))
        return vectors


class Block(nn.Module):
    """A layer of the transformer, (batch, length, width) -> the same; a character sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, nn.Transformer.generate_square_subsequent_mask(x.size(1)), is_causal=True)
        return output


def make_stage(options: Options, stage: int) -> nn.Module:
    """The layers of one stage, made on its worker; the first stage has the embedding too, the last one the output."""
    torch.manual_seed(options.seed + stage)
    begin, end = (options.num_layers * limit // options.num_stages for limit in (stage, stage + 1))
    parts: list[nn.Module] = [Block() for _ in range(begin, end)]
    if stage == 0:
        parts.insert(0, Embedding())
    if stage == options.num_stages - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))]
    return nn.Sequential(*parts)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """In nats per character: scores (batch, length, characters), targets (batch, length)."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def pick_batch(text: Tensor) -> tuple[Tensor, Tensor]:
    """Random excerpts, and the same excerpts shifted by one character as targets, both (batch, length)."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH_SIZE, 1))
    excerpts = text[starts + torch.arange(LENGTH + 1)]
    return excerpts[:, :-1], excerpts[:, 1:]


def train(pipe: Pipeline, text: Tensor, options: Options) -> None:
    torch.manual_seed(options.seed)
    optimizer = pipe.make_optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    for step in range(1, options.steps + 1):
        optimizer.change(lr=LEARNING_RATE * min(1.0, 20 * step / options.steps))  # it rises at first
        optimizer.zero_grad()
        loss = pipe.step(*pick_batch(text)).loss
        pipe.clip_grad_norm(1.0)
        optimizer.step()
        if step % math.ceil(options.steps / 10) == 0:
            print(f"step {step}/{options.steps}: loss {loss:.3f}", flush=True)


def drive(options: Options) -> float:
    """Builds the pipeline, trains it, and returns the validation loss."""
    train_text, test_text = split_text(numbers_of_characters(library_text()))
    stages = [partial(make_stage, options, stage) for stage in range(options.num_stages)]
    schedule, microbatches = options.schedule, options.microbatches
    pipe = Pipeline(stages, options.names, schedule=schedule, num_microbatches=microbatches, loss_fn=loss_of)
    print(f"The schedule, if forward (F) and backward (B) took equally long:\n{pipe.grid()}", flush=True)
    started = time.monotonic()
    train(pipe, train_text, options)
    seconds = time.monotonic() - started
    pipe.draw_timeline(options.picture, f"One step of {schedule} with {microbatches} micro-batches")
    assert pipe.timeline is not None
    idle, ideal = 100 * pipe.timeline.bubble, 100 * pipe.timeline.theoretical_bubble
    pipe.eval()
    losses = [pipe.evaluate(*pick_batch(test_text)).loss for _ in range(8)]
    loss, guessing = sum(losses) / len(losses), guessing_loss(test_text, len(ALPHABET))
    print(f"bubble: {idle:.0f} % of the workers' time was idle in the last step, {ideal:.0f} % if sending took no time")
    what = f"guessing by frequency: {guessing:.2f}; {schedule}, {options.workers} workers, {options.steps} steps"
    print(f"validation loss {loss:.2f} ({what}, {seconds:.1f} s), picture: {options.picture}", flush=True)
    return loss


def main() -> None:
    options = Options.parse()
    with cluster(options):  # this process is worker0 and the driver, and the other ones serve its calls
        loss = drive(options)
    require_loss(loss, options.max_loss)


if __name__ == "__main__":
    main()
