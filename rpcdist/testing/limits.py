"""The time limits of tests, and waits for conditions that no event reports.

The limits are multiples of one unit; `RPCDIST_TEST_SCALE` makes it longer on slow machines.

A limit only affects the duration of a failing test; a passing test never waits for one. Limits that a test is *about*
(a lease that expires, a silent peer) are small multiples of `UNIT_S`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

__all__ = [
    "END_LIMIT_S", "LIMIT_S", "STACKS_LIMIT_S", "UNIT_S", "eventually", "eventually_async", "wait_until_asleep",
    "wait_until_stopped",
]  # fmt: skip

UNIT_S = 0.1 * float(os.environ.get("RPCDIST_TEST_SCALE", "1"))
"""In seconds: the shortest time in which every worker of a loaded machine runs at least once."""

LIMIT_S = 600 * UNIT_S
"""The default limit for a call of a worker, and for everything else that a test waits for."""

END_LIMIT_S = 20 * UNIT_S
"""The limit for the end of a worker; then it is killed."""

STACKS_LIMIT_S = 20 * UNIT_S
"""The limit for the stacks of a worker that did not answer in time."""


POLL_S = 0.005
NUM_LOOKS = 4
"""A thread that sleeps at this number of consecutive checks waits for another thread or process."""

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "the condition", within_s: float = LIMIT_S) -> T:
    """Calls `condition` until it returns a true value, and returns that value.

    Prefer an event, a barrier or the result of a call: this is for changes that nothing reports, such as a file that
    another process writes or a table that is cleaned in the background.

    Args:
        condition: called repeatedly in this thread.
        what: the condition in words, for the error: "the client waits".
        within_s: the time limit in seconds.

    Raises:
        AssertionError: the limit has passed; the text shows the last value.
    """
    for value in _looks(condition, what, within_s):
        if value:
            return value
        time.sleep(POLL_S)  # no event reports the change
    raise AssertionError("unreachable")


async def eventually_async(condition: Callable[[], T], what: str = "the condition", within_s: float = LIMIT_S) -> T:
    """`eventually` for coroutines; does not block the event loop."""
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
    """Waits until a thread sleeps in the kernel, which means that it waits for something.

    Args:
        thread: a thread of this process, or a process id for the main thread of that process.
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
    """Waits until all threads of a process have stopped: a SIGSTOP takes effect when one of them next runs."""
    tasks = Path(f"/proc/{pid}/task")

    def stands_still() -> bool:
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir())

    eventually(stands_still, f"process {pid} is stopped", within_s)
