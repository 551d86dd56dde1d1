"""$ python examples/ddp.py
test accuracy 98.6 % (2 ranks, 10 epochs, 0.40 s each), checkpoint: out/ddp.pt

The first line is the command, the second its last line of output (your digits differ a little). A small convolutional
network learns to read the 1,797 handwritten digits which scikit-learn ships. Every rank has a copy of it and sees its
own part of the images; `DistributedDataParallel` averages the gradients, so all copies stay the same.

After each epoch rank 0 writes a checkpoint. `--resume` continues from it: rank 0 reads it and sends it to the others.

    $ python examples/ddp.py --epochs 20 --resume

It starts its processes itself. It also runs under torchrun, on several machines as well:

    $ torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import rpcdist.collectives as dist
from rpcdist import launch, placement_from_environment
from rpcdist.data import DistributedSampler
from rpcdist.errors import ConfigError
from rpcdist.parallel import DistributedDataParallel

NUM_IMAGES = 1797
NUM_TRAIN = 1437  # the other 360 images measure the accuracy


@dataclass(frozen=True)
class Options:
    """The options of the command line; every process gets a copy."""

    ranks: int
    epochs: int
    batch_size: int
    lr: float
    seed: int
    min_accuracy: float
    device: str
    checkpoint: Path
    resume: bool


# ---- the model and the data


def build_model() -> nn.Module:
    """For images of (n, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def load_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """A training set and a test set, the same on all ranks."""
    from sklearn.datasets import load_digits as load_sklearn_digits  # slow to import

    digits = load_sklearn_digits()
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    return TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]), TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:])


# ---- training: every rank runs this


class Trainer:
    """The copy of the model and the part of the images of one rank."""

    def __init__(self, options: Options, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = device
        train_set, self.test_set = load_digits(options.seed)
        self.sampler = DistributedSampler(train_set, seed=options.seed)  # type: ignore[var-annotated]  # TensorDataset
        self.loader = DataLoader(train_set, options.batch_size, sampler=self.sampler)
        self.model = DistributedDataParallel(build_model().to(device))  # all ranks have rank 0's parameters now
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=0.9)
        self.num_epochs = 0  # that are done

    def run_epoch(self) -> float:
        """Trains; returns the mean loss of all ranks."""
        self.model.train()
        self.sampler.set_epoch(self.num_epochs)  # another order in every epoch
        total = torch.zeros((), device=self.device)
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(images.to(self.device)), labels.to(self.device))
            loss.backward()  # averages the gradients over the ranks, while it computes them
            self.optimizer.step()
            total += loss.detach()
        self.num_epochs += 1
        dist.all_reduce(total, dist.ReduceOp.AVG)
        return total.item() / len(self.loader)

    @torch.no_grad()
    def measure_accuracy(self) -> float:
        """The percentage of test images that the model labels correctly. Each rank takes a part of them."""
        self.model.eval()
        images, labels = self.test_set[dist.get_rank() :: dist.get_world_size()]
        # Called through DistributedDataParallel, this gives all ranks rank 0's statistics of batch normalisation first.
        is_right = self.model(images.to(self.device)).argmax(dim=1) == labels.to(self.device)
        num_right: Tensor = is_right.sum()
        dist.all_reduce(num_right)
        return 100 * num_right.item() / len(self.test_set)

    def save(self) -> None:
        """Writes the checkpoint, on rank 0: the copies are the same."""
        if dist.get_rank() != 0:
            return
        state = {
            "model": self.model.module.state_dict(),  # without the wrapper, any program can load it
            "optimizer": self.optimizer.state_dict(),
            "epochs": self.num_epochs,
        }
        draft = self.options.checkpoint.with_suffix(".draft")
        torch.save(state, draft)
        draft.replace(self.options.checkpoint)  # atomic: an interruption leaves the old or the new checkpoint complete

    def resume(self) -> None:
        """Continues from a checkpoint. Only rank 0 reads the file; the others get its contents."""
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            box = [torch.load(self.options.checkpoint, map_location="cpu", weights_only=True)]
        dist.broadcast_object_list(box, src=0)
        state = box[0]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])  # moves it to where the parameters are
        self.num_epochs = state["epochs"]


