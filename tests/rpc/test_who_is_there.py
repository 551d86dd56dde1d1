"""The functions about who is in the job, serving until told to stop, and calls that are made again."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest
import rpc_victim_functions as functions
from peer_timeouts import CALM_S, LIMIT_S, UNIT_S
from rpc_functions import add

from rpcdist import rpc
from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError, UnknownWorker, WorkerLost
from rpcdist.testing import InProcessCluster, WorkerPool, eventually, wait_until_asleep

entered = threading.Event()
released = threading.Event()


@pytest.fixture(autouse=True)
def fresh_events() -> None:
    entered.clear()
    released.clear()


# ---------------------------------------------------------------- who is there


def test_workers_by_role(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("ps0", world_size=None, peer_timeout=CALM_S, role="ps")
    world.join("t1", 1, role="trainer")
    world.join("t2", 2, role="trainer")
    for worker in world:
        assert worker.run(rpc.workers) == [rpc.WorkerInfo(name, id) for id, name in enumerate(("ps0", "t1", "t2"))]
        assert worker.run(rpc.workers, "trainer") == [rpc.WorkerInfo("t1", 1), rpc.WorkerInfo("t2", 2)]
        assert worker.run(rpc.workers, "reader") == []
    world.shutdown("t1")
    expected = [rpc.WorkerInfo("t2", 2)]
    eventually(lambda: world["t2"].run(rpc.workers, "trainer") == expected, "t2 has heard that t1 has left")


def test_a_role_is_a_short_text() -> None:
    with pytest.raises(TypeError, match="role must be a string, but got 1"):
        rpc.RpcOptions(role=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="129 characters; the limit is 128"):
        rpc.RpcOptions(role="x" * 129)


def test_a_change_is_told_once_and_in_order() -> None:
    with InProcessCluster("a", "b", "c", elastic=True, peer_timeout=UNIT_S) as cluster:
        changes: dict[str, list[tuple[str, str]]] = {"a": [], "b": []}
        stops = []
        for name, seen in changes.items():
            with cluster.use(name):

                def note(change: rpc.MembershipChange, seen: list[tuple[str, str]] = seen) -> None:
                    assert bool(change.reason) is (change.kind == "lost")
                    if change.worker.name != "d":
                        assert rpc.rpc_sync("a", add, (1, 2)) == 3  # it may call others
                    if seen or change.kind == "lost":  # b may hear of c only after both have joined
                        seen.append((change.kind, change.worker.name))

                stops.append(rpc.on_membership_change(note))
        cluster.kill("c")
        cluster.restart("c")
        cluster.join("d", 3)
        cluster.shutdown("d")
        expected = [("lost", "c"), ("joined", "c"), ("joined", "d"), ("left", "d")]
        eventually(lambda: changes["a"] == changes["b"] == expected, "all have heard of the changes")
        stops[0]()
        cluster.join("e", 4)
        eventually(lambda: changes["b"][4:] == [("joined", "e")], "b has heard of e")
        assert changes["a"] == expected


def test_waiting_for_a_worker() -> None:
    with InProcessCluster("a", "b", elastic=True, peer_timeout=UNIT_S) as cluster:
        with cluster.use("b"):
            assert rpc.wait_for_worker("a") == rpc.WorkerInfo("a", 0)
            with pytest.raises(
                DeadlineExceeded, match=r"'c' did not join within 0\.0\d+ s; the job has these workers: a, b\. Check"
            ):
                rpc.wait_for_worker("c", timeout=0.05)
        waiting = cluster.begin("a", rpc.wait_for_worker, "c")
        cluster.join("c", 2)
        assert waiting.result(LIMIT_S) == rpc.WorkerInfo("c", 2)
        with cluster.use("b"):
            held: rpc.Future[object] = rpc.rpc_async("c", enter_and_stay)
            assert entered.wait(LIMIT_S)
        cluster.kill("c")
        with cluster.use("b"), pytest.raises(WorkerLost):
            held.wait()
        calling = cluster.begin("b", _wait_and_call, "c")  # though c is not given up yet
        cluster.restart("c")
        assert calling.result(LIMIT_S) == 3


def _wait_and_call(to: str) -> int:
    rpc.wait_for_worker(to)
    return int(rpc.rpc_sync(to, add, (1, 2)))


# ---------------------------------------------------------------- serving


def test_a_server_serves_until_a_peer_says_stop() -> None:
    with InProcessCluster("server", "client", peer_timeout=CALM_S) as cluster:
        serving = cluster.begin("server", rpc.serve)
        with cluster.use("client"):
            assert rpc.rpc_sync("server", add, (1, 2)) == 3
            assert not serving.done()
            rpc.stop_serving("server")
            assert serving.result(LIMIT_S) == "worker 'client' asked for it"
            rpc.stop_serving("server")  # before it serves again
        assert cluster.run("server", rpc.serve) == "worker 'client' asked for it"
        assert cluster.run("server", rpc.serve, timeout=0.0) is None
        serving = cluster.begin("server", rpc.serve)
        cluster.shutdown(graceful=False)
        assert serving.result(LIMIT_S) == "RPC was shut down in this process"


@pytest.mark.multiproc
def test_a_server_ends_by_a_signal_and_the_second_one_has_its_usual_effect(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("server", "client", peer_timeout=CALM_S)
    server = world["server"]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        serving = server.begin(rpc.serve)
        wait_until_asleep(server.pid)
        assert world["client"].run(rpc.rpc_sync, "server", functions.pid) == server.pid
        server.signal(number)
        assert serving.result() == number.name
    server.run(signal.signal, signal.SIGHUP, signal.SIG_IGN)  # as under `nohup`
    serving = server.begin(rpc.serve)
    wait_until_asleep(server.pid)
    server.signal(signal.SIGHUP)
    world["client"].run(rpc.stop_serving, "server")
    assert serving.result() == "worker 'client' asked for it"
    leaving = server.begin(rpc.shutdown)
    wait_until_asleep(server.pid)
    server.signal(signal.SIGINT)
    leaving.error(KeyboardInterrupt)


# ---------------------------------------------------------------- calls that are made again


@rpc.idempotent
def name_of_this_worker() -> str:
    return rpc.get_worker_info().name


@rpc.idempotent
async def enter_and_name() -> str:
    if not released.is_set():
        entered.set()
        await asyncio.Event().wait()
    return name_of_this_worker()


@rpc.idempotent
def fail() -> None:
    raise ValueError("no")


@rpc.idempotent
def lose_another() -> None:
    raise WorkerLost("z", "a call", 0.0, "it was not mine")


async def enter_and_stay() -> None:
    entered.set()
    await asyncio.Event().wait()


class Table:
    @staticmethod
    @rpc.idempotent
    def get() -> str:
        return name_of_this_worker()


def test_idempotent_functions_reach_the_replacement() -> None:
    with InProcessCluster("a", "b", peer_timeout=UNIT_S) as cluster:
        held = cluster.run("a", rpc.rpc_async, "b", enter_and_name)
        waiting = cluster.begin("a", rpc.rpc_sync, "b", enter_and_name)
        assert entered.wait(LIMIT_S)
        cluster.kill("b")
        released.set()
        later = cluster.run("a", rpc.rpc_async, "b", Table.get)
        assert not held.done() and not waiting.done() and not later.done()
        leaving = cluster.begin("a", rpc.shutdown)  # it waits for them
        cluster.restart("b")
        assert [held.wait(), waiting.result(LIMIT_S), later.wait()] == ["b"] * 3
        cluster.run("b", rpc.shutdown)
        assert leaving.result(LIMIT_S) == {}
        cluster.close()


def test_idempotent_functions_are_retried_for_the_loss_of_their_worker_only() -> None:
    with InProcessCluster("a", "b", peer_timeout=UNIT_S) as cluster, cluster.use("a"):
        with pytest.raises(ValueError, match="no"):
            rpc.rpc_sync("b", fail)
        with pytest.raises(WorkerLost, match="not mine"):
            rpc.rpc_sync("b", lose_another)
        with pytest.raises(UnknownWorker):
            rpc.rpc_sync("nobody", name_of_this_worker)
        cluster.kill("b")
        with pytest.raises((DeadlineExceeded, WorkerLost)):
            rpc.rpc_sync("b", name_of_this_worker, timeout=1.0)
        cancelled = rpc.rpc_async("b", name_of_this_worker)
        assert cancelled.cancel()
        paused = rpc.rpc_async("b", name_of_this_worker)
        rpc.shutdown(graceful=False)
        with pytest.raises(RpcdistError, match="shut down"):
            paused.wait()
        cluster.close()
