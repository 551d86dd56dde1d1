"""Polling a socket for a moment before sleeping on it, where the last waits were short.

A thread that sleeps has to be woken, on a core that has often gone idle meanwhile: in a virtual machine that takes some
70 us, and a call sleeps at both of its ends, while its own work takes 100 us. Who polls is there when the message is.

Polling must not keep a core from others. Between two polls the thread yields: whoever else can run on this core does
so now, and if the peer is on it, the answer is there after that. Where somebody keeps the core for long, or nothing
came, sleeping is better; then the next waits sleep, twice as many each time and half as many after each success.

The two failures are not alike. Where others want the core, polls fail again and again, and each costs a time slice:
the pause grows long. Where nothing came, only an idle core was kept awake; and two ends that both sleep take so long
to answer that the polls of either fail, so a long pause would keep both of them asleep for thousands of calls.
A virtual core that its host took away for a moment is neither: the thread is late, and nobody else has run.

In a container with a limit of processor time nobody polls: that would use up what the work needs, and the system then
stops the process for the rest of a period. `RPCDIST_POLLING=off` has all waits sleep.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter_ns
from typing import Any, Final

from rpcdist.errors import ConfigError
from rpcdist.transport._channels.processor_quota import has_processor_quota

__all__ = ["POLLING_VARIABLE", "BriefPolling", "may_poll"]

POLLING_VARIABLE: Final = "RPCDIST_POLLING"

SHORT_NS: Final = 1_000_000
"""A sleep that took less is worth replacing by polls."""
LIMIT_NS: Final = 1_000_000
"""So long a wait polls before it sleeps: as long as the sleeps that it replaces."""
LONG_TURN_NS: Final = 500_000
"""Who yields to somebody, and is back only after that, is not alone with its peer."""
MIN_PAUSE: Final = 4
"""Waits that sleep after polls in vain, at first."""
MAX_PAUSE: Final = 16
"""Where nothing came."""
MAX_PAUSE_CROWDED: Final = 1024
"""Where others kept the core."""

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


_usage: Final[Callable[[], tuple[Any, ...]]] = partial(resource.getrusage, resource.RUSAGE_THREAD)
SWITCHES: Final = slice(14, 16)
"""Of the usage: how often this thread gave its core, or the interpreter, to another one of this system."""

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
        is_robbed = False
        switches: tuple[Any, ...] = ()
        while True:
            ready = self._poll(0)
            if ready:
                if self._pause > MIN_PAUSE:
                    self._pause //= 2
                return ready
            if not switches:
                switches = _usage()[SWITCHES]
            os.sched_yield()
            before, now = now, perf_counter_ns()
            if now - before > LONG_TURN_NS:
                if is_robbed or _usage()[SWITCHES] != switches:
                    self._pause_for(MAX_PAUSE_CROWDED)
                    return []
                is_robbed = True
                began += now - before
            if now - began > LIMIT_NS:
                self._pause_for(MAX_PAUSE)
                return []
            switches = _usage()[SWITCHES]

    def _pause_for(self, limit: int) -> None:
        """The next waits sleep: twice as many as the last time, up to a limit that lengthens only."""
        self.is_worth_it = False
        self._num_slept = 0
        self._pause = max(self._pause, min(2 * self._pause, limit))

    def slept(self, since_ns: int) -> None:
        """A wait slept, since then by `time.perf_counter_ns`."""
        self._num_slept += 1
        if self._num_slept >= self._pause and perf_counter_ns() - since_ns < SHORT_NS:
            self.is_worth_it = self._may_poll
