"""Set-up of the default group of many ranks on one machine: our `tcp` and torch's Gloo, in turns."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from rpcdist.testing import WorkerPool

__all__ = ["OURS", "TORCH", "Setup", "measure_groups", "typical"]

OURS, TORCH = "rpcdist.collectives", "torch.distributed"
BACKENDS = {OURS: "tcp", TORCH: "gloo"}
LIMIT_S = 120


class Setup(NamedTuple):
    """Times of one round, of all ranks together where they are processor times.

    Attributes:
        setup_cpu_s: processor time of `init_process_group`.
        setup_s: from the first call of it until it has returned everywhere.
        used_cpu_s: processor time of `init_process_group`, a first `all_reduce` and a barrier.
        used_s: the longest of a rank for all three.
    """

    setup_cpu_s: float
    setup_s: float
    used_cpu_s: float
    used_s: float


def measure_groups(num_ranks: int, rounds: int) -> dict[str, list[Setup]]:
    """Makes the default group on the same processes again and again, with both libraries in each round.

    A round before them is not measured, so modules are imported. Each group has a file of its own as its store.
    """
    found: dict[str, list[Setup]] = {OURS: [], TORCH: []}
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:
        first = pool.start("first")  # the process that they are forked from imports what it imports
        first.run(prepare)
        pool.discard(first)
        workers = [pool.start(f"rank {rank}") for rank in range(num_ranks)]

        def on_all(function: Callable[..., object], *arguments: object) -> list[object]:
            running = [worker.begin(function, rank, *arguments) for rank, worker in enumerate(workers)]
            return [each.result(LIMIT_S) for each in running]

        on_all(prepare)
        for number in range(rounds + 1):
            for library in list(found)[:: 1 if number % 2 else -1]:
                times = on_all(make, library, num_ranks, f"file://{folder}/{BACKENDS[library]}{number}")
                on_all(destroy, library)
                if number:
                    cpu_s, elapsed_s, used_cpu_s, used_s = zip(*times, strict=True)
                    found[library].append(Setup(sum(cpu_s), max(elapsed_s), sum(used_cpu_s), max(used_s)))
    return found


def typical(rounds: list[Setup]) -> Setup:
    """The medians over the rounds."""
    return Setup(*map(median, zip(*rounds, strict=True)))


# ---- what the ranks run


def prepare(rank: int = 0) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for library in BACKENDS:
        importlib.import_module(library)
    importlib.import_module("rpcdist.collectives.tcp")
    warnings.filterwarnings("ignore", message="You are using a Backend")


def make(rank: int, library: str, num_ranks: int, url: str) -> tuple[float, float, float, float]:
    """Processor time and time of making the group, and both with the first operations."""
    import torch

    module = importlib.import_module(library)
    tensor = torch.ones(4)
    began_cpu_s, began_s = time.process_time(), time.monotonic()
    module.init_process_group(BACKENDS[library], init_method=url, rank=rank, world_size=num_ranks)
    cpu_s, elapsed_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
    module.all_reduce(tensor)
    module.barrier()
    used = time.process_time() - began_cpu_s, time.monotonic() - began_s
    assert tensor[0] == num_ranks
    return cpu_s, elapsed_s, *used


def destroy(rank: int, library: str) -> None:
    module = importlib.import_module(library)
    module.destroy_process_group()
    if library == OURS:
        module.close_stores()  # otherwise the next set-up closes it
