"""$ python examples/elastic_parameter_server.py --kills 4
test accuracy 94.7 % (1000 steps of 2 trainers, 4 kills, 11.8 s), picture: out/elastic_parameter_server.png

The first line is the command, the second its last line of output. Trainers push gradients to a parameter server while
processes are killed at random, and the server once. Each is replaced by a new process under the same name, and the
others go on: the picture has the loss, and who was gone when.

The server (rank 0) writes its parameters to a file every few steps, and its successor begins with them. A trainer that
gets `WorkerLost` waits until the server is there again: workers find the new rank 0 by themselves.

It starts, kills and replaces its processes itself. Under torchrun, which starts all ranks again when one fails,
trainers kill themselves, as often as there are restarts, and the job goes on from the file:

    $ torchrun --nproc-per-node 3 --max-restarts 2 examples/elastic_parameter_server.py --kills 2
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from socket import socket

import torch
from _data import Digits, load_digits, percent_right
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from rpcdist import placement_from_environment, rpc
from rpcdist.errors import WorkerLost

SHAPES = ((128, 64), (128,), (10, 128), (10,))  # of the weights and biases of both layers
SAVED_EVERY = 10  # steps
BATCH_SIZE = 64
LEARNING_RATE = 0.3
STEP_S = 0.02  # of each trainer, at least: with so small a model, all would be over before a new process has started
GAP_S = 1.0
RETURN_LIMIT_S = 300.0


# ---- the model, as a function of one vector of parameters


def initial_parameters(seed: int) -> Tensor:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.utils.parameters_to_vector(layers.parameters()).detach()


def predict(parameters: Tensor, images: Tensor) -> Tensor:
    """The scores (n, 10) of the digits."""
    parts = parameters.split([math.prod(shape) for shape in SHAPES])
    weight, bias, weight_out, bias_out = (part.view(shape) for part, shape in zip(parts, SHAPES, strict=True))
    return linear(linear(images, weight, bias).relu(), weight_out, bias_out)


@torch.no_grad()
def measure_accuracy(parameters: Tensor, digits: Digits) -> float:
    """The percentage of images that the model labels correctly."""
    images, labels = digits
    return percent_right(predict(parameters, images), labels)


@dataclass
class State:
    """What the server keeps, and its successor finds."""

    parameters: Tensor
    losses: list[tuple[float, float]] = field(default_factory=list)  # (time, loss of a batch) of each step
    events: list[tuple[float, str]] = field(default_factory=list)  # (time, who was lost or came back)


# ---- the server: trainers call `fetch` and `push` by name, so any process that is called "server" will do


class Server:
    """One per process. Calls run on several threads."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.is_done = threading.Event()
        if options.state.exists():
            self.state: State = torch.load(options.state, weights_only=False)
            self.state.events.append((self.state.losses[-1][0], "server is lost"))  # nobody saw when it was
            self.note("server is back")
        else:
            self.state = State(initial_parameters(options.seed))

    def note(self, what: str) -> None:
        print(f"step {len(self.state.losses)}: {what}", flush=True)
        self.state.events.append((time.time(), what))

    def on_change(self, change: rpc.MembershipChange) -> None:
        with self.lock:
            if change.kind == "lost" or (change.kind == "joined" and not self.is_done.is_set()):
                self.note(f"{change.worker.name} {'is lost' if change.kind == 'lost' else 'is there'}")

    def push(self, gradient: Tensor, loss: float) -> Tensor | None:
        """Applies a gradient; the new parameters, or None when the training is over."""
        with self.lock:
            if not self.is_done.is_set():
                self.state.parameters.sub_(gradient, alpha=LEARNING_RATE)
                self.state.losses.append((time.time(), loss))
                if len(self.state.losses) % SAVED_EVERY == 0:
                    self.save()
                if len(self.state.losses) >= self.options.steps:
                    self.is_done.set()
            return None if self.is_done.is_set() else self.state.parameters.clone()

    def save(self) -> None:
        """At every moment the file is a whole one, whenever the process dies."""
        written = self.options.state.with_suffix(".new")
        torch.save(self.state, written)
        os.replace(written, self.options.state)


server: Server | None = None  # in the process that is the server


def push(gradient: Tensor, loss: float) -> Tensor | None:
    assert server is not None
    return server.push(gradient, loss)


def fetch() -> Tensor:
    assert server is not None
    with server.lock:
        return server.state.parameters.clone()


def serve(options: argparse.Namespace) -> None:
    global server
    server = Server(options)
    join(0, options)
    rpc.on_membership_change(server.on_change)
    server.is_done.wait()
    rpc.shutdown()  # waits until the trainers have left
    accuracy = measure_accuracy(server.state.parameters, load_digits(options.seed)[1])
    draw(server.state, options)
    options.state.unlink()
    seconds = server.state.losses[-1][0] - server.state.losses[0][0]
    what = f"{options.steps} steps of {options.trainers} trainers, {options.kills} kills, {seconds:.1f} s"
    print(f"test accuracy {accuracy:.1f} % ({what}), picture: {options.picture}", flush=True)