def train(options: Options, device: torch.device) -> float:
    """Returns the test accuracy; rank 0 prints the progress."""
    trainer = Trainer(options, device)
    if options.resume:
        trainer.resume()
        say(f"resumed after {trainer.num_epochs} epochs")
    times = []
    accuracy = trainer.measure_accuracy()
    while trainer.num_epochs < options.epochs:
        started = time.monotonic()
        loss = trainer.run_epoch()
        times.append(time.monotonic() - started)
        accuracy = trainer.measure_accuracy()
        trainer.save()
        say(
            f"epoch {trainer.num_epochs}/{options.epochs}: loss {loss:.3f}, test accuracy {accuracy:.1f} %, "
            f"{times[-1]:.2f} s"
        )
    mean = sum(times) / max(1, len(times))
    ranks = dist.get_world_size()
    say(
        f"test accuracy {accuracy:.1f} % ({ranks} rank{'s' * (ranks > 1)}, {trainer.num_epochs} epochs, {mean:.2f} s "
        f"each), checkpoint: {options.checkpoint}"
    )
    return accuracy


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---- processes


def run_process(rank: int, options: Options) -> None:
    """What each process does."""
    torch.set_num_threads(1)  # the processes share the cores already
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    dist.init_process_group()
    accuracy = train(options, device)
    dist.destroy_process_group()
    if rank == 0 and accuracy < options.min_accuracy:
        sys.exit(f"test accuracy {accuracy:.1f} % is below --min-accuracy {options.min_accuracy:g}")


# ---- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a digit classifier on several processes at once, each with its own part of the images.",
        epilog="Under torchrun, --ranks may be left out.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("--ranks", type=positive(int), help="number of processes (default: 2)")
    add("--epochs", type=positive(int), default=10, help="times through all images (default: %(default)s)")
    add("--batch-size", type=positive(int), default=32, help="images per step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.05, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: "
                        "%(default)s)")  # fmt: skip
    parser.add_argument("--min-accuracy", type=float, default=0.0, metavar="PERCENT", help="exit with status 1 when "
                        "the test accuracy is below (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda gives every rank of a machine "
                        "a GPU of its own (default: %(default)s)")  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, default=Path("out/ddp.pt"), metavar="FILE",
                        help="the file that rank 0 writes after each epoch (default: %(default)s)")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--port", type=int, default=0, help="port of the rendezvous on this machine (default: any free "
                        "one)")  # fmt: skip
    return parser


def parse_options(parser: argparse.ArgumentParser) -> tuple[Options, int]:
    """The options, and the port at which the processes find each other."""
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")
    try:
        arguments["ranks"] = choose_num_ranks(arguments["ranks"])
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


def choose_num_ranks(wanted: int | None) -> int:
    """The value of --ranks, or all of torchrun's."""
    place = placement_from_environment()
    if place is None:
        return wanted or 2
    if wanted not in (None, place.world_size):
        raise ValueError(f"--ranks {wanted} does not fit torchrun's {place.world_size} processes: leave it out")
    return place.world_size


def check(options: Options) -> None:
    """Raises `ValueError` for options that would fail later, or with a message that is hard to understand."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("the package scikit-learn is missing: pip install 'rpcdist[examples]'")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here")
    if options.ranks * options.batch_size > NUM_TRAIN:
        raise ValueError(f"{options.ranks} batches of {options.batch_size} are more than the {NUM_TRAIN} images")
    place = placement_from_environment()
    reads_checkpoint = options.resume and (place is None or place.rank == 0)
    if reads_checkpoint and not options.checkpoint.exists():
        raise ValueError(f"--resume: there is no checkpoint {options.checkpoint}; train without --resume first")
    try:
        options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--checkpoint {options.checkpoint}: its folder cannot be made ({error.strerror})") from error


def main() -> None:
    parser = make_parser()
    options, port = parse_options(parser)
    if placement_from_environment() is None:
        # Importing torch takes each process seconds, in which nothing else would be seen.
        print(f"starting {options.ranks} rank{'s' * (options.ranks > 1)} ...", flush=True)
    try:
        launch(run_process, (options,), workers=options.ranks, master_port=port)
    except ConfigError as error:
        parser.error(f"--port: {error}")


if __name__ == "__main__":
    main()
