"""$ python examples/pipeline_parallel.py --workers 2
validation loss 2.14 (guessing by frequency: 3.07; 1f1b, 2 workers, 160 steps, 24.1 s), picture: out/pipeline.png

The first line is the command, the second its last line of output (your digits differ a little). A small transformer
learns to write Python, one character at a time, from the source of Python's own standard library. It is cut into stages
on several workers: each batch goes through them in micro-batches, so that all can compute at once. The loss is in
nats per character, on files that it has not seen. The picture shows the computations of each worker in the last step,
and beneath them the ideal timeline of the schedule, in which sending takes no time; try `--schedule gpipe` or
`--schedule interleaved`.

It starts its processes itself. Under torchrun every rank is a worker, and rank 0 is also the driver:

    $ torchrun --nproc-per-node 2 examples/pipeline_parallel.py --schedule gpipe
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _data import guessing_loss, library_text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import rpcdist.rpc as rpc
from rpcdist import launch, placement_from_environment
from rpcdist.parallel.pipeline import SCHEDULES, Pipeline

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # other characters are read as "?"
NUM_HEADS = 4
NUM_EVALUATIONS = 8  # batches for the validation loss
PROMPT = "    def __init__(self, "


@dataclass(frozen=True)
class Options:
    """The options of the command line; every process gets a copy."""

    workers: int
    schedule: str
    microbatches: int
    steps: int
    batch_size: int
    length: int
    width: int
    layers: int
    lr: float
    seed: int
    max_loss: float
    device: str
    picture: Path

    @property
    def num_stages(self) -> int:
        """Number of stages: two per worker in the interleaved schedule, which needs several."""
        return self.workers * (2 if self.schedule == "interleaved" else 1)


# ---- the model: a list of parts, cut into stages


class Embedding(nn.Module):
    """Characters (batch, length) int64 -> vectors (batch, length, width) float32."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), options.width)
        self.positions = nn.Embedding(options.length, options.width)

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.characters(x) + self.positions(torch.arange(x.size(1), device=x.device))
        return vectors


class Block(nn.Module):
    """A layer of the transformer: causal self-attention, then a feed-forward network at each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (NUM_HEADS, -1)).transpose(1, 2)
            for part in self.query_key_value(self.norm(x)).chunk(3, dim=2)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        output: Tensor = x + self.feed_forward(x)
        return output


def make_stage(options: Options, stage: int) -> nn.Module:
    """The layers of one stage, made on its worker; the first stage has the embedding too, the last one the output."""
    torch.manual_seed(options.seed + stage)
    begin, end = (options.layers * limit // options.num_stages for limit in (stage, stage + 1))
    parts: list[nn.Module] = [Block(options.width) for _ in range(begin, end)]
    if stage == 0:
        parts.insert(0, Embedding(options))
    if stage == options.num_stages - 1:
        parts += [nn.LayerNorm(options.width), nn.Linear(options.width, len(ALPHABET))]
    return nn.Sequential(*parts)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """In nats per character: scores (batch, length, characters), targets (batch, length)."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


# ---- the text


def read_library() -> tuple[Tensor, Tensor]:
    """The text of the standard library as numbers: a training set, and its last files as a validation set."""
    numbers = encode(library_text())
    split = len(numbers) * 19 // 20
    return numbers[:split], numbers[split:]


def encode(text: str) -> Tensor:
    number_of = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([number_of.get(character, number_of["?"]) for character in text])


