"""Polling a socket for a moment before sleeping on it, where the wait will probably be short.

A thread that sleeps has to be woken, on a core that has often gone idle meanwhile: in a virtual machine that takes some
70 us, and a call sleeps at both of its ends, while its own work takes 100 us. Who polls is there when the message is.

The waits of a program that repeats itself have a rhythm: in a training loop the answers to a step's calls come soon,
and the first call of the next step does not. So what the last waits were like, short or long, says what the next one is
like, as with the branches of a processor: for each history of `HISTORY_WAITS` waits a number of 0 to 3 is counted up by
a short wait that follows it, and down by a long one, and from 2 on such a wait polls. One exception changes nothing.

Polling must not keep a core from others. Between two polls the thread yields: whoever else can run on this core does
so now, and if the peer is on it, the answer is there after that. Where somebody keeps the core for long, sleeping is
better; then the next waits sleep, twice as many each time and half as many after each success. Where nothing came in
time, only an idle core was kept awake, and the history knows of one more long wait. A virtual core that its host took
away for a moment is neither: the thread is late, and nobody else has run.

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

POLLING_VARIABLE: Final = "RPCDIST_POLLING"

HISTORY_WAITS: Final = 6
"""So many waits tell the rhythm: a training step waits for three answers at its caller, and for three calls at the
callee, one of which comes late."""
SHORT_NS: Final = 1_000_000
"""A sleep that took less is worth replacing by polls."""
LIMIT_NS: Final = 1_000_000
"""So long a wait polls before it sleeps: as long as the sleeps that it replaces."""
LONG_TURN_NS: Final = 500_000
"""Who yields to somebody, and is back only after that, is not alone with its peer."""
MIN_PAUSE: Final = 4
"""Half as many waits sleep at least after others kept the core."""
MAX_PAUSE: Final = 1024
"""And so many at most."""
_LAST_HISTORY: Final = (1 << HISTORY_WAITS) - 1

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
        num_polled: the waits whose end a poll has seen.
        num_slept: the waits that slept.
        num_in_vain: those of them that had polled before.

    Args:
        poll: polls the socket; its argument is a limit in milliseconds.
        may_poll: if not, `is_worth_it` stays False.
    """

    __slots__ = (
        "_counts",
        "_history",
        "_is_steady",
        "_may_poll",
        "_pause",
        "_poll",
        "_rest",
        "_was_long",
        "is_worth_it",
        "num_in_vain",
        "num_polled",
        "num_slept",
    )

    def __init__(self, poll: Callable[[float], Ready], may_poll: bool = True) -> None:
        self._poll = poll
        self._may_poll = may_poll
        self._counts = bytearray([1]) * (_LAST_HISTORY + 1)  # of each history
        self._history = 0  # a bit for each of the last waits, the last one lowest: 1 for a short one
        self._pause = MIN_PAUSE
        self._rest = 0  # so many waits of the pause are left
        self._was_long = False  # the wait that is about to sleep, before that
        self._is_steady = False  # another short wait changes nothing
        self.is_worth_it = False
        self.num_polled = self.num_slept = self.num_in_vain = 0

    def __repr__(self) -> str:
        state = "polls" if self.is_worth_it else f"sleeps, {self._rest} to go" if self._rest else "sleeps"
        return f"<BriefPolling [{state}], {self.num_polled} waits polled, {self.num_slept} slept>"

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
                self.num_polled += 1
                if not self._is_steady:
                    self._note(True)
                return ready
            if not switches:
                switches = _usage()[SWITCHES]
            os.sched_yield()
            before, now = now, perf_counter_ns()
            if now - before > LONG_TURN_NS:
                if is_robbed or _usage()[SWITCHES] != switches:
                    self._rest = self._pause = min(2 * self._pause, MAX_PAUSE)
                    break
                is_robbed = True
                began += now - before
            if now - began > LIMIT_NS:
                self._was_long = True
                break
            switches = _usage()[SWITCHES]
        self.is_worth_it = False
        self.num_in_vain += 1
        return []

    def slept(self, since_ns: int) -> None:
        """A wait slept, since then by `time.perf_counter_ns`; `try_polling` may have come before."""
        self.num_slept += 1
        if self._rest:
            self._rest -= 1
        was_long, self._was_long = self._was_long, False
        self._note(not was_long and perf_counter_ns() - since_ns < SHORT_NS)

    def _note(self, is_short: bool) -> None:
        """What a wait was like."""
        counts, history = self._counts, self._history
        count = counts[history]
        if is_short:
            counts[history] = min(count + 1, 3)
        else:
            counts[history] = max(count - 1, 0)
        self._history = history = (history << 1 | is_short) & _LAST_HISTORY
        self._is_steady = history == _LAST_HISTORY and counts[history] == 3
        self.is_worth_it = self._may_poll and not self._rest and counts[history] > 1
