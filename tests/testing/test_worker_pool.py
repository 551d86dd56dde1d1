"""Workers that tests call, kill, stop and replace."""

from __future__ import annotations

import os
import signal
import time

import kit_functions as functions
import psutil
import pytest

from rpcdist import rpc
from rpcdist.testing import (
    Program,
    RankPool,
    WorkerEnded,
    WorkerPool,
    WorkerTimeout,
    eventually,
    wait_for_any,
    wait_until_asleep,
)

pytestmark = pytest.mark.multiproc


def test_calls_and_errors(worker_pool: WorkerPool) -> None:
    worker = worker_pool.start("a")
    assert worker.run(functions.add, 1, b=2) == 3
    first, second = worker.begin(functions.add, 1, 2), worker.begin(os.getpid)
    assert (second.result(), first.result()) == (worker.pid, 3)
    error = worker.begin(functions.fail, "on purpose").error(ValueError)
    assert str(error) == "on purpose" and "in fail" in error.__notes__[0]
    assert worker.output() == "about to fail: on purpose\n"
    with pytest.raises(AssertionError, match="returned 3, but ValueError was expected"):
        worker.begin(functions.add, 1, 2).error(ValueError)
    with pytest.raises(RuntimeError, match="pickle"):
        worker.run(functions.make_unpicklable)
    assert worker.run(functions.add, 1, 2) == 3  # it is none the worse


def test_environment(worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_HERE", "here")
    worker_pool.environment["KIT_POOL"] = "pool"
    worker = worker_pool.start("a", {"KIT_OWN": "own", "KIT_POOL": None})
    other = worker_pool.start("b")
    names = ("KIT_HERE", "KIT_POOL", "KIT_OWN")
    assert [worker.run(functions.variable, name) for name in names] == ["here", None, "own"]
    assert [other.run(functions.variable, name) for name in names] == ["here", "pool", None]


def test_a_worker_that_dies_says_so(worker_pool: WorkerPool) -> None:
    worker = worker_pool.start("a")
    worker.run(functions.write, "a last word")
    pending = worker.begin(functions.hang)
    worker.kill()
    assert not worker.alive and worker.wait() == -signal.SIGKILL
    assert "status -9" in (text := str(pending.error(WorkerEnded))) and "a last word" in text
    with pytest.raises(WorkerEnded):
        worker.run(functions.add, 1, 2)


def test_killing_a_worker_that_has_ended_is_no_error(worker_pool: WorkerPool) -> None:
    worker = worker_pool.start("a")
    worker.begin(os._exit, 3).error(WorkerEnded)
    worker.kill()
    worker.kill()
    assert worker.wait() == 3


def test_a_call_that_takes_too_long_shows_where_it_is(worker_pool: WorkerPool) -> None:
    worker = worker_pool.start("a")
    worker.run(os.getpid)
    pending = worker.begin(functions.hang)
    wait_until_asleep(worker.pid)
    with pytest.raises(WorkerTimeout, match="in hang"):
        pending.result(0.05)
    assert worker.alive and not worker.is_idle(0.0)


def test_stop_and_resume(worker_pool: WorkerPool) -> None:
    worker = worker_pool.start("a")
    worker.run(os.getpid)
    worker.stop()
    pending = worker.begin(functions.add, 1, 2)
    assert not worker.is_idle(0.1)
    worker.resume()
    assert pending.result() == 3
    worker.stop()  # the end of the pool does not wait for it


def test_the_first_that_ends(worker_pool: WorkerPool) -> None:
    slow, quick, dead = (worker_pool.start(name) for name in ("slow", "quick", "dead"))
    hanging, adding, dying = slow.begin(functions.hang), quick.begin(functions.add, 1, 2), dead.begin(functions.hang)
    assert wait_for_any([hanging, adding, dying]) == [adding]
    assert wait_for_any([hanging, dying], 0.05) == []
    dead.kill()
    assert wait_for_any([hanging, dying]) == [dying]


def test_ranks_stay_and_are_replaced(fork_server: None) -> None:
    with RankPool() as ranks:
        assert ranks.run(2, functions.keep, 1) == [[1], [1]]
        pids = [worker.pid for worker in ranks.workers]
        assert isinstance(ranks.outcomes(ranks.begin(2, functions.die_on_rank, 1))[1], WorkerEnded)
        assert ranks.run(2, functions.keep, 2) == [[1, 2], [2]]
        assert ranks[0].pid == pids[0] and ranks[1].pid != pids[1]
        with pytest.raises(WorkerTimeout, match="in hang"):
            ranks.run(2, functions.hang_on_rank, 0, limit_s=0.2)
        assert ranks.run(3, functions.keep, 3) == [[3], [2, 3], [3]]


def test_an_rpc_world(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", peer_timeout=30)
    assert world["a"].run(rpc.rpc_sync, "b", functions.add, (1, 2)) == 3
    world["b"].kill()
    world.join("b", 1)
    eventually(lambda: world["a"].run(functions.pid_of, "b") == world["b"].pid, "a has heard of the new b")
    world.shutdown()


def test_workers_end_with_the_tests_process_even_when_they_hang() -> None:
    code = """
        import os
        import signal
        import kit_functions
        from rpcdist.testing import WorkerPool
        pool = WorkerPool()
        worker = pool.start("a")
        worker.run(os.getpid)
        worker.begin(kit_functions.hang_in_c)
        print(worker.pid)
        signal.pause()
    """
    path = os.pathsep.join([os.path.dirname(functions.__file__), os.environ.get("PYTHONPATH", "")])
    with Program(code, environment={"PYTHONPATH": path}) as program:
        worker = psutil.Process(int(program.line()))
        program.signal(signal.SIGKILL)
        program.end()
        eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker is dead")


def test_eventually_shows_the_last_value() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: it is there; the last value was \[\]"):
        eventually(list, "it is there", 0.05)
    assert time.monotonic() - started < 5