def pick_batch(text: Tensor, options: Options, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random excerpts, and the same excerpts shifted by one character as targets, both (batch, length)."""
    starts = torch.randint(len(text) - options.length - 1, (options.batch_size, 1), generator=generator)
    excerpts = text[starts + torch.arange(options.length + 1)]
    return excerpts[:, :-1], excerpts[:, 1:]


# ---- training, on the driver


def train(pipe: Pipeline, text: Tensor, options: Options) -> None:
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = pipe.make_optimizer(torch.optim.AdamW, lr=options.lr)
    for step in range(1, options.steps + 1):
        optimizer.change(lr=options.lr * learning_rate(step / options.steps))
        optimizer.zero_grad()
        loss = pipe.step(*pick_batch(text, options, generator)).loss
        pipe.clip_grad_norm(1.0)
        optimizer.step()
        if step % math.ceil(options.steps / 10) == 0:
            print(f"step {step}/{options.steps}: loss {loss:.3f}", flush=True)


def learning_rate(done: float) -> float:
    """The factor of the highest rate: it rises for the first twentieth of the steps, then falls along a cosine."""
    return min(1.0, done * 20 + 0.05) * (0.55 + 0.45 * math.cos(math.pi * done))


def evaluate(pipe: Pipeline, text: Tensor, options: Options) -> float:
    generator = torch.Generator().manual_seed(0)
    batches = [pick_batch(text, options, generator) for _ in range(NUM_EVALUATIONS)]
    return sum(pipe.evaluate(*batch).loss for batch in batches) / NUM_EVALUATIONS


def write_sample(pipe: Pipeline, options: Options, num_characters: int = 160) -> str:
    """The prompt, continued by the model."""
    generator = torch.Generator().manual_seed(options.seed)
    text = PROMPT
    for _ in range(num_characters):
        scores = pipe(encode(text[-options.length :])[None])[0, -1]
        probabilities = (scores / 0.7).softmax(dim=0)  # a temperature below 1 prefers likely characters
        text += ALPHABET[int(torch.multinomial(probabilities, 1, generator=generator))]
    return text


# ---- processes


def worker_name(rank: int) -> str:
    return f"worker{rank}"


def drive(options: Options) -> float:
    """Builds the pipeline, trains it, and returns the validation loss."""
    train_text, test_text = read_library()
    pipe = Pipeline(
        [partial(make_stage, options, stage) for stage in range(options.num_stages)],
        [worker_name(rank) for rank in range(options.workers)],
        schedule=options.schedule,
        num_microbatches=options.microbatches,
        loss_fn=loss_of,
        devices=[choose_device(options.device, rank) for rank in range(options.workers)],
    )
    print(f"The schedule, if forward (F) and backward (B) took equally long:\n{pipe.grid()}", flush=True)
    started = time.monotonic()
    train(pipe, train_text, options)
    seconds = time.monotonic() - started
    pipe.draw_timeline(options.picture, f"One step of {options.schedule} with {options.microbatches} micro-batches")
    timeline = pipe.timeline
    assert timeline is not None
    pipe.eval()
    loss = evaluate(pipe, test_text, options)
    print(f"A sample of its output:\n{write_sample(pipe, options)}\n")
    print(
        f"bubble of the last step: {100 * timeline.bubble:.0f} % of the workers' time was idle, "
        f"{100 * timeline.theoretical_bubble:.0f} % if sending took no time"
    )
    guessing = guessing_loss(test_text, len(ALPHABET))
    print(
        f"validation loss {loss:.2f} (guessing by frequency: {guessing:.2f}; {options.schedule}, "
        f"{options.workers} workers, {options.steps} steps, {seconds:.1f} s), picture: {options.picture}",
        flush=True,
    )
    return loss


def choose_device(device: str, rank: int) -> str:
    """With several GPUs in a machine, each worker takes one."""
    return f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else device


def run_process(rank: int, options: Options) -> None:
    """What each process does: all are workers, and rank 0 is also the driver."""
    torch.set_num_threads(1)  # the processes share the cores already
    rpc.init_rpc(worker_name(rank))
    loss = drive(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: a worker serves calls until the driver has finished
    if loss is not None and loss > options.max_loss:
        sys.exit(f"validation loss {loss:.2f} is above --max-loss {options.max_loss:g}")


# ---- the command line


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="Trains a small transformer on Python's standard library, cut into stages on several workers.",
        epilog="Under torchrun every rank is a worker, and --workers may be left out.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("--workers", type=positive(int), help="length of the pipeline (default: 2)")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="order of the computations "
                        "(default: %(default)s)")  # fmt: skip
    add("--microbatches", type=positive(int), default=4, help="parts of a batch (default: %(default)s)")
    add("--steps", type=positive(int), default=160, help="batches to learn from (default: %(default)s)")
    add("--batch-size", type=positive(int), default=32, help="texts per batch (default: %(default)s)")
    add("--length", type=positive(int), default=64, help="characters per text (default: %(default)s)")
    add("--width", type=positive(int), default=128, help="width of a layer, a multiple of 4 (default: %(default)s)")
    add("--layers", type=positive(int), default=4, help="number of layers (default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.004, help="highest learning rate (default: "
                        "%(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--max-loss", type=float, default=math.inf, metavar="NATS", help="exit with status 1 when the "
                        "validation loss is above (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="device of the stages; cuda gives each worker a GPU if there "
                        "are enough (default: %(default)s)")  # fmt: skip
    parser.add_argument("--picture", type=Path, default=Path("out/pipeline.png"), metavar="FILE",
                        help="file for the timeline of the last step (default: %(default)s)")  # fmt: skip
    arguments = vars(parser.parse_args())
    try:
        arguments["workers"] = choose_num_workers(arguments["workers"])
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


def choose_num_workers(wanted: int | None) -> int:
    """The value of --workers, or all ranks of torchrun's."""
    place = placement_from_environment()
    if place is None:
        return wanted or 2
    if wanted not in (None, place.world_size):
        raise ValueError(f"--workers {wanted} does not fit torchrun's {place.world_size} processes: leave it out")
    return place.world_size


def check(options: Options) -> None:
    """Raises `ValueError` for options that would fail late, or with a message that is hard to understand."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the package matplotlib is missing: pip install 'rpcdist[examples]'")
    if options.width % NUM_HEADS:
        raise ValueError(f"--width {options.width}: must be a multiple of {NUM_HEADS}")
    if options.layers < options.num_stages:
        raise ValueError(f"--layers {options.layers}: at least one for each of the {options.num_stages} stages")
    if options.schedule == "interleaved" and options.microbatches % options.workers:
        raise ValueError(f"--microbatches {options.microbatches}: must be a multiple of --workers for 'interleaved'")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch finds no GPU here")
    if options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {options.picture}: the name must end in .png, .pdf or .svg")
    options.picture.parent.mkdir(parents=True, exist_ok=True)


def main() -> None:
    options = parse_options()
    if placement_from_environment() is None:
        # Importing torch takes each process seconds, in which nothing else would be seen.
        print(f"starting {options.workers} worker{'s' * (options.workers > 1)} ...", flush=True)
    launch(run_process, (options,), workers=options.workers)


if __name__ == "__main__":
    main()
