"""$ python examples/elastic_ddp.py --kills 3
test accuracy 98.3 % (loss 0.006, 1200 steps of 3 ranks, 3 kills, back after 0.4 s), picture: out/elastic_ddp.png

The first line is the command, the second its last line of output (your digits differ a little). The ranks train a
digit classifier with `ElasticDataParallel` while they are killed at random, rank 0 as well as any other. The others go
on with the step in which it happened. Each is replaced by a new process, which gets model, optimizer and step from one
that trains. The picture has the loss, and how many ranks there were; `--kills 0` shows the same without losses.

The time is that from the moment in which a new process is up until its first step counts, in the median.

It starts, kills and replaces its processes itself; they meet in a file. On a cluster, a shared file system or a
`TCPStore` of the launcher takes its place, and whatever starts the processes need not know one from another.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _killed_processes import KilledProcesses
from _shared import ExampleOptions, at_least, count, counted, option, require_accuracy

from rpcdist import placement_from_environment


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Trains a digit classifier while its processes are killed and replaced."""

    ranks: int = counted(3, "number of processes")
    kills: int = option(3, "how often one of them is killed", int)
    steps: int = option(1200, "steps of the training")
    min_accuracy: float = at_least("the test accuracy", "PERCENT")
    picture: Path = option(Path("out/elastic_ddp.png"), "file for the picture", Path)

    roles = "the ranks"
    needs = ("sklearn", "matplotlib")

    def check(self) -> None:
        if self.kills < 0:
            raise ValueError(f"--kills {self.kills} is negative")
        if placement_from_environment() is not None:
            raise ValueError("torchrun ends all ranks when one is lost: start this example without it")


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import load_digits, percent_right
from _pictures import moving_mean, picture
from torch import nn
from torch.nn.functional import cross_entropy

from rpcdist.collectives import FileStore, get_rank
from rpcdist.errors import JobEnded
from rpcdist.parallel import ElasticDataParallel

BATCH_SIZE = 32
STEP_S = 0.02  # at least: with so small a model, all would be over before a new process has started
EVENT_LIMIT_S = 120.0


def train(_: int, folder: Path, options: Options) -> None:
    """The work of each process, of the first ones and of those that come later."""
    torch.set_num_threads(1)  # the processes share the cores already
    torch.manual_seed(options.seed)
    (images, labels), (test_images, test_labels) = load_digits(options.seed)
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    store = FileStore(folder / "store")
    model = ElasticDataParallel(module, optimizer, store, num_ranks=options.ranks)
    up_at, is_new = time.monotonic(), store.check(["first step"])
    try:
        for step in model.steps(options.steps):
            with step:
                chance = torch.Generator().manual_seed(step.number * options.ranks + step.rank)
                batch = torch.randint(len(labels), (BATCH_SIZE,), generator=chance)
                loss = cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
            if step.counted and is_new:
                store.queue_push("back", f"{time.monotonic() - up_at}")
                is_new = False
            if step.counted and step.rank == 0:
                with (folder / "log").open("a") as log:
                    log.write(f"{step.number} {step.world_size} {loss.item()}\n")
                store.set("first step", b"1")
            time.sleep(STEP_S)
    except JobEnded:
        store.queue_push("back", "too late")
        return
    if get_rank() == 0:
        module.eval()
        accuracy = percent_right(model(test_images), test_labels)
        (folder / "accuracy").write_text(str(accuracy))
    model.close()


def supervise(folder: Path, options: Options) -> list[float]:
    """Starts the processes, and kills and replaces one now and then; returns how long newcomers needed, in seconds."""
    chance = random.Random(options.seed)
    times = []
    processes = KilledProcesses(train, (folder, options), options)
    with processes, FileStore(folder / "store", timeout=EVENT_LIMIT_S) as store:
        for number in range(options.kills):
            store.wait(["first step"])
            processes.replace(chance.randrange(options.ranks))
            answer = store.queue_pop("back").decode()
            if answer == "too late":
                raise SystemExit("the training was over before a new process had started: choose more --steps")
            times.append(float(answer))
            print(f"kill {number + 1}: the new process trains {times[-1]:.2f} s after it was up", flush=True)
        for rank in range(options.ranks):
            processes.has_ended(rank)
    return times


def draw(folder: Path, options: Options) -> float:
    """Writes the picture; returns the smoothed loss at the end."""
    rows = [line.split() for line in (folder / "log").read_text().splitlines()]
    steps, sizes, losses = [int(row[0]) for row in rows], [int(row[1]) for row in rows], [float(row[2]) for row in rows]
    smooth = moving_mean(losses, 30)
    with picture(options.picture, f"{count(options.kills, 'kill')} while {options.ranks} ranks train") as (left, right):
        left.plot(steps, losses, ".", markersize=2, alpha=0.3, label="of each batch of rank 0")
        left.plot(steps, smooth, label="mean of 30")
        left.set(xlabel="step", ylabel="loss", yscale="log")
        right.step(steps, sizes, where="post")
        right.set(xlabel="step", ylabel="ranks", yticks=range(options.ranks + 1))
    return smooth[-1]


def main() -> None:
    options = Options.parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = supervise(folder, options)
        accuracy = float((folder / "accuracy").read_text())
        loss = draw(folder, options)
    back = f", back after {statistics.median(times):.1f} s" if times else ""
    trained = f"{options.steps} steps of {count(options.ranks, 'rank')}"
    what = f"loss {loss:.3f}, {trained}, {count(options.kills, 'kill')}{back}"
    print(f"test accuracy {accuracy:.1f} % ({what}), picture: {options.picture}", flush=True)
    require_accuracy(accuracy, options.min_accuracy)


if __name__ == "__main__":
    main()