# ---- the trainers


def train(rank: int, options: argparse.Namespace, dies_after: int | None) -> None:
    """Trains until the server says that it is over; the server may be another process by then."""
    images, labels = (part.chunk(options.trainers)[rank - 1] for part in load_digits(options.seed)[0])
    join(rank, options)
    parameters: Tensor | None = None
    steps, is_over = 0, False
    while not is_over:
        try:
            parameters = rpc.rpc_sync("server", fetch) if parameters is None else parameters
            batch = torch.randint(len(labels), (BATCH_SIZE,))
            parameters.requires_grad_()
            loss = cross_entropy(predict(parameters, images[batch]), labels[batch])
            (gradient,) = torch.autograd.grad(loss, parameters)
            parameters = rpc.rpc_sync("server", push, (gradient, loss.item()))
            is_over = parameters is None
        except WorkerLost:  # it is unknown whether the gradient was applied: one more or less does no harm
            parameters = None
            rpc.wait_for_worker("server", timeout=RETURN_LIMIT_S)
        time.sleep(STEP_S)
        steps += 1
        if steps == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
    rpc.shutdown()


# ---- processes


def join(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the processes share the cores already
    url = "env://" if options.port is None else f"tcp://127.0.0.1:{options.port}"
    settings = rpc.RpcOptions(init_method=url, role="trainer" if rank else "server", rpc_timeout=RETURN_LIMIT_S)
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, rpc_backend_options=settings)


def work(rank: int, options: argparse.Namespace, dies_after: int | None = None) -> None:
    if rank == 0:
        serve(options)
    else:
        train(rank, options, dies_after)


def steps_done(options: argparse.Namespace) -> int:
    return len(torch.load(options.state, weights_only=False).losses) if options.state.exists() else 0


def supervise(options: argparse.Namespace) -> None:
    """Starts the processes, kills one now and then, and replaces what has died, until the server has ended."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options.port = probe.getsockname()[1]
    context, chance = get_context("spawn"), random.Random(options.seed)

    def start(rank: int) -> SpawnProcess:
        process = context.Process(target=work, args=(rank, options))
        process.start()
        return process

    victims = [chance.randint(1, options.trainers) for _ in range(options.kills)]
    if victims:
        victims[len(victims) // 2] = 0
    kill_at = [(number + 1) * options.steps // (options.kills + 2) for number in range(options.kills)]
    processes = [start(rank) for rank in range(1 + options.trainers)]
    try:
        while processes[0].exitcode != 0:
            for rank, process in enumerate(processes):
                if process.exitcode not in (None, 0, -signal.SIGKILL):
                    raise SystemExit(f"the process of rank {rank} failed; see above")
                if process.exitcode == -signal.SIGKILL:
                    processes[rank] = start(rank)
            if victims and steps_done(options) >= kill_at[-len(victims)]:
                processes[victims.pop(0)].kill()
            processes[0].join(0.1)
    finally:
        for process in processes:
            process.terminate()  # one that came when all was over
            process.join()


def draw(state: State, options: argparse.Namespace) -> None:
    """Writes the picture: the loss over time, and who was gone when."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    started = state.losses[0][0]
    times = [when - started for when, _ in state.losses]
    losses = [loss for _, loss in state.losses]
    means = [sum(losses[max(0, end - 20) : end]) / min(end, 20) for end in range(1, len(losses) + 1)]
    gaps = [when - before > GAP_S for before, when in pairwise([times[0], *times])]  # nobody trained: no line
    means = [math.nan if is_gap else mean for mean, is_gap in zip(means, gaps, strict=True)]
    axes.plot(times, losses, ".", markersize=2, alpha=0.4, color="C0", label="of each batch")
    axes.plot(times, means, color="C0", label="mean of 20 batches")
    for number, (when, what) in enumerate(state.events):
        if when > started:
            color = "C3" if "lost" in what else "C2"
            axes.axvline(when - started, color=color, linestyle=":", linewidth=1)
            axes.text(
                when - started, axes.get_ylim()[1] * 0.8 ** (number % 4), f" {what}", fontsize="x-small", color=color
            )
    axes.set(title="Training loss while processes are killed", xlabel="seconds", yscale="log")
    axes.legend(loc="lower left", frameon=False)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=2, help="number of trainers; under torchrun all ranks but one")
    parser.add_argument("--steps", type=int, default=1000, help="steps of all trainers together")
    parser.add_argument("--kills", type=int, default=4, help="how often a process is killed; the server is one of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("out/elastic_parameter_server.png"))
    options = parser.parse_args()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.state = options.picture.with_suffix(".state")
    options.port = None
    place = placement_from_environment()
    if place is None:
        options.state.unlink(missing_ok=True)
        supervise(options)
        return
    options.trainers = place.world_size - 1
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if place.rank == 0 and restarts == 0:
        options.state.unlink(missing_ok=True)
    dies = place.rank == 1 + restarts % options.trainers and restarts < options.kills
    work(place.rank, options, options.steps // (2 * (options.kills + 1)) if dies else None)


if __name__ == "__main__":
    main()
