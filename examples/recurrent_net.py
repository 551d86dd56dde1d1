"""$ python examples/recurrent_net.py --steps 300
validation loss 3.93 (guessing by frequency: 4.74; 300 steps, 15.5 s), picture: out/recurrent_net.png

The first line is the command, the second its last line of output (your digits differ a little). A recurrent network
learns to write Python, one word at a time, from the source of Python's own standard library. Its large tables, the
embedding and the decoder, live on a server; the LSTM between them is on the trainer, which holds references to the
tables. One distributed backward pass goes through both workers, and one distributed optimizer steps the parameters
where they are. The loss is in nats per word, on text that it has not seen.

It starts its processes itself. Under torchrun rank 0 is the trainer, and rank 1 the server:

    $ torchrun --nproc-per-node 2 examples/recurrent_net.py
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from _data import guessing_loss, library_text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.autograd as dist_autograd
import rpcdist.rpc as rpc
from rpcdist import launch, placement_from_environment
from rpcdist.optim import DistributedOptimizer

UNKNOWN = "<unknown>"  # stands for all rare words
WORD = re.compile(r"\n *|\w+|[^\w\s]")  # a word, a sign, or a new line with its indentation
State = tuple[Tensor, Tensor]  # hidden state and cell state of the LSTM, each (1, batch, width)


@dataclass(frozen=True)
class Options:
    """The options of the command line; every process gets a copy."""

    steps: int
    batch_size: int
    length: int
    words: int
    width: int
    lr: float
    seed: int
    max_loss: float
    device: str
    picture: Path


# ---- the model: two parts on the server, called through references, and one on the trainer


class ServerPart(nn.Module):
    """Base of the parts on the server."""

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """References for the optimizer, which steps each parameter at its owner."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Embedding(ServerPart):
    """Numbers of words (batch, length) int64 -> vectors (batch, length, width) float32."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(options.seed)
        self.device = options.device
        self.table = nn.Embedding(options.words, options.width).to(options.device)

    def forward(self, words: Tensor) -> Tensor:
        vectors: Tensor = self.table(words.to(self.device)).cpu()
        return vectors


class Decoder(ServerPart):
    """Outputs of the LSTM (batch, length, width) -> a score for each word of the vocabulary."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(options.seed + 1)
        self.device = options.device
        self.linear = nn.Linear(options.width, options.words).to(options.device)

    def forward(self, outputs: Tensor) -> Tensor:
        scores: Tensor = self.linear(outputs.to(self.device))
        return scores

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """In nats per word. Computed on the server: the scores are large, and the loss is one number."""
        loss = cross_entropy(self(outputs).flatten(0, 1), targets.to(self.device).flatten())
        return loss.cpu()

    def best(self, outputs: Tensor) -> Tensor:
        """The most likely word at each position, other than the unknown one."""
        scores: Tensor = self(outputs)[..., 1:]
        return scores.argmax(dim=-1).cpu() + 1


