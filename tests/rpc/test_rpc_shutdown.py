"""How workers leave, and what becomes of calls before, during and after that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import rpc_victim_functions as functions
import rpc_victim_references as references
from peer_timeouts import CALM_S, PROMPT_S, UNIT_S

from rpcdist import rpc
from rpcdist.errors import AlreadyInitialized, NotInitialized, WorkerLost
from rpcdist.testing import WorkerPool, eventually, wait_until_asleep
from rpcdist.testing.worker_pool import join, leave

pytestmark = pytest.mark.multiproc


def test_before_init_and_after_shutdown_calls_say_what_to_do(worker_pool: WorkerPool) -> None:
    process = worker_pool.start("a")
    says = "RPC has not been initialized. Call rpcdist.rpc.init_rpc"
    uses = (
        (rpc.rpc_sync, "a", functions.pid),
        (rpc.rpc_async, "a", functions.pid),
        (rpc.remote, "a", functions.pid),
        (rpc.rpc_stream, "a", functions.pid),
        (rpc.get_worker_info,),
        (rpc.shutdown,),
        (rpc.debug_rrefs,),
    )
    for _ in range(2):
        for function, *args in uses:
            assert says in str(process.begin(function, *args).error(NotInitialized))
        assert "init_rpc" in str(process.begin(references.make_reference, 1).error(NotInitialized))
        process.run(join, "a", 0, 1, worker_pool.new_url())
        error = process.begin(join, "a", 0, 1, worker_pool.new_url()).error(AlreadyInitialized)
        assert "call shutdown() first" in str(error)
        assert process.run(rpc.rpc_sync, "a", functions.pid) == process.pid
        process.run(rpc.shutdown)
    assert process.run(functions.left_behind) == []


def test_the_last_release_may_come_when_nobody_has_work(worker_pool: WorkerPool) -> None:
    """An owner that has not read it yet, or did not know of the holder before, does not take it for a leak."""
    owner, user = processes = [worker_pool.start(name) for name in ("owner", "user")]
    url = worker_pool.new_url()
    joining = [process.begin(join, process.name, rank, 2, url) for rank, process in enumerate(processes)]
    for pending in joining:
        pending.result()
    user.run(references.hold_remote, "owner")
    leaving = [
        owner.begin(references.leave_while_the_last_release_is_late),
        user.begin(references.leave_without_waiting_for_owners),
    ]
    for pending in leaving:
        pending.result()


def test_init_and_shutdown_again_and_again_in_the_same_processes(worker_pool: WorkerPool) -> None:
    processes = [worker_pool.start(f"w{rank}") for rank in range(3)]
    for graceful in (True, False, True, True):
        url = worker_pool.new_url()
        joining = [process.begin(join, process.name, rank, 3, url) for rank, process in enumerate(processes)]
        for pending in joining:
            pending.result()
        for process in processes:
            for other in processes:
                assert process.run(rpc.rpc_sync, other.name, functions.pid) == other.pid
        leaving = [process.begin(leave, graceful=graceful) for process in processes]
        for pending in leaving:
            pending.result()
    for process in processes:
        assert process.run(functions.left_behind) == []


@pytest.mark.parametrize("victim", ["a", "c"], ids=["the first, who leads", "the last"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_shutdown_goes_on_without_a_worker_that_died_and_names_it(
    worker_pool: WorkerPool, victim: str, how: str
) -> None:
    world = worker_pool.world("a", "b", "c", peer_timeout=UNIT_S)
    others = [name for name in ("a", "b", "c") if name != victim]
    leaving = [world[name].begin(rpc.shutdown) for name in others]
    for name in others:
        wait_until_asleep(world[name].pid)
    if how == "killed":
        world[victim].kill()
    else:
        world[victim].stop()
    died = time.monotonic()
    assert [list(pending.result()) for pending in leaving] == [[victim]] * 2
    assert time.monotonic() - died < 2 * PROMPT_S
    for name in others:
        assert world[name].output().count(f"worker '{victim}' (rank") == 1
        world[name].begin(rpc.rpc_sync, "b", functions.pid).error(NotInitialized)
        assert world[name].run(functions.left_behind) == []


def test_a_shutdown_that_does_not_wait_ends_at_once(worker_pool: WorkerPool, tmp_path: Path) -> None:
    world = worker_pool.world("a", "b", "c", peer_timeout=CALM_S)
    running = [tmp_path / "to b", tmp_path / "from b"]
    out = world["b"].run(functions.start_coroutine_call, "c", str(running[0]))
    assert out is None
    into = world["a"].begin(functions.call, "rpc_sync of a coroutine", "b", str(running[1]))
    for path in running:
        eventually(path.exists, "the call runs")
    started = time.monotonic()
    world["b"].run(leave, graceful=False)
    assert time.monotonic() - started < PROMPT_S
    error = into.error(WorkerLost)
    assert error.worker == "b" and "shut down" in error.reason
    kind, text = world["b"].run(functions.end_of_started_call)
    assert kind == "NotInitialized" and "shut down" in text
    assert time.monotonic() - started < PROMPT_S
    # Nobody else is harmed.
    assert world["a"].run(rpc.rpc_sync, "c", functions.add, (1, 2)) == 3
    kind, text, waited_s = world["a"].run(functions.error_of, rpc.rpc_sync, "b", functions.pid)
    assert kind == "WorkerLost" and "'b'" in text and waited_s < PROMPT_S


def test_a_handler_that_does_not_end_is_named(worker_pool: WorkerPool, tmp_path: Path) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    world["b"].run(functions.limit_closing, 0.3)
    waiting = world["a"].begin(functions.call, "rpc_sync", "b", str(tmp_path / "running"))
    eventually((tmp_path / "running").exists, "the call runs")
    world["b"].run(leave, graceful=False)
    assert "1 jobs did not end" in (log := world["b"].output()), log
    assert "from a: rpc_victim_functions:announce_and_wait" in log, log
    waiting.error(WorkerLost)


def test_elastic_workers_leave_one_by_one(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "c", world_size=None, peer_timeout=CALM_S)
    world["b"].run(references.hold_remote, "c", 1)
    world["c"].run(references.hold_remote, "a", 2)
    world.shutdown("c")
    assert world["b"].run(rpc.rpc_sync, "a", functions.add, (1, 2)) == 3
    assert world["a"].run(functions.wait_until_empty) == ""
    kind, _, _ = world["b"].run(functions.error_of, references.use_held)
    assert kind == "OwnerLost"
    world["b"].run(functions.drop)
    world.shutdown("a", "b")
    for name in ("a", "b", "c"):
        assert world[name].run(functions.left_behind) == []
