"""The steps of a world of many workers on one machine: all join, nobody has connections, all call all others."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import psutil

from rpcdist import rpc
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._current import current_agent
from rpcdist.testing import InProcessCluster, WorkerPool, in_process_cluster

__all__ = ["AgentScale", "Scale", "WorkerState", "measure_agents", "measure_scale"]


NUM_PARTS = 10
NUM_ROUNDS = 7


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
    """The measurements.

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


class AgentScale(NamedTuple):
    """Processor seconds of agents that live in this process, connected in memory."""

    join_s: float
    barrier_of_a_tenth_s: float
    barrier_s: float
    shutdown_s: float


def measure_agents(num_agents: int, elastic: bool) -> AgentScale:
    """Starts agents, elastic ones one after the other, and has them wait for each other and leave.

    Costs that only agents in one process have do not count, as they grow with the time that other programs have the
    cores: the ticks of all agents, the collector's looks at agents that have joined, and the wakeups of threads that
    wait for the interpreter's lock, of which each has one in a switch interval; so that is long here.

    A round is a barrier of each tenth and one of all, so that both find the memory of their agents in the same state: a
    barrier of the same tenth again and again is faster. Barriers are medians of the rounds.
    """
    names = [f"w{number}" for number in range(num_agents)]
    in_process_cluster.MAX_CALLS = num_agents + 8  # each blocks a thread while it joins

    tick, ticks_s = Agent._tick, [0.0]

    def timed_tick(self: Agent) -> None:
        began = time.thread_time()
        tick(self)
        ticks_s[0] += time.thread_time() - began

    def spent(action: Callable[[], object]) -> float:
        began = time.process_time() - ticks_s[0]
        action()
        return time.process_time() - ticks_s[0] - began

    def start() -> None:
        first = names[:1] if elastic else names
        clusters.append(InProcessCluster(*first, elastic=elastic, init_timeout=500, peer_timeout=120))
        for rank, name in enumerate(names[len(first) :], len(first)):
            gc.freeze()
            clusters[0].join(name, rank)

    def barrier(members: list[str]) -> None:
        everybody = frozenset(members)
        for waiting in [clusters[0].begin(name, rpc.api._barrier, everybody) for name in members]:
            waiting.result()

    clusters: list[InProcessCluster] = []
    tenths = [names[number::NUM_PARTS] for number in range(NUM_PARTS)]
    tenth_s: list[float] = []
    all_s: list[float] = []
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    Agent._tick = timed_tick  # type: ignore[method-assign]
    try:
        join_s = spent(start)
        for some in (*tenths, names):
            barrier(some)  # the first one connects
        gc.collect()
        gc.freeze()
        for _ in range(NUM_ROUNDS):
            tenth_s.append(sum(spent(partial(barrier, some)) for some in tenths) / NUM_PARTS)
            all_s.append(spent(partial(barrier, names)))
        shutdown_s = spent(clusters[0].shutdown)
        clusters[0].close()
    finally:
        Agent._tick = tick  # type: ignore[method-assign]
        sys.setswitchinterval(switch_s)
        gc.unfreeze()
    return AgentScale(join_s, median(tenth_s), median(all_s), shutdown_s)


# ---- what the workers run


def call_all(names: list[str]) -> list[tuple[str, str]]:
    """Calls all others at once; returns the name of each, and the name by which it knows the caller."""
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