class RecurrentNet:
    """The whole model, as the trainer sees it."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed + 2)
        self.device = options.device
        self.embedding = rpc.remote("server", Embedding, args=(options,))
        self.lstm = nn.LSTM(options.width, options.width, batch_first=True).to(options.device)
        self.decoder = rpc.remote("server", Decoder, args=(options,))

    def outputs(self, words: Tensor, state: State | None) -> tuple[Tensor, State]:
        vectors = self.embedding.rpc_sync().forward(words)
        outputs, state = self.lstm(vectors.to(self.device), state)
        return outputs.cpu(), state

    def loss(self, words: Tensor, targets: Tensor, state: State | None) -> tuple[Tensor, State]:
        outputs, state = self.outputs(words, state)
        return self.decoder.rpc_sync().loss(outputs, targets), state

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        own: list[rpc.RRef[nn.Parameter]] = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        return [*own, *self.embedding.rpc_sync().parameter_rrefs(), *self.decoder.rpc_sync().parameter_rrefs()]


# ---- the text


@dataclass(frozen=True)
class Text:
    """The standard library as numbers of words."""

    vocabulary: list[str]
    train: Tensor  # (number of words) int64
    test: Tensor

    def numbers(self, words: list[str]) -> Tensor:
        number_of = {word: number for number, word in enumerate(self.vocabulary)}
        return torch.tensor([number_of.get(word, 0) for word in words])


def read_library(options: Options) -> Text:
    """The first 19/20 of the words are the training set, the others the validation set."""
    words = WORD.findall(library_text())
    vocabulary = [UNKNOWN] + [word for word, _ in Counter(words).most_common(options.words - 1)]
    numbers = Text(vocabulary, torch.empty(0), torch.empty(0)).numbers(words)
    split = len(numbers) * 19 // 20
    return Text(vocabulary, numbers[:split], numbers[split:])


def batches(words: Tensor, options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and their successors, both (batch, length); each row continues that of the previous batch."""
    rows = words[: (len(words) - 1) // options.batch_size * options.batch_size].unflatten(0, (options.batch_size, -1))
    for start in range(0, rows.size(1) - options.length, options.length):
        excerpt = rows[:, start : start + options.length + 1]
        yield excerpt[:, :-1].contiguous(), excerpt[:, 1:].contiguous()


def endless(words: Tensor, options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches(words, options)


# ---- training, on the trainer


def train(model: RecurrentNet, text: Text, options: Options) -> list[float]:
    """Returns the loss of each step."""
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=options.lr)
    losses: list[float] = []
    state: State | None = None
    for words, targets in islice(endless(text.train, options), options.steps):
        with dist_autograd.context() as context_id:
            loss, state = model.loss(words, targets, state)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        state = (
            state[0].detach(),
            state[1].detach(),
        )  # the values go on, gradients end here
        losses.append(loss.item())
        if len(losses) % math.ceil(options.steps / 10) == 0:
            print(f"step {len(losses)}/{options.steps}: loss {losses[-1]:.3f}", flush=True)
    return losses


@torch.no_grad()
def evaluate(model: RecurrentNet, text: Text, options: Options) -> float:
    losses: list[float] = []
    state: State | None = None
    for words, targets in batches(text.test, options):
        loss, state = model.loss(words, targets, state)
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def write_sample(model: RecurrentNet, text: Text, prompt: str, num_words: int = 12) -> str:
    """The prompt, continued with the most likely words."""
    written = WORD.findall(prompt)
    outputs, state = model.outputs(text.numbers(written)[None], None)
    for _ in range(num_words):
        number = model.decoder.rpc_sync().best(outputs[:, -1:])
        written.append(text.vocabulary[int(number)])
        outputs, state = model.outputs(number, state)
    return " ".join(written).replace("\n ", "\n")


def draw(losses: list[float], loss: float, guessing: float, options: Options) -> None:
    """Writes the picture: the loss of every step."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import layout_engine, pyplot

    figure, axes = pyplot.subplots(
        figsize=(8, 4.4), layout=layout_engine.ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    )
    axes.plot(losses, color="C0", linewidth=0.8, label="each step")
    axes.axhline(guessing, color="gray", linestyle=":", label=f"{guessing:.2f} for guessing by frequency")
    axes.axhline(loss, color="C1", linestyle="--", label=f"{loss:.2f} on text not seen")
    axes.set(title="Loss in nats per word", xlabel="step")
    axes.legend(loc="upper right", frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A recurrent net over two workers", fontweight="bold")
    figure.savefig(options.picture, dpi=130)


# ---- processes


def run_trainer(options: Options) -> float:
    """Trains, and returns the validation loss."""
    text = read_library(options)
    model = RecurrentNet(options)
    started = time.monotonic()
    losses = train(model, text, options)
    seconds = time.monotonic() - started
    loss, guessing = evaluate(model, text, options), guessing_loss(text.test, options.words)
    draw(losses, loss, guessing, options)
    print(f"A sample of its output:\n{write_sample(model, text, 'if not isinstance(')}\n")
    print(
        f"validation loss {loss:.2f} (guessing by frequency: {guessing:.2f}; {options.steps} steps, {seconds:.1f} s), "
        f"picture: {options.picture}",
        flush=True,
    )
    return loss


def run_process(rank: int, options: Options) -> None:
    """What each process does: rank 0 trains, rank 1 serves."""
    torch.set_num_threads(1)  # the processes share the cores already
    rpc.init_rpc(("trainer", "server")[rank])
    loss = run_trainer(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: the server serves until the trainer has finished
    if loss is not None and loss > options.max_loss:
        sys.exit(f"validation loss {loss:.2f} is above --max-loss {options.max_loss:g}")


# ---- the command line


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="Trains a recurrent net on Python's standard library; its tables are on a server.",
        epilog="Under torchrun, rank 0 is the trainer and rank 1 the server.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("--steps", type=positive(int), default=300, help="batches to learn from (default: %(default)s)")
    add("--batch-size", type=positive(int), default=32, help="texts per batch (default: %(default)s)")
    add("--length", type=positive(int), default=24, help="words per text (default: %(default)s)")
    add("--words", type=positive(int), default=2000, help="size of the vocabulary (default: %(default)s)")
    add("--width", type=positive(int), default=96, help="width of the embedding and the LSTM (default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.005, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the model (default: %(default)s)")
    parser.add_argument("--max-loss", type=float, default=math.inf, metavar="NATS", help="exit with status 1 when the "
                        "validation loss is above (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="device of the parts (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("out/recurrent_net.png"), metavar="FILE",
                        help="file for the loss curve (default: %(default)s)")  # fmt: skip
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
        raise ValueError("torchrun must start 2 processes, the trainer and the server: --nproc-per-node 2")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the package matplotlib is missing: pip install 'rpcdist[examples]'")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch finds no GPU here")
    if options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {options.picture}: the name must end in .png, .pdf or .svg")
    options.picture.parent.mkdir(parents=True, exist_ok=True)


def main() -> None:
    options = parse_options()
    if placement_from_environment() is None:
        # Importing torch takes each process seconds, in which nothing else would be seen.
        print("starting the trainer and the server ...", flush=True)
    launch(run_process, (options,), workers=2)


if __name__ == "__main__":
    main()
