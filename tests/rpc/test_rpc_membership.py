"""The members of a job: its start, refused and later workers, departures and replacements."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import rpc_victim_functions as functions
import rpc_victim_references as references
import torch
from inside_agents import Agent
from peer_timeouts import CALM_S, LIMIT_S, PROMPT_S, UNIT_S

from rpcdist import autograd, rpc
from rpcdist.errors import (
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    DistNetworkError,
    DuplicateName,
    RendezvousError,
    RpcdistError,
    UnknownWorker,
    WorldMismatch,
)
from rpcdist.rpc._membership import roster_service
from rpcdist.rpc._peers.connections import PROBE_ROLE
from rpcdist.testing import InProcessCluster, WorkerPool, eventually, free_port
from rpcdist.testing.worker_pool import join

pytestmark = pytest.mark.multiproc


# ---------------------------------------------------------------- who does not fit

Worker = tuple[str, int, int | None]  # name, rank, world size
MISFITS: dict[str, tuple[list[Worker], type[RpcdistError], list[str]]] = {
    "duplicate name": (
        [("a", 0, 2), ("a", 1, 2)],
        DuplicateName,
        ["RPC worker name a is not unique", "rank 0", "rank 1", "give every worker its own name", "MASTER_PORT"],
    ),
    "duplicate rank": (
        [("a", 0, 3), ("b", 1, 3), ("c", 1, 3)],
        DuplicateName,
        ["rank 1 is not unique", "'b'", "'c'", "RANK", "two jobs"],
    ),
    "other world size": (
        [("a", 0, 2), ("b", 1, 3)],
        WorldMismatch,
        ["world sizes differ", "world_size=3", "world_size=2", "WORLD_SIZE"],
    ),
    "static and dynamic": (
        [("a", 0, 2), ("b", 1, None)],
        WorldMismatch,
        ["mixes statically and dynamically initialized members", "'a'", "'b'"],
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_workers_that_do_not_fit_together_are_all_told_why(worker_pool: WorkerPool, case: str) -> None:
    workers, kind, says = MISFITS[case]
    url = worker_pool.new_url()
    processes = [worker_pool.start(name) for name, _, _ in workers]
    joining = [process.begin(join, *worker, url) for process, worker in zip(processes, workers, strict=True)]
    for pending in joining:
        error = pending.error(RpcdistError)
        assert isinstance(error, kind)
        assert all(text in str(error) for text in says), str(error)
    # Nothing is left of it: the same processes form a world that fits.
    url = worker_pool.new_url()
    joining = [process.begin(join, f"w{rank}", rank, len(processes), url) for rank, process in enumerate(processes)]
    for pending in joining:
        pending.result()
    assert processes[1].run(rpc.rpc_sync, "w0", functions.pid) == processes[0].pid


BAD_ARGUMENTS: list[tuple[Worker, type[Exception], str]] = [
    (("a", 0, 0), ConfigError, "the world size must be at least 1, but is 0"),
    (("a", 2, 2), ConfigError, "rank 2 is not from 0 to 1, though the world size is 2"),
    (("a", -1, 2), ConfigError, "rank"),
    (("", 0, 1), ConfigError, "Worker name must be non-empty"),
    (("a b", 0, 1), ConfigError, "Worker name must match"),
    (("a" * 128, 0, 1), ConfigError, "shorter than 128"),
]


def test_bad_arguments_are_refused_at_once(worker_pool: WorkerPool) -> None:
    process = worker_pool.start("a")
    for worker, kind, says in BAD_ARGUMENTS:
        error = process.begin(join, *worker, worker_pool.new_url()).error(kind, limit_s=10.0)
        assert says in str(error)
    process.run(join, "a", 0, 1, worker_pool.new_url())  # and nothing is left of it


def test_who_does_not_come_is_named(worker_pool: WorkerPool) -> None:
    url = worker_pool.new_url()
    processes = {rank: worker_pool.start(f"w{rank}") for rank in (0, 2)}
    started = time.monotonic()
    # Rank 2, which would wait longer, hears it when rank 0 ends; it lost its connection, and could not name them.
    joining = [
        process.begin(join, process.name, rank, 4, url, init_timeout=limit_s)
        for (rank, process), limit_s in zip(processes.items(), (1.5, LIMIT_S), strict=True)
    ]
    for pending in joining:
        error = pending.error(RendezvousError)
        assert "these ranks have not joined: 1, 3" in str(error) and "MASTER_ADDR" in str(error)
    assert "rank 0, through which all join, gave up" in str(error)
    assert time.monotonic() - started < LIMIT_S / 2


@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_a_coordinator_that_is_not_there_is_named_after_the_timeout(worker_pool: WorkerPool, scheme: str) -> None:
    port = free_port()
    url = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else "env://"
    environment: dict[str, str | None] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = worker_pool.start("b", environment)
    started = time.monotonic()
    error = process.begin(join, "b", 1, 2, url, init_timeout=1.0).error(RpcdistError)
    assert 0.9 < time.monotonic() - started < LIMIT_S / 2
    assert isinstance(error, ConnectFailed | RendezvousError) and f"127.0.0.1:{port}" in str(error)


def test_a_coordinator_that_never_publishes_itself(worker_pool: WorkerPool) -> None:
    error = worker_pool.start("b").begin(join, "b", 1, 2, worker_pool.new_url(), init_timeout=1.0).error(RpcdistError)
    assert "the coordinator (rank 0) did not join within 1.0 s" in str(error)


def test_a_coordinator_that_is_lost_is_named_and_may_come_again(worker_pool: WorkerPool) -> None:
    """Workers that join then wait for the next rank 0, within their limit."""
    url = worker_pool.new_url()
    first, late = worker_pool.start("a"), worker_pool.start("b")
    first.run(join, "a", 0, None, url)
    first.kill()
    error = late.begin(join, "b", 1, None, url, init_timeout=1.0).error(ConnectFailed)
    assert "rank 0 has ended, or cannot be reached" in str(error) and "'b' joins through" in str(error), error
    second = worker_pool.start("c")
    waiting = worker_pool.start("d").begin(join, "d", 2, None, url)
    second.run(join, "c", 0, None, url)
    waiting.result()


def all_call_each_other(processes: Iterable[Any]) -> None:
    processes = list(processes)
    for process in processes:
        for other in processes:
            assert process.run(rpc.rpc_sync, other.name, functions.pid) == other.pid


def test_another_worker_coordinates_after_rank_0_has_left(worker_pool: WorkerPool) -> None:
    """It is the first one that comes. Others join through it, a new rank 0, too, and it leaves after them."""
    url = worker_pool.new_url()
    old = worker_pool.start("old")
    old.run(join, "old", 0, None, url)
    assert old.run(rpc.shutdown) == {}
    for ranks in ((2, 0, 1), (1, 2)):  # the second time after rank 2, the coordinator of the first time, has left
        processes = {rank: worker_pool.start(f"w{rank}") for rank in ranks}
        for rank, process in processes.items():
            process.run(join, process.name, rank, None, url)
        all_call_each_other(processes.values())
        first, *others = processes.values()
        leaving = first.begin(rpc.shutdown)
        late = worker_pool.start("late")
        late.run(join, "late", 7, None, url)  # the coordinator waits for this one, too
        all_call_each_other([late, *others])
        for process in (*others, late):
            assert process.run(rpc.shutdown) == {}
        assert leaving.result() == {}
        for process in (*processes.values(), late):
            process.stop()


def test_one_of_many_coordinates_after_rank_0_has_left(worker_pool: WorkerPool) -> None:
    """Workers that come at the same time find the same one."""
    url = worker_pool.new_url()
    old = worker_pool.start("old")
    old.run(join, "old", 0, None, url)
    assert old.run(rpc.shutdown) == {}
    processes = [worker_pool.start(f"w{rank}") for rank in range(4)]
    joining = [process.begin(join, process.name, rank, None, url) for rank, process in enumerate(processes)]
    for pending in joining:
        pending.result()
    all_call_each_other(processes)
    leaving = [process.begin(rpc.shutdown) for process in processes]
    assert [pending.result() for pending in leaving] == [{}] * 4


def test_a_coordinator_of_another_rank_is_replaced(worker_pool: WorkerPool) -> None:
    """Its successor has its name and rank; the others go on, and go back to it."""
    url = worker_pool.new_url()
    old = worker_pool.start("old")
    old.run(join, "old", 0, None, url)
    assert old.run(rpc.shutdown) == {}
    first, second = worker_pool.start("w2"), worker_pool.start("w1")
    first.run(join, "w2", 2, None, url, peer_timeout=UNIT_S)
    second.run(join, "w1", 1, None, url, peer_timeout=UNIT_S)
    first.kill()
    eventually(lambda: second.run(functions.names_that_live) == ["w1"])
    successor = worker_pool.start("w2")
    successor.run(join, "w2", 2, None, url, peer_timeout=UNIT_S)
    eventually(lambda: second.run(functions.names_that_live) == ["w1", "w2"])
    third = worker_pool.start("w0")
    third.run(join, "w0", 0, None, url, peer_timeout=UNIT_S)
    all_call_each_other([successor, second, third])


def test_a_port_in_use_is_named(worker_pool: WorkerPool) -> None:
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = worker_pool.start("a")
        error = process.begin(join, "a", 0, 1, f"tcp://127.0.0.1:{port}").error(DistNetworkError)
        assert str(port) in str(error) and "in use" in str(error)
        error = process.begin(join, "a", 0, 1, worker_pool.new_url(), port=port).error(RpcdistError)
        assert str(port) in str(error) and "in use" in str(error) and "RpcOptions(port=...)" in str(error)
    process.run(join, "a", 0, 1, worker_pool.new_url(), port=port)
    assert process.run(functions.address) == f"127.0.0.1:{port}"


# ---------------------------------------------------------------- how a job starts


@pytest.mark.parametrize("scheme", ["tcp", "env", "file"])
def test_every_init_method(worker_pool: WorkerPool, tmp_path: Path, scheme: str) -> None:
    port = free_port()
    url = {"tcp": f"tcp://127.0.0.1:{port}", "env": "env://", "file": f"file://{tmp_path}/store"}[scheme]
    environment: dict[str, str | None] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [worker_pool.start(f"w{rank}", environment) for rank in range(3)]
    joining = [process.begin(join, process.name, rank, 3, url) for rank, process in enumerate(processes)]
    for pending in joining:
        pending.result()
    for process in processes:
        assert [process.run(rpc.rpc_sync, rank, functions.pid) for rank in range(3)] == [p.pid for p in processes]
    leaving = [process.begin(rpc.shutdown) for process in processes]
    assert [pending.result() for pending in leaving] == [{}] * 3
    assert not (tmp_path / "store").exists()


# ---------------------------------------------------------------- who comes and goes


def test_workers_come_later_and_leave(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", world_size=None, peer_timeout=CALM_S)
    kind, text, _ = world["a"].run(functions.error_of, rpc.rpc_sync, "c", functions.pid)
    assert kind == "UnknownWorker" and "could not find destination c" in text and "a, b" in text
    world.join("c", 2)
    assert world["a"].run(rpc.rpc_sync, "c", functions.pid) == world["c"].pid  # requested again
    assert world["c"].run(rpc.rpc_sync, "b", functions.pid) == world["b"].pid
    assert world["b"].run(rpc.rpc_sync, 2, functions.pid) == world["c"].pid  # it has heard of it
    assert world["b"].run(rpc.rpc_sync, "a", functions.call_from_a_coroutine, ("c",)) == world["c"].pid
    for name in ("a", "c"):
        world[name].run(references.hold_remote, "b", 2)
    world["c"].run(references.fork_held_to, "a")
    for name in ("a", "c"):
        world[name].run(functions.drop)
    for name in ("a", "b", "c"):
        assert world[name].run(functions.wait_until_empty) == ""
    world.shutdown("c")
    assert world["a"].run(functions.names_in_the_job) == ["a", "b"]
    started = time.monotonic()
    kind, text, _ = world["a"].run(functions.error_of, rpc.rpc_sync, "c", functions.pid)
    assert kind in ("WorkerLost", "UnknownWorker") and "c" in text and time.monotonic() - started < PROMPT_S
    world.join("d", 3)
    world.join("c", 2)  # the name is free again
    assert world["b"].run(functions.call_until_it_works, "c") == world["c"].pid
    assert world["d"].run(rpc.rpc_sync, "c", functions.pid) == world["c"].pid
    assert world["b"].run(functions.names_in_the_job) == ["a", "b", "c", "d"]
    world.shutdown()


def test_a_name_is_taken_as_long_as_its_worker_lives(worker_pool: WorkerPool) -> None:
    for size in (None, 2):
        world = worker_pool.world("a", "b", world_size=size, peer_timeout=CALM_S)
        old = world["b"]
        error = world.begin_join("b", 1).error(RpcdistError)
        assert isinstance(error, DuplicateName) and "name b is not unique" in str(error)
        assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == old.pid


@pytest.mark.parametrize("size", [None, 3])
def test_a_dead_worker_is_replaced_while_the_others_go_on(worker_pool: WorkerPool, size: int | None) -> None:
    world = worker_pool.world("a", "b", "c", world_size=size, peer_timeout=CALM_S)
    gathered = [worker.begin(rpc.api._all_gather, worker.name) for worker in world]  # the newcomers know nothing of it
    assert [pending.result() for pending in gathered] == [{"a": "a", "b": "b", "c": "c"}] * 3
    busy = world["c"].begin(functions.call_all_the_time, "a", 3.0)
    for _ in range(3):
        old = world["b"]
        old.kill()
        new = world.join("b", 1)
        assert new.pid != old.pid
        assert world["a"].run(functions.call_until_it_works, "b") == new.pid
        assert world["a"].run(rpc.rpc_sync, rpc.WorkerInfo("b", 1), functions.pid) == new.pid
        assert world["b"].run(rpc.rpc_sync, "c", functions.pid) == world["c"].pid
    assert busy.result() > 10  # calls, none of which failed
    gathered = [worker.begin(rpc.api._all_gather, worker.name) for worker in world]
    assert [pending.result() for pending in gathered] == [{"a": "a", "b": "b", "c": "c"}] * 3
    assert world["c"].run(functions.call_until_it_works, "b") == world["b"].pid
    world.shutdown()


def test_a_worker_that_was_replaced_while_it_hung_is_out(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "c", peer_timeout=UNIT_S)
    old = world["b"]
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == old.pid
    assert old.run(rpc.rpc_sync, "a", functions.pid) == world["a"].pid
    old.stop()
    new = world.join("b", 1)
    for name in ("a", "c"):
        assert world[name].run(functions.call_until_it_works, "b") == new.pid
    old.resume()
    says = "another process took its place; this process is no longer in the job"
    assert old.run(functions.error_saying, says, rpc.rpc_sync, "a", functions.pid) == "WorkerLost"
    for name in ("a", "c"):
        assert world[name].run(rpc.rpc_sync, "b", functions.pid) == new.pid
    old.run(rpc.shutdown, graceful=False)
    world.shutdown()


def test_unknown_workers(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    for to in ("nobody", 7, rpc.WorkerInfo("nobody", 7)):
        error = world["a"].begin(rpc.rpc_sync, to, functions.pid).error(UnknownWorker)
        assert "name:a,rank:0 could not find destination" in str(error) and "a, b" in str(error)
        assert world["a"].run(functions.call_unknown_from_a_coroutine, to) == "UnknownWorker"
    for wrong in (None, 1.5, True):
        error = world["a"].begin(rpc.rpc_sync, wrong, functions.pid).error(ConfigError)
        assert "WorkerInfo" in str(error)
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == world["b"].pid


def test_the_coordinator_of_a_growing_world_knows_those_who_came_while_it_was_built(
    no_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learned of them a turn of its I/O loop later, and its first call from an event loop found nobody."""
    start = Agent.start_serving

    def start_when_others_have_joined(agent: Agent) -> None:
        service = agent._news._service
        if service is not None:
            eventually(lambda: len(service.table) == 3, "the others have joined")
            handle = agent.network.handle_role

            def handle_and_stall(role: str, *arguments: Any) -> None:
                handle(role, *arguments)
                if role == PROBE_ROLE:
                    agent.network.io.call_soon(time.sleep, 0.3)  # the loop has other things to do

            monkeypatch.setattr(agent.network, "handle_role", handle_and_stall)
        start(agent)

    monkeypatch.setattr(Agent, "start_serving", start_when_others_have_joined)
    with InProcessCluster("a", "b", "c", elastic=True) as cluster, cluster.use("a") as agent:
        assert [member.identity.name for member in agent.directory.known()] == ["a", "b", "c"]


