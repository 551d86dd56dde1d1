"""How a thread waits for a socket: it polls for a moment before it sleeps, and signal handlers are deferred meanwhile.

[Note: brief polling]
Waking a sleeping thread on a core that often goes idle takes about 70 us in a virtual machine. A call sleeps at
both ends, while its own work takes 100 us. A thread that polls sees the message as soon as it arrives.

Programs repeat themselves, so their waits have a rhythm: in a training loop the replies to one step's calls come soon,
and the first call of the next step does not. The last waits, short or long, therefore predict the next one, as in a
processor's branch predictor. Each history of `HISTORY_WAITS` waits has a counter from 0 to 3: a short wait after this
history increments it, a long one decrements it, and the next wait polls if the counter is at least 2. A single
exception changes nothing.

Polling must not keep a core from other threads. The thread yields between two polls, so that other threads can run on
this core; if the peer runs there, its reply is ready afterwards. If another thread keeps the core for long, sleeping is
better: the next waits then sleep, twice as many after each such failure and half as many after each success. If no
message arrived in time, polling only kept an idle core awake, and the history records a long wait. If the host took the
virtual core away for a moment, neither applies: the thread is late, although no other thread has run.

In a container with a processor limit no thread polls: polling would use up the quota, and the system would stop the
process for the rest of the period. With `RPCDIST_POLLING=off` all waits sleep.

[Note: signals]
Python runs signal handlers on the main thread, between any two of its instructions. A handler that raises, such as that
of Ctrl-C, could run when bytes have left the socket and are not stored yet, or are sent and not counted yet. A handler
that makes a call would wait for a reply that the interrupted code below it should read. So while the thread reads or
sends, an internal handler only records signals, and raises them again microseconds later. While the thread sleeps until
a message arrives, nothing can be lost, and a signal ends the sleep at once.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # `signal.getsignal` makes an enum of every handler
from _signal import signal as set_handler
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, ClassVar, Final

from rpcdist.errors import ConfigError

_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def has_processor_quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> bool:
    """Whether a control group of this process limits its processor time, as in a container with a CPU limit.

    The kernel's documentation of control groups describes `cpu.max` (version 2) and `cpu.cfs_quota_us` (version 1).

    Args:
        groups: the file that lists this process's control groups.
        mount: the mount point of the control groups.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return False
    return any(_group_has_quota(line, mount) for line in lines)


def _group_has_quota(line: str, mount: Path) -> bool:
    number, _, rest = line.partition(":")
    controllers, _, group = rest.partition(":")
    if number == "0":
        folder, name = mount, "cpu.max"
    elif "cpu" in controllers.split(","):
        folder, name = mount / "cpu", "cpu.cfs_quota_us"
    else:
        return False
    inner = Path(group.strip("/"))
    return any(_is_limited(folder / part / name) for part in (inner, *inner.parents))


def _is_limited(limit: Path) -> bool:
    try:
        first = limit.read_text().split()[0]
    except (OSError, IndexError):  # there is no limit of this kind
        return False
    return first.isdigit()  # else "max", or -1


POLLING_VARIABLE: Final = "RPCDIST_POLLING"

HISTORY_WAITS: Final = 6
"""Length of a history. In a training step, the caller waits for three replies, and the callee for three calls, one of
which comes late."""
SHORT_NS: Final = 1_000_000
"""Polling replaces sleeps that are shorter than this."""
LIMIT_NS: Final = 1_000_000
"""A wait polls for this time before it sleeps: as long as the sleeps that it replaces."""
LONG_TURN_NS: Final = 500_000
"""If a yield takes longer than this, a thread other than the peer's used the core."""
MIN_PAUSE: Final = 4
"""After other threads have used the core, at least twice as many waits sleep."""
MAX_PAUSE: Final = 1024
"""The longest such pause, in waits."""
_LAST_HISTORY: Final = (1 << HISTORY_WAITS) - 1

Ready = list[tuple[int, int]]
"""The result of `select.poll`: descriptors and their events."""


def may_poll() -> bool:
    """Whether waits for messages may poll: `is_polling_on`, and the processor time is not limited."""
    return is_polling_on() and not _has_quota()


def is_polling_on() -> bool:
    """Whether `RPCDIST_POLLING` is not "off". Raises `ConfigError` if it has an unknown value."""
    text = os.environ.get(POLLING_VARIABLE, "auto")
    if text not in ("auto", "off"):
        raise ConfigError(f"{POLLING_VARIABLE} must be 'auto' or 'off', but it is {text!r}")
    return text == "auto"


_usage: Final[Callable[[], tuple[Any, ...]]] = partial(resource.getrusage, resource.RUSAGE_THREAD)
SWITCHES: Final = slice(14, 16)
"""The two fields of the usage that count how often this thread gave its core to another thread of this system."""

_has_quota: Final = cache(has_processor_quota)


