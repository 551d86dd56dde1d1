"""What happens in a world of many workers on one machine: all join, nobody has connections, all call all others."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

import psutil

from rpcdist import rpc
from rpcdist.rpc._current import current_agent
from rpcdist.testing import WorkerPool

__all__ = ["Scale", "WorkerState", "measure_scale"]


class WorkerState(NamedTuple):
    """One worker's.

    Attributes:
        num_opened: connections to other workers that it has opened.
        num_threads: threads.
        num_descriptors: open files and sockets.
        private_bytes: memory that it shares with no other process.
    """

    num_opened: int
    num_threads: int
    num_descriptors: int
    private_bytes: int


class Scale(NamedTuple):
    """What was measured.

    Attributes:
        start_s: from the start of the first process until the last one has joined.
        first_s, second_s: each worker calls all others at once, and waits; the first time, it has to connect.
        shutdown_s: until all have left.
        joined: the workers when all have joined; the first one is the coordinator, which watches the others.
        called: the workers after the first calls.
    """

    start_s: float
    first_s: float
    second_s: float
    shutdown_s: float
    joined: list[WorkerState]
    called: list[WorkerState]


def measure_scale(pool: WorkerPool, num_workers: int) -> Scale:
    """Starts the workers in `pool`, and has them call each other; raises what fails."""
    names = [f"worker{number}" for number in range(num_workers)]
    first = pool.start("first")  # the process that they are forked from has to import torch
    first.run(os.getpid)
    pool.discard(first)
    began = time.monotonic()
    world = pool.world(*names)
    start_s = time.monotonic() - began
    joined = [world[name].run(state) for name in names]

    def all_to_all() -> float:
        began = time.monotonic()
        running = [world[name].begin(call_all, names) for name in names]
        for name, each in zip(names, running, strict=True):
            if (answers := each.result()) != [(other, name) for other in names if other != name]:
                raise AssertionError(f"{name} got {answers}")
        return time.monotonic() - began

    first_s = all_to_all()
    called = [world[name].run(state) for name in names]
    second_s = all_to_all()
    began = time.monotonic()
    world.shutdown()
    return Scale(start_s, first_s, second_s, time.monotonic() - began, joined, called)


# ---- what the workers run


def call_all(names: list[str]) -> list[tuple[str, str]]:
    """Calls all others at once; who answered, and whom they were called by."""
    me = rpc.get_worker_info().name
    futures = [rpc.rpc_async(name, answer, args=(me,)) for name in names if name != me]
    return [future.wait() for future in futures]


def answer(caller: str) -> tuple[str, str]:
    return rpc.get_worker_info().name, caller


def state() -> WorkerState:
    return WorkerState(
        len(current_agent().router.sessions()),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        psutil.Process().memory_full_info().uss,
    )
