"""$ python examples/recurrent_net.py --steps 300
validation loss 3.93 (guessing by frequency: 4.74; 300 steps, 15.5 s), picture: out/recurrent_net.png

The first line is the command, the second its last line of output (your digits differ a little). A recurrent network
learns to guess the next word of Python, from the source of Python's own standard library. Its large tables, the
embedding and the decoder, live on a server; the LSTM between them is on the trainer, which calls the tables as
`RemoteModule`s. One distributed backward pass goes through both workers, and one distributed optimizer steps the
parameters where they are. The loss is in nats per word, on text that it has not seen.

It starts its processes itself. Under torchrun rank 0 is the trainer, and rank 1 the server:

    $ torchrun --nproc-per-node 2 examples/recurrent_net.py
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from _shared import ExampleOptions, cluster, option, require_loss


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Trains a recurrent net on Python's standard library; its tables are on a server."""

    steps: int = option(300, "batches to learn from")
    lr: float = option(0.005, "learning rate")
    max_loss: float = option(math.inf, "exit with status 1 when the validation loss is above", float, metavar="NATS")
    picture: Path = option(Path("out/recurrent_net.png"), "file for the loss curve", Path)

    first_names = ("trainer", "server")
    roles = "the trainer and the server"


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

from collections.abc import Iterator
from itertools import cycle, islice

import torch
from _data import Words, guessing_loss, library_words
from _pictures import picture
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rpcdist.autograd as dist_autograd
import rpcdist.rpc as rpc
from rpcdist.nn import RemoteModule
from rpcdist.optim import DistributedOptimizer

NUM_WORDS = 2000  # of the vocabulary; all others are one unknown word
WIDTH = 96  # of the embedding and of the LSTM
BATCH_SIZE = 32
LENGTH = 24  # words per step
State = tuple[Tensor, Tensor]  # hidden state and cell state of the LSTM, each (1, batch, width)


class Decoder(nn.Module):
    """Outputs of the LSTM (batch, length, width) and targets (batch, length) -> the loss; on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats per word. The scores of all words are large, and never leave the server."""
        return cross_entropy(self.linear(outputs).flatten(0, 1), targets.flatten())


def set_seed(seed: int) -> None:
    torch.manual_seed(seed)


class RecurrentNet:
    """The whole model, as the trainer sees it."""

    def __init__(self, seed: int) -> None:
        set_seed(seed)
        rpc.rpc_sync("server", set_seed, (seed,))
        self.embedding = RemoteModule("server", nn.Embedding, (NUM_WORDS, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = RemoteModule("server", Decoder)

    def loss(self, words: Tensor, targets: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Words and targets, both (batch, length) int64 -> the loss, and the state of the LSTM after them."""
        outputs, state = self.lstm(self.embedding(words), state)
        return self.decoder(outputs, targets), state

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        """References to the parameters of all parts; the optimizer steps each at its owner."""
        own = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        return own + self.embedding.remote_parameters() + self.decoder.remote_parameters()


def batches(words: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and their successors, both (batch, length); each row continues that of the previous batch."""
    rows = words[: (len(words) - 1) // BATCH_SIZE * BATCH_SIZE].unflatten(0, (BATCH_SIZE, -1))
    for begin in range(0, rows.size(1) - LENGTH, LENGTH):
        excerpt = rows[:, begin : begin + LENGTH + 1]
        yield excerpt[:, :-1].contiguous(), excerpt[:, 1:].contiguous()


def train(model: RecurrentNet, words: Words, options: Options) -> list[float]:
    """Returns the loss of each step."""
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameters(), lr=options.lr)
    losses: list[float] = []
    state: State | None = None
    for inputs, targets in islice(cycle(batches(words.train)), options.steps):
        with dist_autograd.context() as context_id:
            loss, (hidden, cell) = model.loss(inputs, targets, state)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        state = hidden.detach(), cell.detach()  # the values go on, gradients end here
        losses.append(loss.item())
        if len(losses) % math.ceil(options.steps / 10) == 0:
            print(f"step {len(losses)}/{options.steps}: loss {losses[-1]:.3f}", flush=True)
    return losses


@torch.no_grad()
def evaluate(model: RecurrentNet, words: Tensor) -> float:
    losses: list[float] = []
    state: State | None = None
    for inputs, targets in batches(words):
        loss, state = model.loss(inputs, targets, state)
        losses.append(loss.item())
    return sum(losses) / len(losses)


def run_trainer(options: Options) -> float:
    """Trains, and returns the validation loss."""
    words = library_words(NUM_WORDS)
    model = RecurrentNet(options.seed)
    started = time.monotonic()
    losses = train(model, words, options)
    seconds = time.monotonic() - started
    loss, guessing = evaluate(model, words.test), guessing_loss(words.test, NUM_WORDS)
    with picture(options.picture, "A recurrent net over two workers", columns=1) as (axes,):
        axes.plot(losses, linewidth=0.8, label="each step")
        axes.axhline(guessing, color="gray", linestyle=":", label=f"{guessing:.2f} for guessing by frequency")
        axes.axhline(loss, color="C1", linestyle="--", label=f"{loss:.2f} on text not seen")
        axes.set(title="Loss in nats per word", xlabel="step")
    what = f"guessing by frequency: {guessing:.2f}; {options.steps} steps, {seconds:.1f} s"
    print(f"validation loss {loss:.2f} ({what}), picture: {options.picture}", flush=True)
    return loss


def main() -> None:
    options = Options.parse()
    with cluster(options):  # this process is the trainer, and the other one serves its calls
        loss = run_trainer(options)
    require_loss(loss, options.max_loss)


if __name__ == "__main__":
    main()
