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

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _shared import NUM_TRAIN, ExampleOptions, count, counted, flag, option, parse, start

from rpcdist import placement_from_environment


@dataclass(frozen=True)
class Options(ExampleOptions):
    ranks: int = counted(2, "number of processes")
    epochs: int = option(10, "times through all images")
    batch_size: int = option(32, "images per step and rank")
    lr: float = option(0.05, "learning rate")
    seed: int = option(0, "random seed", int)
    min_accuracy: float = option(0.0, "exit with status 1 when the test is below", float, metavar="PERCENT")
    device: str = option("cpu", "cuda gives every rank of a machine a GPU of its own", choices=("cpu", "cuda"))
    checkpoint: Path = option(Path("out/ddp.pt"), "the file that rank 0 writes after each epoch", Path)
    resume: bool = flag("continue from the checkpoint")

    needs = ("sklearn",)

    def check(self) -> None:
        if self.ranks * self.batch_size > NUM_TRAIN:
            raise ValueError(f"{self.ranks} batches of {self.batch_size} are more than the {NUM_TRAIN} images")
        place = placement_from_environment()
        if self.resume and (place is None or place.rank == 0) and not self.checkpoint.exists():
            raise ValueError(f"--resume: there is no checkpoint {self.checkpoint}; train without --resume first")


def parse_options() -> Options:
    about = "Trains a digit classifier on several processes at once, each with its own part of the images."
    return parse(Options, about, "Under torchrun, --ranks may be left out.")


if __name__ == "__main__":
    parse_options()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import rpcdist.collectives as dist
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

    def __init__(self, options: Options, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = device
        train_set, self.test_set = (
            TensorDataset(images.unflatten(1, (1, 8, 8)), labels) for images, labels in load_digits(options.seed)
        )
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
    say(
        f"test accuracy {accuracy:.1f} % ({count(dist.get_world_size(), 'rank')}, {trainer.num_epochs} epochs, "
        f"{mean:.2f} s each), checkpoint: {options.checkpoint}"
    )
    return accuracy


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


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


def main() -> None:
    start(run_process, parse_options())


if __name__ == "__main__":
    main()
