"""$ python examples/elastic_parameter_server.py --kills 4
test accuracy 94.7 % (1000 steps of 2 trainers, 4 kills, 11.8 s), picture: out/elastic_parameter_server.png

The first line is the command, the second its last line of output. Trainers push gradients to a parameter server while
processes are killed at random, and the server once. Each is replaced by a new process under the same name, and the
others go on: the picture has the loss, and who was gone when.

The server (rank 0) saves its state every few steps, and its successor begins with that. A trainer's call that is lost
with the server is made again (`rpc.idempotent`) until there is another one: workers find the new rank 0 by themselves.

It starts, kills and replaces its processes itself. Under torchrun, which starts all ranks again when one fails,
trainers kill themselves, as often as there are restarts, and the job goes on from the file:

    $ torchrun --nproc-per-node 3 --max-restarts 2 examples/elastic_parameter_server.py --kills 2
"""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from _killed_processes import KilledProcesses
from _shared import ExampleOptions, counted, option

from rpcdist import placement_from_environment


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Trains with a parameter server while its processes are killed and replaced."""

    trainers: int = counted(2, "number of trainers")
    steps: int = option(1000, "steps of all trainers together")
    kills: int = option(4, "how often a process is killed; the server is one of them")
    picture: Path = option(Path("out/elastic_parameter_server.png"), "file for the loss curve", Path)

    first_names = ("server",)
    roles = "the server and the trainers"
    needs = ("sklearn", "matplotlib")

    @property
    def state(self) -> Path:
        """The file of the server's state."""
        return self.picture.with_suffix(".state")


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import torch
from _data import load_digits, new_classifier, percent_right
from _pictures import draw_failures
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rpcdist import rpc

SAVED_EVERY = 10  # steps
BATCH_SIZE = 64
LEARNING_RATE = 0.3
STEP_S = 0.02  # of each trainer, at least: with so small a model, all would be over before a new process has started
RETURN_LIMIT_S = 300.0  # of a server


class Server:
    """The parameters, and what happened. Calls run on several threads; a successor begins with the file."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.is_done = threading.Event()
        self.parameters = parameters_to_vector(new_classifier(options.seed).parameters()).detach()
        self.losses: list[tuple[float, float]] = []  # (time, loss of a batch) of each step
        self.events: list[tuple[float, str]] = []  # (time, who was lost or came back)
        if options.state.exists():
            self.parameters, self.losses, self.events = torch.load(options.state)
            self.events.append((self.losses[-1][0], "server is lost"))  # nobody saw when it was
            self.note("server is back")

    def note(self, what: str) -> None:
        print(f"step {len(self.losses)}: {what}", flush=True)
        self.events.append((time.time(), what))

    def on_change(self, change: rpc.MembershipChange) -> None:
        with self.lock:
            if change.kind != "left" and not self.is_done.is_set():
                self.note(f"{change.worker.name} is {'lost' if change.kind == 'lost' else 'there'}")

    def push(self, gradient: Tensor | None, loss: float) -> Tensor | None:
        with self.lock:
            if gradient is not None and not self.is_done.is_set():
                self.parameters.sub_(gradient, alpha=LEARNING_RATE)
                self.losses.append((time.time(), loss))
                if len(self.losses) % SAVED_EVERY == 0:
                    written = self.options.state.with_suffix(".new")
                    torch.save((self.parameters, self.losses, self.events), written)
                    written.replace(self.options.state)  # whenever the process dies, there is a whole file
                if len(self.losses) >= self.options.steps:
                    self.is_done.set()
            return None if self.is_done.is_set() else self.parameters.clone()


server: Server | None = None  # in the process that is the server


@rpc.idempotent  # the call is made again when the server is lost: a gradient that is applied twice does no harm
def push(gradient: Tensor | None, loss: float = math.nan) -> Tensor | None:
    """Applies a gradient, if there is one; the new parameters, or None when the training is over."""
    assert server is not None
    return server.push(gradient, loss)


def serve(server: Server, options: Options) -> None:
    rpc.on_membership_change(server.on_change)
    server.is_done.wait()
    model = new_classifier(options.seed)
    vector_to_parameters(server.parameters, model.parameters())
    images, labels = load_digits(options.seed)[1]
    draw_failures(options.picture, server.losses, server.events)
    options.state.unlink()
    seconds = server.losses[-1][0] - server.losses[0][0]
    what = f"{options.steps} steps of {options.trainers} trainers, {options.kills} kills, {seconds:.1f} s"
    accuracy = percent_right(model(images), labels)
    print(f"test accuracy {accuracy:.1f} % ({what}), picture: {options.picture}", flush=True)


def train(rank: int, options: Options, dies_after: int | None) -> None:
    """Trains until the server says that it is over; the server may be another process by then."""
    images, labels = (part.chunk(options.trainers)[rank - 1] for part in load_digits(options.seed)[0])
    model = new_classifier(options.seed)
    parameters, steps = rpc.rpc_sync("server", push, (None,)), 0
    while parameters is not None:
        vector_to_parameters(parameters, model.parameters())
        batch = torch.randint(len(labels), (BATCH_SIZE,))
        loss = cross_entropy(model(images[batch]), labels[batch])
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        parameters = rpc.rpc_sync("server", push, (gradient, loss.item()))
        time.sleep(STEP_S)
        steps += 1
        if steps == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def work(rank: int, options: Options, dies_after: int | None = None) -> None:
    """The work of each process: rank 0 is the server, the others are trainers."""
    global server
    torch.set_num_threads(1)  # the processes share the cores already
    server = Server(options) if rank == 0 else None  # before anybody can call it
    settings = rpc.RpcOptions(rpc_timeout=RETURN_LIMIT_S)
    rpc.init_rpc(options.names[rank], rank=rank, world_size=len(options.names), rpc_backend_options=settings)
    if server is not None:
        serve(server, options)
    else:
        train(rank, options, dies_after)
    rpc.shutdown()  # the server waits until the trainers have left


def supervise(options: Options) -> None:
    """Starts the processes, and kills and replaces one now and then, until the server has ended."""
    chance = random.Random(options.seed)
    victims = [chance.randint(1, options.trainers) for _ in range(options.kills)]
    victims[options.kills // 2] = 0
    with KilledProcesses(work, (options,), options) as processes:
        while not processes.has_ended(0, limit_s=0.1):
            steps_done = len(torch.load(options.state)[1]) if options.state.exists() else 0
            number = options.kills - len(victims)
            if victims and steps_done >= (number + 1) * options.steps // (options.kills + 2):
                processes.replace(victims.pop(0))


def main() -> None:
    options = Options.parse()
    place = placement_from_environment()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts == 0 and (place is None or place.rank == 0):
        options.state.unlink(missing_ok=True)
    if place is None:
        return supervise(options)
    dies = place.rank == 1 + restarts % options.trainers and restarts < options.kills
    work(place.rank, options, options.steps // (2 * (options.kills + 1)) if dies else None)


if __name__ == "__main__":
    main()
