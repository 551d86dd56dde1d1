"""Deadlines of operations, pauses between attempts, and waits for locks.

A call brings its deadline to the callee as the remaining time, and nested calls inherit the earlier of two.

[Note: lost Ctrl-C]
    A signal ends the wait for a lock, but CPython checks for signals, releases the interpreter lock, and only then
    sleeps. A signal that arrives between these steps is not noticed until the sleep ends. On a busy machine that is
    likely, since another thread runs as soon as the interpreter lock is released. So the main thread sleeps in slices.
"""

from __future__ import annotations

import math
import threading
import time
from _thread import LockType, get_ident
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from random import SystemRandom
from typing import Any, Final

from rpcdist.errors import ConfigError
from rpcdist.time_limits import LONGEST_TIMEOUT_S, MIN_WAIT_S, SIGNAL_CHECK_INTERVAL_S

__all__ = ["NEVER", "Deadline", "acquire", "backoff", "checked_timeout", "current_deadline", "longest_sleep_s"]


def checked_timeout(timeout_s: Any, name: str = "timeout", none: str = "write 0 for no limit") -> float:
    """Returns a user's timeout as a float in seconds; NumPy's numbers and tensors of one element count as numbers.

    Args:
        timeout_s: the user's argument.
        name: the name of the argument, for errors.
        none: advice on how to set no limit, for errors.

    Raises:
        TypeError: it is not a number.
        ConfigError: it is negative, not a number of seconds, or longer than `LONGEST_TIMEOUT_S`.
    """
    if isinstance(timeout_s, bool) or not hasattr(timeout_s, "__float__"):
        raise TypeError(f"{name} must be a number of seconds, such as 5 or 0.5, but got {timeout_s!r}")
    seconds = float(timeout_s)
    if math.isnan(seconds):
        raise ConfigError(f"{name} must be a number of seconds, but got nan; {none}")
    if seconds < 0:
        raise ConfigError(f"{name} must be non-negative, got {timeout_s} s; {none}")
    if LONGEST_TIMEOUT_S < seconds < math.inf:
        raise ConfigError(f"{name} of {seconds:g} s is longer than {LONGEST_TIMEOUT_S:g} s; {none}")
    return seconds


def limit_of(timeout_s: float, default_s: float) -> float:
    """A user's timeout with torch's conventions (-1: the default, 0: none) in seconds, infinity for none."""
    return (default_s if timeout_s == -1 else checked_timeout(timeout_s)) or math.inf


class Deadline:
    """A point on the monotonic clock of this process; `at` is in seconds, infinity for no limit."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """The deadline `timeout_s` from now; None, infinity, or more than `LONGEST_TIMEOUT_S` mean no limit."""
        if timeout_s is None or timeout_s > LONGEST_TIMEOUT_S:
            return NEVER
        return cls(time.monotonic() + timeout_s)

    @property
    def is_finite(self) -> bool:
        """Whether there is a limit."""
        return self.at != math.inf

    def remaining_s(self) -> float:
        """The remaining seconds: infinity without a limit, never less than 0."""
        return self.at if self.at == math.inf else max(0.0, self.at - time.monotonic())

    def expired(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.at

    def earlier(self, other: Deadline) -> Deadline:
        """The earlier of two deadlines."""
        return self if self.at <= other.at else other

    def wait_s(self) -> float | None:
        """`remaining_s` in the form that `threading` and `asyncio` take: None without a limit."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())

    def timeout_s(self) -> float:
        """`remaining_s` as the timeout of a call, where 0 means no limit: 0 without a limit, and otherwise more."""
        return 0.0 if self.at == math.inf else max(MIN_WAIT_S, self.at - time.monotonic())

    def __repr__(self) -> str:
        return "Deadline(never)" if self.at == math.inf else f"Deadline({self.remaining_s():.3f} s left)"


NEVER: Final = Deadline(math.inf)
"""The deadline of an operation without a limit."""

current_deadline: ContextVar[Deadline] = ContextVar("rpcdist_deadline", default=NEVER)
"""The deadline of the call that is being handled; `NEVER` outside of handlers."""


_system = SystemRandom()


def backoff(
    first_s: float, longest_s: float, deadline: Deadline = NEVER, random: Callable[[], float] = _system.random
) -> Iterator[float]:
    """Yields pauses of random length in seconds, without end.

    No pause extends beyond the deadline, so that the last attempt is made at the deadline. Full jitter keeps the
    survivors of a failure, or the workers of a job that starts, from trying all at the same time. The randomness comes
    from the system and not from `random`, which users seed, often equally on all workers.

    Args:
        first_s: upper bound of the first pause; it doubles with each pause.
        longest_s: upper bound of all pauses.
        deadline: when the attempts end.
        random: returns a number from 0 to 1.
    """
    bound_s = first_s
    while True:
        yield min(bound_s * random(), deadline.remaining_s())
        bound_s = min(2 * bound_s, longest_s)


def longest_sleep_s() -> float:
    """How long this thread may sleep before it must check for signals, in seconds; see [Note: lost Ctrl-C]."""
    return SIGNAL_CHECK_INTERVAL_S if get_ident() == threading.main_thread().ident else threading.TIMEOUT_MAX


def acquire(lock: LockType, timeout_s: float | None) -> bool:
    """Acquires a lock; False if the time limit expires. On the main thread, Ctrl-C interrupts it at any moment.

    Args:
        timeout_s: limit in seconds; None for none.
    """
    slice_s = longest_sleep_s()
    if timeout_s is not None and timeout_s <= slice_s:
        return lock.acquire(True, max(0.0, timeout_s))
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    while not lock.acquire(True, slice_s if ends_at is None else min(slice_s, max(0.0, ends_at - time.monotonic()))):
        if ends_at is not None and time.monotonic() >= ends_at:
            return False
    return True
