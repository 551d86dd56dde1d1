"""Four RPC workers that stay alive from test to test: the test process is rank 0, the others are
processes of their own.

`cluster` is what tests ask for. The workers start with the first test that needs them and leave after the last one
through a graceful `shutdown`; an error in what they logged fails the run.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from inside_agents import current_agent
from leak_guard import LeakGuard

import rpcdist.rpc as rpc
from rpcdist.rpc import _current
from rpcdist.testing import Worker, WorkerPool, eventually
from rpcdist.testing.worker_pool import leave
from rpcdist.transport import node as node_module

__all__ = ["Cluster", "cluster", "no_agent", "running_cluster"]

WORLD_SIZE = 4
START_LIMIT_S = 100.0
SHUTDOWN_LIMIT_S = 20.0
CALL_LIMIT_S = 60.0
SETTLE_LIMIT_S = 10.0
CHANNELS = {2: "grpc", 3: "tcp"}  # of the connections that these ranks take part in; all workers are on one host
NAMES = tuple(f"worker{rank}" for rank in range(WORLD_SIZE))


@dataclass(slots=True)
class Cluster:
    """The workers. Call them with `rpcdist.rpc`; this process is `names[0]`.

    Attributes:
        agent: of this process.
        workers: the other processes.
        names: of all workers, by rank.
    """

    agent: Any
    workers: list[Worker]
    names: tuple[str, ...] = NAMES

    @property
    def me(self) -> str:
        return self.names[0]

    @property
    def others(self) -> tuple[str, ...]:
        return self.names[1:]

    def pids(self) -> dict[str, int]:
        return {worker.name: worker.pid for worker in self.workers}

    def threads(self) -> set[threading.Thread]:
        """The agent's threads, which may stay, and may start at any time."""
        pool = self.agent.pool
        payloads = [thread for thread in threading.enumerate() if thread.name.startswith("rpcdist payload ")]
        started = (worker.thread for worker in list(pool._workers))
        return {pool._monitor._thread, self.agent.user_loop._thread, *started, *payloads}

    def outstanding(self) -> list[str]:
        """The calls and streams that are still in flight anywhere."""
        import rpc_functions

        found = []
        for name in self.names:
            found += [f"{name}: {text}" for text in rpc.rpc_sync(name, rpc_functions.outstanding)]
        return found


@pytest.fixture(scope="session")
def running_cluster(fork_server: None, leak_guard: LeakGuard) -> Iterator[Cluster]:
    """The workers; `cluster` also checks that a test leaves nothing in flight."""
    with WorkerPool() as pool:
        url = pool.new_url()
        workers = [pool.start(NAMES[rank], channels(rank)) for rank in range(1, WORLD_SIZE)]
        joining = [worker.begin(join_in_worker, rank, url) for rank, worker in enumerate(workers, 1)]
        try:
            join(0, url)
            for pending in joining:
                pending.result(START_LIMIT_S)
            cluster = Cluster(current_agent(), workers)
            leak_guard.exempt_threads(cluster.threads)
            yield cluster
            shut_down(workers)
        finally:
            if rpc.api._is_current_rpc_agent_set():
                rpc.shutdown(graceful=False)
        problems = [f"{worker.name} wrote:\n{worker.output()}" for worker in workers if errors(worker)]
    if problems:
        pytest.fail("the cluster did not end well:\n" + "\n".join(problems), pytrace=False)


@pytest.fixture
def cluster(running_cluster: Cluster, nothing_is_left_behind: None) -> Iterator[Cluster]:
    """Four workers, this process included; fails a test that leaves calls or streams in flight."""
    for worker in running_cluster.workers:
        if not worker.alive:
            pytest.fail(f"{worker.name} ended with status {worker.wait()}:\n{worker.output()}", pytrace=False)
    yield running_cluster
    eventually(lambda: not running_cluster.outstanding(), "nothing is in flight any more", SETTLE_LIMIT_S)


@pytest.fixture
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: the workers of other tests may have an agent in this one, and a node that has its name."""
    monkeypatch.setattr(_current._of_process, "agent", None)
    monkeypatch.setattr(node_module, "_shared", None)


def channels(rank: int) -> dict[str, str | None]:
    return {"RPCDIST_CHANNELS": CHANNELS[rank]} if rank in CHANNELS else {}


def join_in_worker(rank: int, url: str) -> None:
    logging.basicConfig(level=logging.WARNING)  # `errors` goes by the level in front of each record
    join(rank, url)


def join(rank: int, url: str) -> None:
    import rpc_functions  # noqa: F401  # before the first call needs it

    options = rpc.RpcOptions(init_method=url, rpc_timeout=START_LIMIT_S)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    rpc.api._set_rpc_timeout(CALL_LIMIT_S)


def shut_down(workers: list[Worker]) -> None:
    """A graceful end of all workers, this process included."""
    leaving = [worker.begin(leave, timeout=SHUTDOWN_LIMIT_S) for worker in workers]
    rpc.shutdown(timeout=SHUTDOWN_LIMIT_S)
    for pending in leaving:
        pending.result()


def errors(worker: Worker) -> list[str]:
    """The log records of a worker above a warning: handlers that fail are worth one, and tests have many."""
    records = re.split(r"^(?=(?:WARNING|ERROR|CRITICAL):)", worker.output(), flags=re.MULTILINE)
    return [record for record in records if record.strip() and not record.startswith("WARNING:")]