def test_a_barrier_begins_with_workers_of_whom_its_host_has_not_heard_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large worlds, which send news late and let nobody wait for it."""
    monkeypatch.setattr(roster_service, "NEWS_AT_ONCE", 0)
    with InProcessCluster("z", "a", "c", elastic=True) as cluster:
        cluster.run("c", rpc.rpc_sync, "a", str)
        cluster.network.delay("z", "a", 0.5)
        cluster.join("b", 3)
        cluster.run("c", rpc.rpc_sync, "b", str)
        barriers = [cluster.begin(name, rpc.api._barrier, {"a", "b", "c"}) for name in ("c", "a", "b")]
        for barrier in barriers:
            barrier.result()


def test_a_worker_that_leaves_a_large_world_is_not_lost_before_the_news() -> None:
    """Workers that are connected to it see the end of their connections long before rank 0 sends the news."""
    with InProcessCluster("a", "b", "c", elastic=True, peer_timeout=UNIT_S) as cluster:
        assert cluster.run("b", rpc.rpc_sync, "c", str) == ""
        changes: list[tuple[str, str]] = []
        with cluster.use("b") as agent:
            agent.events.member.listen(lambda event: changes.append((event.kind, event.member.identity.name)))
            broken = threading.Event()
            agent.events.lost.listen(lambda identity, error: broken.set())
            cluster.network.delay("a", "b", 10 * UNIT_S)
            cluster.shutdown("c")
            assert broken.wait(LIMIT_S)
            cluster.network.delay("a", "b", 0)
            assert changes == [("left", "c")]
            assert agent.directory.losses() == {}


def test_a_worker_that_is_leaving_reports_no_losses(caplog: pytest.LogCaptureFixture) -> None:
    """The others may be gone before rank 0 answers it, which takes long in a large world."""
    with InProcessCluster("a", "b", "c", elastic=True, peer_timeout=UNIT_S) as cluster:
        assert cluster.run("b", rpc.rpc_sync, "c", str) == ""
        broken = threading.Event()
        lost: list[str] = []
        with cluster.use("b") as agent:
            agent.events.broken.listen(lambda session, reason: broken.set())
            agent.events.lost.listen(lambda identity, error: lost.append(identity.name))
        cluster.network.delay("a", "b", UNIT_S / 3)
        leaving = threading.Thread(target=cluster.shutdown, args=("b",))
        leaving.start()
        eventually(lambda: agent.is_closed)
        cluster.shutdown("c")
        assert broken.wait(LIMIT_S)
        leaving.join(LIMIT_S)
        assert lost == [] and not leaving.is_alive()
        assert "is lost" not in caplog.text


# ---------------------------------------------------------------- newcomers of whom this worker has not heard yet


class Ledger:
    """On the newcomer."""

    def __init__(self) -> None:
        self.notes: list[int] = []

    def add(self, note: int) -> list[int]:
        self.notes.append(note)
        return self.notes


def ledger_on(worker: str, is_serial: bool = False) -> rpc.RRef[Ledger]:
    return rpc.remote(worker, Ledger, serial=is_serial)


def count_to(number: int) -> Iterator[int]:
    yield from range(number)


@rpc.idempotent
def repeatable(number: int) -> int:
    return number


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessCluster]:
    """A large world in which "a" has not heard of "new" yet, but "b" has; the news does not come within the test."""
    monkeypatch.setattr(roster_service, "NEWS_AT_ONCE", 0)
    monkeypatch.setattr("rpcdist.rpc._membership.roster_news.NEWS_AT_ONCE", 0)
    monkeypatch.setattr("rpcdist.rpc._membership.roster_news.NEWS_PAUSE_S", 1000 * LIMIT_S)
    with InProcessCluster("z", "a", "b", elastic=True) as cluster:
        cluster.run("a", rpc.rpc_sync, "b", str)
        cluster.join("new", 9)
        assert cluster.run("b", rpc.rpc_sync, "new", str) == ""
        with cluster.use("a"):
            assert [worker.name for worker in rpc.workers()] == ["z", "a", "b"]
            yield cluster


async def awaited(call: Any) -> Any:
    return await call


CALLS_ON_A_LOOP: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
    "by name": lambda: awaited(rpc.rpc_async("new", divmod, (7, 4))),
    "by rank": lambda: awaited(rpc.rpc_async(9, divmod, (7, 4))),
    "by info": lambda: awaited(rpc.rpc_async(rpc.WorkerInfo("new", 9), divmod, (7, 4))),
    "call": lambda: awaited(rpc.call_async("new", divmod, 7, 4)),
}


@pytest.mark.parametrize("way", CALLS_ON_A_LOOP)
def test_a_call_on_a_loop_finds_a_newcomer(newcomer: InProcessCluster, way: str) -> None:
    assert asyncio.run(CALLS_ON_A_LOOP[way]()) == (1, 3)


def test_other_calls_on_a_loop_find_a_newcomer(newcomer: InProcessCluster) -> None:
    async def run() -> Any:
        return [item async for item in rpc.rpc_stream("new", count_to, (3,))]

    assert asyncio.run(run()) == [0, 1, 2]


def test_calls_of_several_workers_find_a_newcomer(newcomer: InProcessCluster) -> None:
    assert asyncio.run(rpc.call_each_async(iter(["b", "new"]), divmod, 7, 4)) == [(1, 3), (1, 3)]


def test_an_idempotent_call_on_a_loop_finds_a_newcomer(newcomer: InProcessCluster) -> None:
    async def run() -> int:
        return await rpc.rpc_async("new", repeatable, (3,))

    assert asyncio.run(run()) == 3


def test_many_calls_of_one_loop_reach_a_newcomer(newcomer: InProcessCluster) -> None:
    async def run() -> list[int]:
        futures = [rpc.rpc_async("new", pow, (number, 2)) for number in range(50)]
        await futures[0]
        futures += [rpc.rpc_async("new", pow, (number, 2)) for number in range(50, 100)]
        results: list[int] = await asyncio.gather(*futures)
        return results

    assert asyncio.run(run()) == [number**2 for number in range(100)]


def test_an_actor_on_a_newcomer_gets_calls_in_their_order(newcomer: InProcessCluster) -> None:
    ledger = rpc.rpc_sync("b", ledger_on, ("new", True))

    async def run() -> list[int]:
        results: list[list[int]] = await asyncio.gather(*[ledger.rpc_async().add(number) for number in range(20)])
        return results[-1]

    assert asyncio.run(run()) == list(range(20))


NOTES: list[list[int]] = []


async def note_in_order(number: int) -> None:
    NOTES[-1].append(number)


def test_a_call_on_a_loop_to_a_worker_that_nobody_knows_fails(newcomer: InProcessCluster) -> None:
    with pytest.raises(UnknownWorker, match="nobody"):
        asyncio.run(awaited(rpc.rpc_async("nobody", str)))


def test_a_call_to_a_newcomer_that_gets_no_thread_fails_alone(
    newcomer: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> tuple[int, int]:
        with newcomer.use("a") as agent, monkeypatch.context() as patched:
            patched.setattr(agent.retries, "submit", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                rpc.rpc_async("new", divmod, (7, 4))
        return await asyncio.wait_for(rpc.rpc_async("new", divmod, (7, 4)), LIMIT_S)

    assert asyncio.run(run()) == (1, 3)


def test_a_cancelled_call_to_a_newcomer_is_not_made(newcomer: InProcessCluster) -> None:
    async def run() -> None:
        rpc.rpc_async("new", note_in_order, (1,)).cancel()
        await rpc.rpc_async("new", str)

    notes: list[int] = []
    NOTES.append(notes)
    try:
        newcomer.network.delay("z", "a", 0.1)
        asyncio.run(run())
    finally:
        NOTES.remove(notes)
    assert notes == []


def test_grad_mode_and_context_of_a_call_to_a_newcomer_are_those_of_its_caller(newcomer: InProcessCluster) -> None:
    leaf = torch.ones(2, requires_grad=True)

    async def run() -> None:
        with autograd.context() as context:
            with torch.no_grad():
                without = rpc.rpc_async("new", torch.mul, (leaf, 2.0))
            assert not (await without).requires_grad
        with autograd.context() as context:
            product = await rpc.rpc_async("new", torch.mul, (leaf, 3.0))
            await asyncio.to_thread(autograd.backward, context, [product.sum()])
            assert autograd.get_gradients(context)[leaf].tolist() == [3.0, 3.0]

    asyncio.run(run())


@pytest.mark.parametrize("use", ["to_here", "rpc_sync", "await", "rpc_async", "in turn"])
def test_a_reference_from_a_worker_that_knows_its_owner(newcomer: InProcessCluster, use: str) -> None:
    """The owner is a newcomer here."""
    ledger = rpc.rpc_sync("b", ledger_on, ("new", use == "in turn"))

    async def run() -> Any:
        if use == "await":
            return (await ledger).notes
        return await ledger.rpc_async().add(1)

    if use == "to_here":
        assert ledger.to_here().notes == []
    elif use == "rpc_sync":
        assert ledger.rpc_sync().add(1) == [1]
    else:
        assert asyncio.run(run()) == ([] if use == "await" else [1])


def test_functions_that_do_not_wait_on_a_loop_say_how_to_find_a_newcomer(newcomer: InProcessCluster) -> None:
    async def run() -> Any:
        newcomer.network.delay("z", "a", UNIT_S)  # the answer to the question in the background
        with pytest.raises(UnknownWorker, match="new") as caught:
            rpc.remote("new", Ledger)
        newcomer.network.delay("z", "a", 0)
        assert "await rpc.remote_async" in caught.value.__notes__[0]
        ledger = await rpc.remote_async("new", Ledger)
        return await ledger.rpc_async().add(1)

    assert asyncio.run(run()) == [1]


def test_the_timeout_of_a_call_limits_the_question_to_the_coordinator(newcomer: InProcessCluster) -> None:
    newcomer.network.delay("z", "a", LIMIT_S)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"worker new is unknown here, and the coordinator \(rank 0\)"):
        rpc.rpc_sync("new", str, timeout=UNIT_S)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(awaited(rpc.rpc_async("new", str, timeout=UNIT_S)))
    assert time.monotonic() - started < PROMPT_S + 2 * UNIT_S
    newcomer.network.delay("z", "a", 0)
