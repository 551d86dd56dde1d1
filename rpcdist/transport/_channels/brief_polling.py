"""Polling a socket for a moment before sleeping on it, where the last waits were short.

A thread that sleeps has to be woken, on a core that has often gone idle meanwhile: in a virtual machine that takes some
70 us, and a call sleeps at both of its ends, while its own work takes 100 us. Who polls is there when the message is.

Polling must not keep a core from others. Between two polls the thread yields: whoever else can run on this core does
so now, and if the peer is on it, the answer is there after that. Where somebody keeps the core for long, or nothing
came, sleeping is better; then the next waits sleep, twice as many each time.

In a container with a limit of processor time nobody polls: that would use up what the work needs, and the system then
stops the process for the rest of a period. `RPCDIST_POLLING=off` has all waits sleep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from time import perf_counter_ns
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.transport._channels.processor_quota import has_processor_quota

__all__ = ["POLLING_VARIABLE", "BriefPolling", "may_poll"]

POLLING_VARIABLE: Final = "RPCDIST_POLLING"

SHORT_NS: Final = 1_000_000
"""A sleep that took less is worth replacing by polls."""
LIMIT_NS: Final = 500_000
"""So long a wait polls before it sleeps."""
LONG_TURN_NS: Final = 500_000
"""Who yields, and is back only after that, is not alone with its peer."""
MIN_PAUSE: Final = 4
"""Waits that sleep after polls in vain, at first."""
MAX_PAUSE: Final = 1024

Ready = list[tuple[int, int]]
"""What `select.poll` returns: descriptors, and what happened there."""


def may_poll() -> bool:
    """What `RPCDIST_POLLING` says, "auto" by default: unless the processor time is limited.

    Raises:
        ConfigError: the variable has another value than there are.
    """
    text = os.environ.get(POLLING_VARIABLE, "auto")
    if text not in ("auto", "off"):
        raise ConfigError(f"{POLLING_VARIABLE} is 'auto' or 'off', not {text!r}")
    return text == "auto" and not _has_quota()


_has_quota: Final = cache(has_processor_quota)


class BriefPolling:
    """Of one socket; used by whoever reads it, and so by one thread at a time.

    Attributes:
        is_worth_it: whether the next wait shall begin with `try_polling`.

    Args:
        poll: polls the socket; its argument is a limit in milliseconds.
        may_poll: if not, `is_worth_it` stays False.
    """

    __slots__ = ("_may_poll", "_num_slept", "_pause", "_poll", "is_worth_it")

    def __init__(self, poll: Callable[[float], Ready], may_poll: bool = True) -> None:
        self._poll = poll
        self._may_poll = may_poll
        self._pause = MIN_PAUSE
        self._num_slept = 0  # that many waits of the pause are over
        self.is_worth_it = False

    def __repr__(self) -> str:
        return f"<BriefPolling [{'polls' if self.is_worth_it else f'sleeps, {self._num_slept} of {self._pause}'}]>"

    def try_polling(self) -> Ready:
        """Polls for `LIMIT_NS` at most.

        Returns:
            What has come. If nothing has, sleep.
        """
        began = now = perf_counter_ns()
        while True:
            ready = self._poll(0)
            if ready:
                if self._pause > MIN_PAUSE:
                    self._pause -= 1
                return ready
            os.sched_yield()
            before, now = now, perf_counter_ns()
            if now - before > LONG_TURN_NS or now - began > LIMIT_NS:
                self.is_worth_it = False
                self._num_slept = 0
                self._pause = min(2 * self._pause, MAX_PAUSE)
                return []

    def slept(self, since_ns: int) -> None:
        """A wait slept, since then by `time.perf_counter_ns`."""
        self._num_slept += 1
        if self._num_slept >= self._pause and perf_counter_ns() - since_ns < SHORT_NS:
            self.is_worth_it = self._may_poll
