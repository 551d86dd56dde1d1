"""$ python examples/ddp.py
test accuracy 98.6 % (2 ranks, 10 epochs, 0.40 s each), checkpoint: out/ddp

The first line is the command, the second its last line of output (your digits differ a little). A small convolutional
network learns to read the 1,797 handwritten digits which scikit-learn ships. Every rank has a copy of it and sees its
own part of the images; `DistributedDataParallel` averages the gradients, so all copies stay the same.

After each epoch the ranks write a checkpoint. `--resume` continues from it, on any number of ranks.

    $ python examples/ddp.py --epochs 20 --resume

It starts its processes itself. It also runs under torchrun, on several machines as well:

    $ torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _shared import NUM_TRAIN, ExampleOptions, at_least, count, counted, flag, option, require_accuracy, start

BATCH_SIZE = 32  # images per step and rank


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Trains a digit classifier on several processes at once, each with its own part of the images."""

    ranks: int = counted(2, "number of processes")
    epochs: int = option(10, "times through all images")
    min_accuracy: float = at_least("the test accuracy", "PERCENT")
    checkpoint: Path = option(Path("out/ddp"), "the checkpoint that is written after each epoch", Path)
    resume: bool = flag("continue from the checkpoint")

    roles = "the ranks"
    needs = ("sklearn",)

    def check(self) -> None:
        if self.ranks * BATCH_SIZE > NUM_TRAIN:
            raise ValueError(
                f"--ranks {self.ranks}: {NUM_TRAIN} images are fewer than a batch of {BATCH_SIZE} for each"
            )
        if self.resume and not self.checkpoint.exists():
            raise ValueError(f"--resume: there is no checkpoint {self.checkpoint}; train without --resume first")


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import rpcdist.collectives as dist
from rpcdist import checkpoint
from rpcdist.data import DistributedSampler
from rpcdist.parallel import DistributedDataParallel


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


class Trainer:
    """The copy of the model and the part of the images of one rank."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        train_set, self.test_set = (
            TensorDataset(images.unflatten(1, (1, 8, 8)), labels) for images, labels in load_digits(options.seed)
        )
        self.sampler = DistributedSampler(train_set, seed=options.seed)  # type: ignore[var-annotated]  # TensorDataset
        self.loader = DataLoader(train_set, BATCH_SIZE, sampler=self.sampler)
        self.model = DistributedDataParallel(build_model())  # all ranks have rank 0's parameters now
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def run_epoch(self, epoch: int) -> float:
        """Trains; returns the mean loss of all ranks."""
        self.model.train()
        self.sampler.set_epoch(epoch)  # another order in every epoch
        total = torch.zeros(())
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(images), labels)
            loss.backward()  # averages the gradients over the ranks, while it computes them
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        return total.item() / len(self.loader)

    @torch.no_grad()
    def measure_accuracy(self) -> float:
        """The percentage of test images that the model labels correctly. Each rank takes a part of them."""
        self.model.eval()
        images, labels = self.test_set[dist.get_rank() :: dist.get_world_size()]
        # Called through DistributedDataParallel, this gives all ranks rank 0's statistics of batch normalisation first.
        num_right: Tensor = (self.model(images).argmax(dim=1) == labels).sum()
        dist.all_reduce(num_right)
        return 100 * num_right.item() / len(self.test_set)

    def state(self, num_epochs: int) -> dict[str, Any]:
        """The contents of a checkpoint; without the wrapper, any program can load the model."""
        return {"model": self.model.module, "optimizer": self.optimizer, "epochs": num_epochs}


def train(options: Options) -> float:
    """Returns the test accuracy; rank 0 prints the progress."""
    trainer = Trainer(options)
    num_epochs = 0  # that are done
    if options.resume:
        state = trainer.state(num_epochs)
        checkpoint.load(options.checkpoint, state)  # fills the model and the optimizer in place
        num_epochs = state["epochs"]
        say(f"resumed after {num_epochs} epochs")
    times = [0.0]
    accuracy = trainer.measure_accuracy()
    for epoch in range(num_epochs + 1, options.epochs + 1):
        started = time.monotonic()
        loss = trainer.run_epoch(epoch)
        times.append(time.monotonic() - started)
        accuracy = trainer.measure_accuracy()
        checkpoint.save(options.checkpoint, trainer.state(epoch))  # an interruption leaves the old or the new one whole
        say(f"epoch {epoch}/{options.epochs}: loss {loss:.3f}, test accuracy {accuracy:.1f} %, {times[-1]:.2f} s")
    mean_s = sum(times) / max(1, len(times) - 1)
    what = f"{count(dist.get_world_size(), 'rank')}, {max(num_epochs, options.epochs)} epochs, {mean_s:.2f} s each"
    say(f"test accuracy {accuracy:.1f} % ({what}), checkpoint: {options.checkpoint}")
    return accuracy


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run_process(rank: int, options: Options) -> None:
    """The work of each process."""
    dist.init_process_group()
    accuracy = train(options)
    dist.destroy_process_group()
    if rank == 0:
        require_accuracy(accuracy, options.min_accuracy)


def main() -> None:
    start(run_process, Options.parse())


if __name__ == "__main__":
    main()
