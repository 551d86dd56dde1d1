"""Workers that stay alive from test to test: the test process is rank 0, the others are processes of their own.

`cluster` is what tests ask for. The processes start with the first test that needs them, and end after the last test:
by themselves through a graceful `shutdown`, or else by SIGKILL, which fails the run. A worker also ends when the
pipe on its standard input closes, so none outlives a test process that crashed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from leak_guard import LeakGuard

__all__ = ["Cluster", "cluster", "running_cluster"]

WORLD_SIZE = 4
START_LIMIT_S = 100.0
SHUTDOWN_LIMIT_S = 20.0
CALL_LIMIT_S = 60.0
SETTLE_LIMIT_S = 10.0
GRPC_RANKS = (2,)  # its connections, and no others, run over gRPC although all workers are on one host
NAMES = tuple(f"worker{rank}" for rank in range(WORLD_SIZE))


@dataclass(slots=True)
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        return NAMES[self.rank]


@dataclass(slots=True)
class Cluster:
    """The workers. Call them with `rpcdist.rpc`; this process is `names[0]`.

    Attributes:
        names: of all workers, by rank.
        agent: of this process.
        workers: the other processes.
    """

    agent: Any
    workers: list[Worker] = field(default_factory=list)
    names: tuple[str, ...] = NAMES

    @property
    def me(self) -> str:
        return self.names[0]

    @property
    def others(self) -> tuple[str, ...]:
        return self.names[1:]

    def pids(self) -> dict[str, int]:
        return {worker.name: worker.process.pid for worker in self.workers}

    def threads(self) -> set[threading.Thread]:
        """The agent's threads, which may stay, and may start at any time."""
        pool = self.agent.pool
        found = {worker.thread for worker in list(pool._workers)}
        if pool._monitor is not None:
            found.add(pool._monitor)
        return found

    def outstanding(self) -> list[str]:
        """What is still in flight anywhere."""
        import rpc_functions

        import rpcdist.rpc as rpc

        found = []
        for name in self.names:
            found += [f"{name}: {text}" for text in rpc.rpc_sync(name, rpc_functions.outstanding)]
        return found


def init_options(url: str) -> Any:
    import rpcdist.rpc as rpc

    return rpc.RpcOptions(init_method=url, rpc_timeout=CALL_LIMIT_S)


@pytest.fixture(scope="session")
def running_cluster(
    job_token: str, leak_guard: LeakGuard, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """The processes; `cluster` also checks that a test leaves nothing in flight."""
    import rpcdist.rpc as rpc

    folder = tmp_path_factory.mktemp("cluster")
    url = f"file://{folder}/rendezvous"
    workers: list[Worker] = []
    try:
        for rank in range(1, WORLD_SIZE):
            workers.append(start_worker(rank, url, folder / f"worker{rank}.log"))
            leak_guard.exempt_child(workers[-1].process.pid)
        options = init_options(url)
        options.rpc_timeout = START_LIMIT_S
        rpc.init_rpc(NAMES[0], rank=0, world_size=WORLD_SIZE, rpc_backend_options=options)
        rpc.api._set_rpc_timeout(CALL_LIMIT_S)
        cluster = Cluster(rpc.api._get_current_rpc_agent(), workers)
        leak_guard.exempt_threads(cluster.threads)
        yield cluster
        tell_to_end(workers)
        rpc.shutdown(timeout=SHUTDOWN_LIMIT_S)
    finally:
        problems = end_workers(workers)
        if rpc.api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
    if problems:
        pytest.fail("the cluster did not end well:\n" + "\n".join(problems), pytrace=False)


@pytest.fixture
def cluster(running_cluster: Cluster, nothing_is_left_behind: None) -> Iterator[Cluster]:
    """Four workers, this process included; fails a test that leaves calls or streams in flight."""
    for worker in running_cluster.workers:
        status = worker.process.poll()
        if status is not None:
            pytest.fail(f"{worker.name} ended with status {status}:\n{tail(worker)}", pytrace=False)
    yield running_cluster
    limit = time.monotonic() + SETTLE_LIMIT_S
    while (left := running_cluster.outstanding()) and time.monotonic() < limit:
        time.sleep(0.02)  # a cancelled handler ends soon, and nothing here hears of it
    if left:
        pytest.fail("left in flight by the test:\n" + "\n".join(left), pytrace=False)


def start_worker(rank: int, url: str, log: Path) -> Worker:
    environment = {**os.environ, "RPCDIST_CHANNELS": "grpc"} if rank in GRPC_RANKS else None
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(rank), url],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment,
        )
    return Worker(rank, process, log)


def tell_to_end(workers: list[Worker]) -> None:
    for worker in workers:
        assert worker.process.stdin is not None
        worker.process.stdin.close()


def end_workers(workers: list[Worker]) -> list[str]:
    """Waits for the processes, kills what is left, and says what went wrong."""
    tell_to_end(workers)
    problems = []
    limit = time.monotonic() + SHUTDOWN_LIMIT_S
    for worker in workers:
        try:
            status = worker.process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.kill(worker.process.pid, signal.SIGUSR1)  # the stacks of its threads go to its log, at once
            time.sleep(0.5)
            worker.process.kill()
            worker.process.wait()
            problems.append(f"{worker.name} had to be killed:\n{tail(worker)}")
        else:
            if status or unexpected(worker):
                problems.append(f"{worker.name} ended with status {status} and wrote:\n{tail(worker)}")
    return problems


def unexpected(worker: Worker) -> list[str]:
    """What a worker logged that is worse than a warning: handlers that fail are worth one, and tests have many."""
    text = worker.log.read_text(errors="replace")
    records = re.split(r"^(?=(?:WARNING|ERROR|CRITICAL):)", text, flags=re.MULTILINE)
    return [record for record in records if record.strip() and not record.startswith("WARNING:")]


def tail(worker: Worker) -> str:
    return worker.log.read_text(errors="replace")[-8000:].strip()


# ---------------------------------------------------------------- in the worker's process


def serve(rank: int, url: str) -> None:
    """A worker's life: until its standard input ends."""
    import rpc_functions  # noqa: F401  # before the first call needs it

    import rpcdist.rpc as rpc

    options = init_options(url)
    options.rpc_timeout = START_LIMIT_S
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    rpc.api._set_rpc_timeout(CALL_LIMIT_S)
    standard_input: IO[bytes] = sys.stdin.buffer
    standard_input.read()
    rpc.shutdown(timeout=SHUTDOWN_LIMIT_S)


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING)
    serve(int(sys.argv[1]), sys.argv[2])
