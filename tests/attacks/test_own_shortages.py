"""A process that has no descriptors left says so itself, and never declares a living worker lost because of it."""

from __future__ import annotations

import pytest
from full_sets import FULL
from own_shortages import (
    NUM_RESERVED,
    calls_in_a_shortage,
    cut_connection,
    free_descriptors,
    hold_reference,
    reserve_descriptors,
    take_descriptors,
    use_reference,
)
from peer_timeouts import LIMIT_S, UNIT_S
from rpc_victim_functions import add
from starts_in_a_shortage import STARTS, start_with_few_descriptors, start_without_threads

from rpcdist import rpc
from rpcdist.testing import RpcWorld, Worker, WorkerPool
from rpcdist.time_limits import ONE_WAY_IN_PEER_TIMEOUTS

pytestmark = pytest.mark.multiproc

SHORTAGE_S = (ONE_WAY_IN_PEER_TIMEOUTS + 1) * UNIT_S  # after so long even a worker that is heard is out of reach
NO_DESCRIPTOR = f"this process has no free file descriptor (ulimit -n is {NUM_RESERVED}): close files, or raise"


def call(to: str) -> int:
    return int(rpc.rpc_sync(to, add, (1, 2), timeout=LIMIT_S))


def test_a_worker_without_descriptors_declares_nobody_lost(worker_pool: WorkerPool) -> None:
    """Its connection breaks meanwhile: one worker has to open it again by gRPC, the other by a Unix socket."""

    def start(name: str) -> Worker:
        worker = worker_pool.start(name, {"RPCDIST_CHANNELS": "grpc"} if name == "by-grpc" else {})
        worker.run(reserve_descriptors)
        return worker

    world = RpcWorld(start, worker_pool.new_url(), 4, {"peer_timeout": UNIT_S})
    joining = [world.begin_join(name, rank) for rank, name in enumerate(("first", "owner", "by-grpc", "local"))]
    for joined in joining:
        joined.result()
    short = [world["by-grpc"], world["local"]]
    for worker in short:
        worker.run(hold_reference, "owner")
        assert world["owner"].run(call, worker.name) == 3  # the owner goes on hearing of it
        worker.run(take_descriptors)
        worker.run(cut_connection, "owner")
    calling = [worker.begin(calls_in_a_shortage, "owner", SHORTAGE_S, UNIT_S / 2) for worker in short]
    for worker, pending in zip(short, calling, strict=True):
        *limited, unlimited = pending.result()
        assert len(limited) > ONE_WAY_IN_PEER_TIMEOUTS and {kind for kind, _ in limited} == {"DeadlineExceeded"}
        assert unlimited[0] == "TransportError"
        for _, text in (*limited, unlimited):
            assert NO_DESCRIPTOR in text and text.isprintable()
        output = worker.output()
        assert output.count(NO_DESCRIPTOR) == 1 and "Invalid encoding" not in output
        worker.run(free_descriptors)
        assert worker.run(use_reference) == 7 and worker.run(call, "owner") == 3
    world.shutdown()


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("name", list(STARTS))
def test_what_starts_without_descriptors_says_so_and_leaves_the_process_alive(
    worker_pool: WorkerPool, name: str
) -> None:
    """uvloop aborted the process, gRPC crashed it, and all else was a bare `OSError`."""
    numbers = [0, 1, 2, 3, 5, 8, 10, 13, 16, 20, 24, 33, 40]
    if name == "launch" and not FULL:
        numbers = numbers[::3]  # it starts and imports the program for each
    starting = worker_pool.start("short").begin(start_with_few_descriptors, name, numbers)
    *few, unlimited = starting.result(3 * LIMIT_S)
    assert unlimited == "started"
    for number, outcome in zip(numbers, few, strict=True):
        named = "free file descriptor" in outcome and "raise the limit" in outcome and not outcome.startswith("bare ")
        assert named or (number > 0 and outcome == "started"), (number, outcome)


@pytest.mark.parametrize("name", ["init_rpc", "TCPStore", "acquire_node", "launch", "LocalCluster", "metrics.serve"])
def test_what_starts_without_threads_says_so(worker_pool: WorkerPool, name: str) -> None:
    short, unlimited = worker_pool.start("short").run(start_without_threads, name)
    assert "this process can start no more threads" in short and not short.startswith("bare ")
    assert unlimited == "started"
