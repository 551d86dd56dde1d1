"""$ python examples/parameter_server.py --trainers 2
test accuracy 97.8 % (async, 2 trainers, 40 epochs, 3.4 s), picture: out/parameter_server.png

The first line is the command, the second its last line of output (your digits differ a little). One process is the
parameter server, the others are trainers that learn to read the 1,797 handwritten digits which scikit-learn ships, each
on its own share of the images. With `--servers 3` each of three servers has a third of the parameters.

--mode async  Trainers push gradients, which are applied at once, and get fresh parameters; with `--staleness 4`, a
              trainer that is more than 4 steps ahead of the slowest one waits (Ho et al., 2013).
--mode sync   The servers wait for the gradients of all trainers, average them and take one step.

`ParameterServer` of `rpcdist.parallel` does all that; this file has the training, and the processes. --kill 1 kills
trainer 1 in the middle of its work and starts it again; the others go on, and the picture shows when.

It starts its processes itself. Under torchrun the first ranks are the servers, and all others are trainers:

    $ torchrun --nproc-per-node 3 examples/parameter_server.py --mode sync
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from _killed_processes import replace_when_killed
from _shared import NUM_TRAIN, ExampleOptions, at_least, counted, option, require_accuracy, start

BATCH_SIZE = 32  # images per step and trainer


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Trains a digit classifier with parameter servers and trainers."""

    mode: Literal["async", "sync"] = option("async", "what the servers do with gradients", choices=("async", "sync"))
    servers: int = option(1, "number of servers, which share the parameters")
    trainers: int = counted(2, "number of trainers")
    staleness: int | None = option(None, "steps that a trainer may be ahead (default: any)", int, metavar="K")
    kill: int | None = option(None, "kill this trainer once, and start it again", int, metavar="TRAINER")
    epochs: int = option(40, "times that each trainer goes through its images")
    min_accuracy: float = at_least("the test accuracy", "PERCENT")
    picture: Path = option(Path("out/parameter_server.png"), "file for the curves", Path)

    roles = "the servers and the trainers"
    needs = ("sklearn", "matplotlib", "tqdm")

    @property
    def first_names(self) -> list[str]:
        return [f"server{number}" for number in range(self.servers)]

    @property
    def steps_per_epoch(self) -> int:
        """Equal for all trainers, so that none waits for another one that has finished."""
        return NUM_TRAIN // self.trainers // BATCH_SIZE

    def check(self) -> None:
        if self.steps_per_epoch < 1:
            raise ValueError(f"--trainers {self.trainers}: each has fewer images than a batch of {BATCH_SIZE}")
        if self.staleness is not None and (self.mode == "sync" or self.staleness < 0):
            raise ValueError("--staleness is a number of steps, for --mode async; in sync no trainer is ahead")
        if self.kill is not None and not (0 <= self.kill < self.trainers and self.epochs > 1):
            raise ValueError(f"--kill {self.kill}: one of the trainers 0 to {self.trainers - 1}, half-way of --epochs")

    def __str__(self) -> str:
        servers = f"{self.servers} servers, " if self.servers > 1 else ""
        killed = "" if self.kill is None else f", trainer {self.kill} killed once"
        return f"{self.mode}, {servers}{self.trainers} trainers, {self.epochs} epochs{killed}"


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import Digits, load_digits, new_classifier, percent_right
from _pictures import draw_trainers
from _progress import TrainingProgress
from torch.nn.functional import cross_entropy

import rpcdist
import rpcdist.rpc as rpc
from rpcdist.parallel import ParameterServer


@rpc.idempotent  # when its trainer is lost, the call is made again, as soon as a new process has taken the place
def train(
    server: ParameterServer, progress: rpc.RRef[TrainingProgress], trainer: int, digits: list[Digits], options: Options
) -> None:
    """Trains on its share, from the first epoch that is not done; the first server calls this on each trainer."""
    first_epoch = 1 + progress.rpc_sync().num_epochs_done(trainer)
    (images, labels), (test_images, test_labels) = digits
    model = new_classifier(options.seed)
    server.load_into(model)
    torch.manual_seed(options.seed + 1 + trainer + first_epoch)
    for epoch in range(first_epoch, options.epochs + 1):
        if trainer == options.kill and first_epoch == 1 and epoch == 1 + options.epochs // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        order = torch.randperm(len(labels))[: options.steps_per_epoch * BATCH_SIZE]
        losses = []
        for batch in order.split(BATCH_SIZE):
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            server.step(model)  # pushes the gradients; the reply has the next parameters
            losses.append(loss.item())
        rpcdist.publish("loss", sum(losses) / len(losses))  # a curve on the live page, where one is open
        server.load_into(model)  # with what the others have done meanwhile
        progress.rpc_sync().epoch_done(trainer, losses, percent_right(model(test_images), test_labels))
    server.leave()  # the others need not wait for this trainer any more


def drive(options: Options) -> float:
    """Run by rank 0: creates the servers, gives every trainer its share, and returns the test accuracy."""
    trainers = options.names[options.servers :]
    server = ParameterServer(
        new_classifier(options.seed),
        options.first_names,
        torch.optim.SGD,
        lr=0.2,
        momentum=0.9 if options.mode == "sync" else 0.0,
        mode=options.mode,
        staleness=options.staleness,
        trainers=trainers,
    )
    train_digits, test = load_digits(options.seed)
    shares = zip(*(part.chunk(options.trainers) for part in train_digits), strict=True)
    progress = TrainingProgress(trainers, options.epochs, options.steps_per_epoch)
    rpc.on_membership_change(progress.on_change)
    rpc.wait_all(
        [
            rpc.rpc_async(name, train, (server, rpc.RRef(progress), number, [share, test], options), timeout=0)
            for number, (name, share) in enumerate(zip(trainers, shares, strict=True))
        ]
    )
    seconds = progress.elapsed_s()
    progress.close()
    model = new_classifier(options.seed)
    server.load_into(model)
    accuracy = percent_right(model(test[0]), test[1])
    draw_trainers(options.picture, f"Parameter server: {options}", progress, options.kill)
    print(f"test accuracy {accuracy:.1f} % ({options}, {seconds:.1f} s), picture: {options.picture}", flush=True)
    return accuracy


def run_process(rank: int, options: Options) -> None:
    """The work of each process of the launcher."""
    if options.kill is not None and rank == options.servers + options.kill:
        replace_when_killed(run_worker, rank, options)
    run_worker(rank, options)


def run_worker(rank: int, options: Options) -> None:
    """Rank 0 drives the training, the others serve its calls."""
    rpc.init_rpc(options.names[rank])
    accuracy = drive(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: they serve calls until rank 0 has finished
    if accuracy is not None:
        require_accuracy(accuracy, options.min_accuracy)


def main() -> None:
    start(run_process, Options.parse())


if __name__ == "__main__":
    main()
