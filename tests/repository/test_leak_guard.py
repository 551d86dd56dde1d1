"""The guard that every other test relies on: it finds each kind of leak, and nothing in a clean test."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from leak_guard import LeakGuard

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
SHORT_S = 0.05


@contextmanager
def running_thread(name: str, *, daemon: bool) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(30,), name=name, daemon=daemon)
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def running_child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.kill()


@contextmanager
def listening_socket() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)):
        yield


@contextmanager
def connected_sockets() -> Iterator[None]:
    left, right = socket.socketpair()
    with left, right:
        yield


@contextmanager
def shared_memory_segment() -> Iterator[None]:
    path = Path("/dev/shm") / f"rpcdist-test-{os.getpid()}-{secrets.token_hex(4)}"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        yield
    path.unlink()


@needs_proc
@pytest.mark.parametrize(
    ("leaked", "expected"),
    [
        (lambda: running_thread("pool-0", daemon=False), "thread 'pool-0'"),
        (lambda: running_thread("rpcdist-io", daemon=True), "thread 'rpcdist-io'"),
        (lambda: running_thread("somebody-else", daemon=True), None),
        (running_child, "child process"),
        (listening_socket, "listening on ('127.0.0.1'"),
        (connected_sockets, None),
        (shared_memory_segment, "shared memory segment /dev/shm/rpcdist-test"),
    ],
)
def test_finds_each_kind(leaked: Callable[[], AbstractContextManager[None]], expected: str | None) -> None:
    guard = LeakGuard()
    before = guard.snapshot()
    with leaked():
        found = guard.leaks(before, grace_s=SHORT_S)
        assert [line for line in found if expected is None or expected not in line] == []
        assert len(found) == (expected is not None)
    assert guard.leaks(before) == []


@needs_proc
def test_child_that_nobody_waited_for_is_found() -> None:
    guard = LeakGuard()
    before = guard.snapshot()
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    [line] = guard.leaks(before, grace_s=SHORT_S)
    assert "nobody waited" in line
    child.wait()


@needs_proc
def test_exempt_things_may_stay() -> None:
    guard = LeakGuard()
    before = guard.snapshot()
    with running_thread("rpcdist-pool", daemon=True), running_child():
        for thread in set(threading.enumerate()) - before.threads:
            guard.exempt_thread(thread)
        for child in guard.snapshot().children - before.children:
            guard.exempt_child(child)
        assert guard.leaks(before, grace_s=SHORT_S) == []


STRANGER = """
import mmap, os, sys
if os.fork():
    os._exit(0)
path, how = sys.argv[1:]
file = open(path, "w+b")
file.truncate(4096)
if how == "mapped":
    memory = mmap.mmap(file.fileno(), 4096)
    file.close()
print("made", flush=True)
sys.stdin.read()
os.unlink(path)
"""


@needs_proc
@pytest.mark.parametrize("how", ["mapped", "open"])
def test_segments_of_strangers_do_not_count(how: str) -> None:
    guard = LeakGuard()
    before = guard.snapshot()
    path = Path("/dev/shm") / f"rpcdist-test-{os.getpid()}-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", STRANGER, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        assert parent.stdout.readline() == "made\n"  # by a process that is not below this one any more
        parent.wait(10)
        assert path.exists() and guard.leaks(before, grace_s=SHORT_S) == []
        parent.stdin.close()
        assert parent.stdout.read() == ""
    assert not path.exists()


@needs_proc
@pytest.mark.parametrize(("name", "counts"), [("sem.mp-", False), ("psm_", True)])
def test_a_segment_that_nobody_holds_counts_unless_it_is_a_semaphore(name: str, counts: bool) -> None:
    guard = LeakGuard()
    before = guard.snapshot()
    path = Path("/dev/shm") / f"{name}{secrets.token_hex(4)}"
    path.write_bytes(bytes(32))
    try:
        assert [str(path) in line for line in guard.leaks(before, grace_s=SHORT_S)] == [True] * counts
    finally:
        path.unlink()


def test_waits_for_what_ends_by_itself() -> None:
    guard = LeakGuard()
    before = guard.snapshot()
    threading.Thread(target=time.sleep, args=(SHORT_S,), name="ends-soon").start()
    assert guard.leaks(before) == []


async def test_collects_errors_of_loops(reported_loop_errors: list[str]) -> None:
    def broken() -> None:
        raise ValueError("broken callback")

    asyncio.get_running_loop().call_soon(broken)
    await asyncio.sleep(0)
    [error] = reported_loop_errors
    assert "broken callback" in error
    reported_loop_errors.clear()


def test_clean_test_is_cheap() -> None:
    guard = LeakGuard()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert guard.leaks(guard.snapshot()) == []
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02
