"""Several threads that do the same at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from rpcdist.testing import wait_until_asleep

__all__ = ["LIMIT_S", "WatchedThreads", "problems_of_threads"]

LIMIT_S = 100.0


class WatchedThreads(ThreadPoolExecutor):
    """A pool whose calls block."""

    def all_asleep(self) -> None:
        """Waits until the calls have come to the point where they wait."""
        for thread in self._threads:
            wait_until_asleep(thread)


def problems_of_threads(work: Callable[[int], Iterable[str]], num_threads: int) -> list[str]:
    """The errors of threads that were started together: their results, their exceptions, and threads that hang.

    Args:
        work: gets the thread's number, and yields what it finds wrong.
        num_threads: how many there are.
    """
    problems: list[str] = []

    def run(number: int) -> None:
        try:
            problems.extend(work(number))
        except BaseException as exc:
            problems.append(repr(exc))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        if thread.is_alive():
            problems.append("a thread hangs")
    return problems
