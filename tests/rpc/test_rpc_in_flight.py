"""Calls beyond `max_in_flight_bytes`: threads wait, event loops and handlers do not, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from inside_agents import current_agent

from rpcdist import rpc
from rpcdist.errors import DeadlineExceeded, Overloaded, WorkerLost
from rpcdist.testing import InProcessCluster, eventually

KIB = 1 << 10
LIMIT_S = 30.0
CALLS = 40  # each of 64 KiB, with room for 4 of them


class Gate:
    """Handlers stop here until a test opens it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def go_through(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.opened.wait(LIMIT_S)
        with self._lock:
            self.inside -= 1


gate = Gate()  # replaced for each test; in one process, both workers see it


def through_gate(tensor: torch.Tensor) -> float:
    gate.go_through()
    return float(tensor[0])


def flood(to: str, count: int) -> int:
    """A handler that makes many calls at once, without an end to them in sight before all are made."""
    futures = [rpc.rpc_async(to, first, args=(tensor(number),)) for number in range(count)]
    return int(sum(future.wait() for future in futures))


def first(tensor: torch.Tensor) -> float:
    return float(tensor[0])


def tensor(number: int) -> torch.Tensor:
    return torch.full((16 * KIB,), float(number))


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    global gate
    gate = Gate()
    with InProcessCluster("a", "b", max_in_flight_bytes=260 * KIB) as cluster:
        yield cluster


def waiting(agent: Any) -> bool:
    return [num_waiting for _, num_waiting in agent.caller.in_flight.usage().values()] == [1]


def test_a_thread_waits_and_no_more_than_the_limit_arrives(cluster: InProcessCluster) -> None:
    results: list[float] = []

    def call() -> None:
        with cluster.use("a"):
            futures = [rpc.rpc_async("b", through_gate, args=(tensor(number),)) for number in range(CALLS)]
            results.extend(future.wait() for future in futures)

    thread = threading.Thread(target=call)
    with cluster.use("a"):
        agent = current_agent()
    thread.start()
    eventually(lambda: gate.inside == 4 and waiting(agent), "4 calls run, and the thread waits to make the fifth")
    gate.opened.set()
    thread.join(LIMIT_S)
    assert results == list(range(CALLS)) and gate.most == 4


def test_small_calls_do_not_wait(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        futures = [rpc.rpc_async("b", through_gate, args=(tensor(number),)) for number in range(4)]
        assert rpc.rpc_sync("b", torch.add, (torch.ones(1), 1)) == 2
        gate.opened.set()
        assert [future.wait() for future in futures] == [0, 1, 2, 3]


def test_an_event_loop_does_not_wait_and_the_rest_goes_out_later(cluster: InProcessCluster) -> None:
    async def call() -> list[float]:
        futures = [rpc.rpc_async("b", through_gate, args=(tensor(number),)) for number in range(CALLS)]
        gate.opened.set()
        return list(await asyncio.wait_for(asyncio.gather(*futures), LIMIT_S))

    with cluster.use("a"):
        assert asyncio.run(call()) == list(range(CALLS))
    assert gate.most <= 4


def test_a_call_that_waits_on_a_loop_keeps_its_deadline_and_can_be_cancelled(cluster: InProcessCluster) -> None:
    async def call() -> list[Any]:
        futures = [rpc.rpc_async("b", through_gate, args=(tensor(number),)) for number in range(4)]
        late = rpc.rpc_async("b", first, args=(tensor(7),), timeout=0.05)
        unwanted = rpc.rpc_async("b", first, args=(tensor(8),))
        last = rpc.rpc_async("b", first, args=(tensor(9),))
        unwanted.cancel()
        with pytest.raises(DeadlineExceeded):
            await late
        gate.opened.set()
        return [await future for future in [*futures, last]]

    with cluster.use("a"):
        assert asyncio.run(call()) == [0, 1, 2, 3, 9]
        agent = current_agent()
        eventually(lambda: not agent.caller.in_flight.usage(), "all is free")


def test_who_waits_in_vain_is_told_what_to_do(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        futures = [rpc.rpc_async("b", through_gate, args=(tensor(number),)) for number in range(4)]
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(Overloaded, match=r"rpc to 'b' of .*first was not sent.*max_in_flight_bytes=\.\.\."):
                call("b", first, args=(tensor(1),), timeout=0.01)
        gate.opened.set()
        assert [future.wait() for future in futures] == [0, 1, 2, 3]
        assert rpc.rpc_sync("b", first, args=(tensor(5),)) == 5


def test_two_workers_whose_handlers_flood_each_other_finish(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        there = [rpc.rpc_async("b", flood, args=("a", CALLS)) for _ in range(3)]
    with cluster.use("b"):
        back = [rpc.rpc_async("a", flood, args=("b", CALLS)) for _ in range(3)]
    assert [future.wait() for future in there + back] == [sum(range(CALLS))] * 6


def test_the_room_of_calls_to_a_worker_that_dies_is_free_again(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        futures = [rpc.rpc_async("b", through_gate, args=(tensor(number),)) for number in range(4)]
        agent = current_agent()
        eventually(lambda: gate.inside == 4, "all of them run")
        cluster.kill("b")
        for future in futures:
            with pytest.raises(WorkerLost):
                future.wait()
        eventually(lambda: not agent.caller.in_flight.usage(), "all is free")
        gate.opened.set()
