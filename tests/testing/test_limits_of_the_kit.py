"""Each wait of the test kit ends, whatever the processes do that programs and workers have left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack

import kit_functions as functions
import psutil
import pytest

from rpcdist.testing import (
    InProcessCluster,
    Program,
    WorkerEnded,
    WorkerPool,
    WorkerTimeout,
    eventually,
    free_port,
    worker,
)
from rpcdist.testing import in_process_cluster as cluster_module
from rpcdist.testing.limits import LIMIT_S

FORKS = """
    import os, signal, sys
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "alone":
            os.setsid()
        os.write(told, b"x")
        signal.pause()
    os.read(ready, 1)
    print(child, flush=True)
"""
"""A program that leaves a forked child behind, which holds its output, and prints the child's id."""


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(pid: int) -> None:
    if not is_gone(pid):
        os.kill(pid, signal.SIGKILL)


def test_the_end_of_the_block_ends_what_a_program_forked() -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        with Program(FORKS, "in the group") as program:
            child = int(program.line())
            stack.callback(kill, child)
            assert program.process.wait(60) == 0
            assert not is_gone(child)
        eventually(lambda: is_gone(child), "the forked child is gone")
    assert time.monotonic() - started < 50  # and nobody waited for the child


def test_a_process_that_left_the_group_and_holds_the_output_is_an_error() -> None:
    with Program(FORKS, "alone") as program:
        child = int(program.line())
        try:
            assert program.process.wait(60) == 0
            with pytest.raises(AssertionError, match=r"status 0, and 0\.2 s later another process still holds"):
                program.end(0.2)
        finally:
            kill(child)
        assert program.end() == 0


def test_the_end_of_a_pool_ends_what_workers_forked(worker_pool: WorkerPool) -> None:
    idle, dead = worker_pool.start("idle"), worker_pool.start("dead")
    children = [each.run(functions.fork_a_child) for each in (idle, dead)]
    dead.begin(os._exit, 3).error(WorkerEnded)
    assert not any(map(is_gone, children))
    worker_pool.close()
    eventually(lambda: all(map(is_gone, children)), "the forked children are gone")


def test_a_call_that_a_stopped_worker_does_not_take(worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LIMIT_S", 0.2)
    stopped = worker_pool.start("a")
    monkeypatch.undo()
    stopped.run(os.getpid)
    stopped.stop()
    with pytest.raises(WorkerTimeout, match=r"a: len: <Worker a, process \d+> did not take \d{8} bytes"):
        stopped.begin(len, bytes(10_000_000))


def test_calls_of_a_cluster_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def stay() -> bool:
        started.set()
        return go_on.wait(LIMIT_S)

    cluster = InProcessCluster("a")
    monkeypatch.setattr(cluster_module, "LIMIT_S", 0.2)
    waiting: Future[bool] = cluster.begin("a", stay)
    assert started.wait(LIMIT_S)
    with pytest.raises(AssertionError, match=r"1 calls of workers did not end within 0\.2 s"):
        cluster.close()
    go_on.set()
    assert waiting.result(LIMIT_S)
    cluster.close()


def test_a_free_port_is_looked_for_until_it_is_clear_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(probe: socket.socket, address: object) -> None:
        raise PermissionError("no ports here")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(PermissionError, match="no ports here"):
        free_port()
