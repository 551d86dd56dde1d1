"""`rpcdist.LocalCluster`: what runs where, how its start fails, and what Ctrl-C leaves behind, which is nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from cluster_functions import be_killed, environment_of, pid
from program_sessions import (
    LIMIT_S,
    STOP_LIMIT_S,
    assert_no_process_left,
    environment,
    read_until,
    run,
    session_members,
    start,
    without_notices,
)

from rpcdist import LocalCluster, Role, rpc
from rpcdist._launch.job_plan import RankPlan
from rpcdist._launch.local_ranks import LocalRanks
from rpcdist._launch.output import JobOutput
from rpcdist._launch.reports import pickle_call
from rpcdist._launch.supervisor import BackgroundRanks
from rpcdist.errors import AlreadyInitialized, BlockingInLoop, ConfigError, DeadlineExceeded, WorkerLost
from rpcdist.testing import eventually, eventually_async, free_port

PROGRAM = """
import rpcdist
from rpcdist import rpc


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self


def make(rank):
    return Counter().add(rank)


if __name__ == "__main__":
    with rpcdist.LocalCluster(2):
        counter = rpc.remote("worker1", Counter)
        assert type(counter.rpc_sync().add(5)) is Counter
        print(rpc.rpc_sync("worker1", make, (7,)).count, counter.to_here().count)
    print([counter.count for counter in rpcdist.launch(make, workers=2)])
"""

WAITING = """
import time
import rpcdist

if __name__ == "__main__":
    print("begin", flush=True)
    with rpcdist.LocalCluster(2):
        print("inside", flush=True)
        rpcdist.rpc.rpc_sync("worker1", time.sleep, (1000,), timeout=0)
"""


LEAVING = """
import time
import rpcdist

if __name__ == "__main__":
    with rpcdist.LocalCluster(2):
        rpcdist.rpc.rpc_async("worker1", time.sleep, (1000,), timeout=0)
        print("leaving", flush=True)
