"""The functions that workers of the test kit run in its own tests."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from rpcdist import rpc
from rpcdist.errors import RpcdistError

kept: list[object] = []
released = threading.Event()


def add(a: int, b: int) -> int:
    return a + b


def keep(rank: int, size: int, value: object) -> list[object]:
    kept.append(value)
    return list(kept)


def fail(text: str) -> None:
    print(f"about to fail: {text}")
    raise ValueError(text)


def make_unpicklable() -> Any:
    return threading.Lock()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def fork_a_child() -> int:
    """The process id of a forked child that stays."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


def write(text: str) -> None:
    print(text)


def wait_for_release() -> None:
    released.wait(60)


def pid_of(worker: str) -> int | None:
    """The process id of an RPC worker, if it can be reached."""
    try:
        return rpc.rpc_sync(worker, os.getpid)
    except RpcdistError:
        return None


def hang() -> None:
    threading.Event().wait(60)


def hang_on_rank(rank: int, size: int, hanging: int) -> int:
    if rank == hanging:
        hang()
    return rank


def die_on_rank(rank: int, size: int, dying: int) -> int:
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hang_in_c() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    while True:
        signal.pause()  # nothing but SIGKILL ends it
