"""Waiting for facts about other processes that no event reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rpcdist.testing.limits import LIMIT_S

__all__ = ["eventually"]

POLL_S = 0.005

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
    limit = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < limit, f"not within {within_s} s: {what}; the last value was {value!r}"
        time.sleep(POLL_S)  # the one place where tests sleep: nothing tells this process of the change
    return value
