"""Calls of NCCL that wait for other ranks and cannot be ended: they get a thread of their own and a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveTimeout

T = TypeVar("T")


def call_bounded(call: Callable[[], T], deadline: Deadline, what: str) -> T:
    """Returns what the call returns, or raises what it raises.

    Args:
        call: may block for ever.
        deadline: limit of the wait for it.
        what: names the call in errors.

    Raises:
        CollectiveTimeout: the call did not come back in time; it goes on, on a thread that lets the process end.
    """
    attempt = _Attempt(call, what)
    attempt.start()
    attempt.join(min(deadline.remaining_s(), threading.TIMEOUT_MAX))
    if attempt.is_alive():
        raise CollectiveTimeout(what, "NCCL did not come back in time, and cannot be ended: end this process")
    return attempt.result()


class _Attempt(threading.Thread, Generic[T]):
    """The thread of one call; a daemon, so that the process can end while it runs."""

    def __init__(self, call: Callable[[], T], what: str) -> None:
        super().__init__(name=f"rpcdist {what}", daemon=True)
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as exc:  # raised where the result is wanted
            self._error = exc

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]
