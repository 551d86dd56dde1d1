"""$ python benchmarks/ddp.py
Compares `rpcdist.parallel.DistributedDataParallel` with torch's on Gloo: training steps, and memory.

Two pairs of processes live at the same time, one for each library, with the same models and data. In each round first
one pair takes some steps and then the other, in changing order, so that a machine that slows down slows down both; the
table shows medians over the rounds. A step is forward, backward with the reduction of gradients, and a step of SGD; a
step alone is the same under `no_sync`, so without communication. Every process has one thread for computing: on a
machine of two cores nothing is left for the threads that communicate. Processor time is that of all threads of one
rank in a step; other programs on the machine hardly change it.

Memory is the peak of a fresh process over five steps, less what it had before the model was made.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _pairs import Pair, open_pair
from _report import Line
from _training import Training, begin, compared, finish, make_mlp, make_transformer, run_benchmark, slower

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = ("rpcdist", "torch")
STEP_BUDGET = 0.75
MEMORY_BUDGET = 1.0


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        name: for the table.
        make: the model.
        shape: of one rank's batch.
        options: of DistributedDataParallel.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()


CASES = {
    "mlp": Case("MLP, 10.5 M parameters, 32 rows a rank", make_mlp, (32, 512)),
    "mlp-view": Case("the same, gradient_as_bucket_view", make_mlp, (32, 512), (("gradient_as_bucket_view", True),)),
    "transformer": Case("transformer, 3.2 M parameters, 32 tokens a rank", make_transformer, (1, 32, 256)),
}


# ---- what runs in the processes


class Peer:
    """One rank of one library. Its public methods are the orders."""

    def __init__(self, rank: int, port: int, library: str) -> None:
        self.library = library
        self.rank = rank
        self.port = port

    def start(self) -> None:
        import torch

        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), RANK=str(self.rank), WORLD_SIZE="2")
        if self.library == "torch":
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel

            self.dist: Any = dist
            self.wrapper: Any = DistributedDataParallel
        else:
            from rpcdist import collectives, parallel

            self.dist, self.wrapper = collectives, parallel.DistributedDataParallel
        self.dist.init_process_group("gloo")
        self.dist.barrier()

    def prepare(self, name: str) -> None:
        """Makes the model and warms up."""
        case = CASES[name]
        wrap = functools.partial(self.wrapper, **dict(case.options))
        self.training = Training(case.make, wrap, case.shape, self.rank)

    def steps(self, count: int, sync: bool) -> tuple[float, float]:
        """The median seconds of some steps, and of processor time in them."""
        model: Any = self.training.model
        return self.training.time_steps(count, None if sync else model.no_sync())

    def memory(self, name: str) -> int:
        """Bytes that this process needs for the model and five steps, at the peak."""
        before = _memory("VmRSS")
        self.prepare(name)
        self.training.step()
        return _memory("VmHWM") - before

    def stop(self) -> None:
        self.dist.destroy_process_group()


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# ---- measuring


def measure_steps(name: str, pairs: list[Pair], rounds: int, count: int) -> list[Line]:
    """Alternates between the pairs."""
    for pair in pairs:
        pair.ask_both("prepare", name)
    steps: list[list[float]] = []
    busy: list[list[float]] = []
    alone: list[list[float]] = []
    for number in range(rounds):
        order = pairs if number % 2 == 0 else pairs[::-1]
        for sync in (True, False):
            times = {pair.name: slower(pair.ask_both("steps", count, sync)) for pair in order}
            (steps if sync else alone).append([times[library][0] for library in LIBRARIES])
            if sync:
                busy.append([times[library][1] for library in LIBRARIES])
    return [
        compared(CASES[name].name, "training step", "ms", steps, 1e3, STEP_BUDGET),
        compared(CASES[name].name, "its processor time", "ms", busy, 1e3, None),
        compared(CASES[name].name, "step alone", "ms", alone, 1e3, None),
    ]


def measure_memory(name: str) -> Line:
    """Once: from one run to the next it differs by a hundredth."""
    peaks = []
    for library in LIBRARIES:
        with open_pair(library, Peer, library) as pair:
            peaks.append(float(max(pair.ask_both("memory", name))))
    return compared(CASES[name].name, "peak memory", "MiB", [peaks], 2**-20, MEMORY_BUDGET)


# ---- the command


def compare(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    about = begin(arguments, "- ours is `rpcdist.parallel`, torch is `torch.nn.parallel` on Gloo")
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(open_pair(library, Peer, library)) for library in LIBRARIES]
        for name in arguments.only:
            print(f"measuring the steps of {name} ...", file=sys.stderr, flush=True)
            lines += measure_steps(name, pairs, arguments.rounds, arguments.steps)
    for name in arguments.only:
        print(f"measuring the memory of {name} ...", file=sys.stderr, flush=True)
        lines.append(measure_memory(name))
    return finish("ddp.py", arguments, about, lines)


def main() -> int:
    return run_benchmark(compare, list(CASES), __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
