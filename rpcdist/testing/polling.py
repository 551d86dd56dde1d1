"""Waiting for facts that no event reports: about other processes, and about threads that are inside a blocking call."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rpcdist.testing.limits import LIMIT_S

__all__ = ["eventually", "eventually_async", "wait_until_asleep", "wait_until_stopped"]

POLL_S = 0.005
NUM_LOOKS = 4
"""A thread that sleeps at so many looks, one after the other, waits for something that others have to do."""

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "the condition", within_s: float = LIMIT_S) -> T:
    """Calls `condition` until it returns a true value, and returns that value.

    Prefer an event, a barrier or the result of a call: this is for what nothing reports, such as a file that another
    process writes or a table that is cleaned in the background.

    Args:
        condition: called again and again in this thread.
        what: the fact, for the error: "the client waits".
        within_s: the time limit in seconds.

    Raises:
        AssertionError: the limit has passed; it shows the last value.
    """
    for value in _looks(condition, what, within_s):
        if value:
            return value
        time.sleep(POLL_S)  # nothing tells this process of the change
    raise AssertionError("unreachable")


async def eventually_async(condition: Callable[[], T], what: str = "the condition", within_s: float = LIMIT_S) -> T:
    """As `eventually`, in a coroutine; its loop goes on in the meantime."""
    for value in _looks(condition, what, within_s):
        if value:
            return value
        await asyncio.sleep(POLL_S)
    raise AssertionError("unreachable")


def _looks(condition: Callable[[], T], what: str, within_s: float) -> Iterator[T]:
    limit = time.monotonic() + within_s
    while True:
        yield (value := condition())
        assert time.monotonic() < limit, f"not within {within_s} s: {what}; the last value was {value!r}"


def wait_until_asleep(thread: threading.Thread | int, within_s: float = LIMIT_S) -> None:
    """Waits until a thread sleeps in the kernel: it has come to the point where it waits for others.

    Args:
        thread: a thread of this process, or a process id, for the main thread of that process.
        within_s: the time limit in seconds.
    """
    pid, tid = (thread, thread) if isinstance(thread, int) else (os.getpid(), thread.native_id)
    stat = Path(f"/proc/{pid}/task/{tid}/stat")
    num_asleep = 0

    def sleeps() -> bool:
        nonlocal num_asleep
        state = stat.read_text().rpartition(")")[2].split()[0]
        num_asleep = num_asleep + 1 if state == "S" else 0
        return num_asleep == NUM_LOOKS

    eventually(sleeps, f"{thread!r} sleeps", within_s)


def wait_until_stopped(pid: int, within_s: float = LIMIT_S) -> None:
    """Waits until all threads of a process stand still: a SIGSTOP takes effect when one of them next runs."""
    tasks = Path(f"/proc/{pid}/task")

    def stands_still() -> bool:
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir())

    eventually(stands_still, f"process {pid} is stopped", within_s)