"""


@pytest.fixture(autouse=True)
def no_launcher(no_agent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.multiproc
def test_functions_and_classes_of_standard_input_travel_by_value() -> None:
    result = subprocess.run(
        [sys.executable, "-"],
        input=PROGRAM,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (result.stdout, without_notices(result.stderr), result.returncode) == ("7 5\n[0, 1]\n", "", 0)


def children() -> set[int]:
    """Of this process; workers of other tests may be among them."""
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.multiproc
def test_names_environment_and_the_death_of_a_worker() -> None:
    before = children()
    with pytest.raises(WorkerLost, match="'server'") as caught:
        with LocalCluster(["trainer", "server"], env={"EXTRA": "more"}) as cluster:
            assert repr(cluster) == "<LocalCluster of trainer, server>"
            assert [worker.name for worker in rpc.workers()] == ["trainer", "server"]
            assert rpc.rpc_sync("server", environment_of, ("EXTRA",)) == "more"
            assert rpc.rpc_sync("server", pid) != os.getpid()
            rpc.rpc_sync("server", be_killed)
    assert caught.value.__notes__ == ["rank 1 was killed by SIGKILL before its function returned"]
    assert repr(cluster) == "<LocalCluster of trainer, server [closed]>"
    assert not children() - before


@pytest.mark.multiproc
async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    before = children()
    cluster = LocalCluster(2)
    starting = asyncio.create_task(cluster.__aenter__())
    await eventually_async(lambda: bool(children() - before), "the processes run", LIMIT_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not children() - before


@pytest.mark.multiproc
async def test_a_start_that_is_cancelled_leaves_no_dashboard() -> None:
    before = children()
    starting = asyncio.create_task(LocalCluster(1, dashboard=True).start_async())
    await eventually_async(lambda: bool(children() - before), "the dashboard's process runs", LIMIT_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually_async(lambda: not children() - before, "the process has ended", LIMIT_S)
    assert not rpc.api._is_current_rpc_agent_set()


@pytest.mark.multiproc
@pytest.mark.parametrize("when", ["start", "inside", "leaving"])
def test_ctrl_c_ends_everything_quietly(when: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LEAVING if when == "leaving" else WAITING)
    with start(sys.executable, tmp_path / "program.py") as process:
        assert process.stdout is not None
        if when != "start":
            read_until(process.stdout, when)
        else:  # no output tells
            eventually(lambda: len(session_members(process.pid)) >= 2, "the processes run", LIMIT_S)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert_no_process_left(process.pid, STOP_LIMIT_S)
    assert (process.returncode, without_notices(errors)) == (130, "\ninterrupted\n")


@pytest.mark.multiproc
def test_a_failing_import_is_shown_first(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text('if __name__ != "__main__": raise ValueError("no data")\n' + WAITING)
    result = run(sys.executable, tmp_path / "program.py")
    assert (result.stdout, result.returncode) == ("begin\n", 1)
    assert result.stderr.count("Traceback") == 2  # this process's, which is short, then the worker's
    assert len(result.stderr.splitlines()) < 20
    assert result.stderr.endswith("ValueError: no data\n")


# ---------------------------------------------------------------- without processes


def test_a_cluster_of_one() -> None:
    with LocalCluster(1) as cluster:
        assert rpc.rpc_sync("worker0", pow, (2, 10)) == 1024
        with pytest.raises(AlreadyInitialized, match=r"call rpc\.shutdown\(\) before LocalCluster"):
            LocalCluster(1).start()
        assert rpc.get_worker_info().name == "worker0"  # the refused one took nothing away
    assert "closed" in repr(cluster)
    cluster.close()  # once more is nothing


async def test_a_cluster_of_one_in_a_coroutine() -> None:
    async with LocalCluster(["me"]):
        assert await rpc.rpc_async("me", pow, (2, 10)) == 1024
    assert not rpc.api._is_current_rpc_agent_set()


async def test_a_cluster_of_a_notebook() -> None:
    """Its cells run on an event loop, one after the other, in no block."""
    with pytest.raises(BlockingInLoop, match=r"await cluster\.start_async\(\)"):
        LocalCluster(["me"]).start()
    cluster = await LocalCluster(["me"]).start_async()
    assert await rpc.rpc_async("me", pow, (2, 10)) == 1024
    await cluster.close_async()
    assert not rpc.api._is_current_rpc_agent_set()


def test_a_block_may_shut_down_itself() -> None:
    with LocalCluster(1):
        rpc.shutdown()
    with pytest.raises(KeyError), LocalCluster(1):
        rpc.shutdown()
        raise KeyError("of the block")


def test_a_start_cancelled_before_its_thread_runs_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(2)

    class CancelledJustThen(BackgroundRanks):
        def start_ranks(self) -> None:
            cluster._cancel()
            super().start_ranks()

    monkeypatch.setattr("rpcdist._local_cluster.BackgroundRanks", CancelledJustThen)
    before = children()
    with pytest.raises(DeadlineExceeded, match="was cancelled"):
        cluster.start()
    assert not children() - before


def engine(wake: int) -> LocalRanks:
    role = Role("worker", pid, 2)
    plans = {rank: RankPlan(f"worker{rank}", role, {}) for rank in (1, 2)}
    return LocalRanks(plans, {"worker": pickle_call(pid, ())}, {}, wake, JobOutput())


def test_what_the_watching_thread_failed_with_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError("no more processes")

    monkeypatch.setattr("rpcdist._launch.local_ranks.start_rank", fail)
    processes = BackgroundRanks([1], engine)
    processes.start_ranks()
    try:
        for wait in (partial(processes.wait_until_ready, LIMIT_S, LIMIT_S, print), processes.wait_until_ended):
            with pytest.raises(OSError, match="no more processes"):
                wait()
    finally:
        processes.end()


def test_a_slow_start_says_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The processes are never started here, so that none is ready."""
    monkeypatch.setattr("rpcdist._local_cluster.INIT_NOTICE_S", 0.01)
    cluster = LocalCluster(["trainer", "server", "observer"])
    processes = BackgroundRanks([1, 2], engine)
    with pytest.raises(DeadlineExceeded, match=r"after 0\.02 s these ranks had not imported the program: 1, 2; is the"):
        processes.wait_until_ready(0.02, 0.01, cluster._warn_about_missing)
    processes.end()
    [record] = caplog.records
    expected = "after 0.01 s, still waiting until these have imported the program: server, observer"
    assert record.getMessage() == expected


@pytest.mark.parametrize("workers", [0, -1, [], "worker", 3.5, None])
def test_wrong_numbers_of_workers_are_explained(workers: Any) -> None:
    with pytest.raises(ConfigError, match="give the number of workers, at least 1, or a list of their names"):
        LocalCluster(workers)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"workers": ["a", "b", "a"]}, "the name 'a' occurs twice"),
        ({"workers": ["a", "b c"]}, "Worker name must match"),
        ({"workers": [1, 2]}, "Worker name"),
        ({"workers": 2, "options": {"rpc_timeout": 1}}, "give an rpc.RpcOptions, or nothing"),
        ({"workers": 2, "env": {"OMP_NUM_THREADS": 1}}, r"env\['OMP_NUM_THREADS'\]=1"),
    ],
)
def test_what_cannot_work_is_said_before_a_process_is_started(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        LocalCluster(**wrong)


def test_under_a_launcher_the_processes_are_its(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with LocalCluster(1):
        assert rpc.rpc_sync("worker0", pow, (2, 10)) == 1024
    with pytest.raises(ConfigError, match="workers=3, but the launcher started WORLD_SIZE=1"):
        LocalCluster(3).start()