@dataclass(slots=True, eq=False, repr=False)
class BriefPolling:
    """Decides for one socket whether a wait polls first. Only the thread that reads the socket uses it.

    Attributes:
        is_worth_it: whether the next wait should begin with `try_polling`.
        num_polled: waits that ended while polling.
        num_in_vain: waits that polled, but then slept.

    Args:
        poll: polls the socket; its argument is a limit in milliseconds.
        may_poll: if False, `is_worth_it` stays False.
    """

    poll: Callable[[float], Ready]
    may_poll: bool = True
    is_worth_it: bool = False
    num_polled: int = 0
    num_slept: int = 0
    num_in_vain: int = 0
    _counts: bytearray = field(default_factory=lambda: bytearray([1]) * (_LAST_HISTORY + 1))  # of each history
    _history: int = 0  # one bit for each of the last waits, 1 for a short one; the lowest bit is the last wait
    _pause: int = MIN_PAUSE
    _rest: int = 0  # the waits of the pause that are left
    _was_long: bool = False  # whether the wait that is about to sleep has polled for the whole limit
    _is_steady: bool = False  # True if another short wait would change nothing

    def try_polling(self) -> Ready:
        """Polls for at most `LIMIT_NS`.

        Returns:
            The events that arrived; if the list is empty, the caller sleeps.
        """
        began = now = perf_counter_ns()
        was_preempted = False
        switches: tuple[Any, ...] = ()
        while True:
            ready = self.poll(0)
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
                if was_preempted or _usage()[SWITCHES] != switches:
                    self._rest = self._pause = min(2 * self._pause, MAX_PAUSE)
                    break
                was_preempted = True
                began += now - before
            if now - began > LIMIT_NS:
                self._was_long = True
                break
            switches = _usage()[SWITCHES]
        self.is_worth_it = False
        self.num_in_vain += 1
        return []

    def slept(self, since_ns: int) -> None:
        """Records a wait that slept since `since_ns` (`time.perf_counter_ns`), perhaps after `try_polling`."""
        self.num_slept += 1
        if self._rest:
            self._rest -= 1
        was_long, self._was_long = self._was_long, False
        self._note(not was_long and perf_counter_ns() - since_ns < SHORT_NS)

    def _note(self, is_short: bool) -> None:
        """Adds a wait to the history and updates its counter."""
        counts, history = self._counts, self._history
        count = counts[history]
        if is_short:
            counts[history] = min(count + 1, 3)
        else:
            counts[history] = max(count - 1, 0)
        self._history = history = (history << 1 | is_short) & _LAST_HISTORY
        self._is_steady = history == _LAST_HISTORY and counts[history] == 3
        self.is_worth_it = self.may_poll and not self._rest and counts[history] > 1


_NAMES: Final = (
    "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGCHLD",
    "SIGCONT", "SIGTSTP", "SIGIO", "SIGWINCH",
)  # fmt: skip
_NUMBERS: Final = tuple(int(signal.Signals[name]) for name in _NAMES)


class SignalNoted(BaseException):
    """Ends a sleep because a signal has arrived; it never leaves this package."""


class SignalShield:
    """Defers signal handlers between `enter` and `leave`, which are for the main thread only; not reentrant.

    Attributes:
        num_entered: the number of entered shields; if it is not 0, the handlers are already deferred.
        harmless: handlers that neither raise, nor make a call, nor take a lock. They are not deferred: replacing one
            and restoring it costs a call 0.7 us.
        is_asleep: True from `fall_asleep` to the end of the sleep; meanwhile a signal raises `SignalNoted`.
    """

    __slots__ = ("_handler", "_known", "_main", "_noted", "_replaced", "is_asleep")

    num_entered: ClassVar[int] = 0
    harmless: ClassVar[list[object]] = []

    def __init__(self) -> None:
        self.is_asleep = False
        self._main = threading.main_thread().ident
        self._handler = self._note  # one object, so that `_restore` recognises it
        self._noted: list[int] = []
        self._known: tuple[object, ...] = ()  # the handlers at the last `enter`
        self._replaced: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []  # the handlers that are functions

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if self.is_asleep:
            self.is_asleep = False  # once
            raise SignalNoted

    def enter(self) -> None:
        """Defers all handlers."""
        handlers = tuple(map(getsignal, _NUMBERS))
        if handlers != self._known:
            self._replaced = [
                (number, handler)
                for number, handler in zip(_NUMBERS, handlers, strict=True)
                if callable(handler) and not any(handler is each for each in self.harmless)
            ]
            self._replaced.reverse()  # Ctrl-C is deferred last and restored last, when nothing else is left to do
            self._known = handlers
        try:
            for number, _ in self._replaced:
                set_handler(number, self._handler)
        except BaseException:  # raised by the handler of a signal that was not replaced yet
            self._restore()
            raise
        SignalShield.num_entered += 1

    def run(self, act: Callable[[], object]) -> None:
        """Calls `act`, with all handlers deferred if this is the main thread and they may raise here; any thread."""
        if get_ident() != self._main or not may_raise_here():
            act()
            return
        self.enter()
        try:
            act()
        finally:
            self.leave()

    def fall_asleep(self) -> None:
        """Lets signals end the sleep that follows; a signal that arrived since `enter` ends it at once."""
        self.is_asleep = True
        if self._noted:
            raise SignalNoted

    def leave(self) -> None:
        """Restores all handlers, and runs those whose signals arrived meanwhile."""
        SignalShield.num_entered -= 1
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._replaced:
            if getsignal(number) is self._handler:
                set_handler(number, handler)
        if self._noted:
            self._raise_noted()

    def _raise_noted(self) -> None:
        if self._noted:
            number = self._noted.pop(0)
            try:
                signal.raise_signal(number)  # its own handler runs now, and may raise
            finally:
                self._raise_noted()


def may_raise_here() -> bool:
    """Whether Ctrl-C may raise in the calling code, on the main thread.

    It may not while a shield is entered, nor under `asyncio.run`, whose handler cancels a task. It may in a notebook,
    although an event loop runs there.
    """
    if SignalShield.num_entered:
        return False
    return asyncio._get_running_loop() is None or getsignal(signal.SIGINT) is signal.default_int_handler
