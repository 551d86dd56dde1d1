"""Holds signal handlers back while the main thread reads from a connection, or sends.

Python runs the handlers of signals on the main thread, between any two of its instructions. One that raises, as that of
Ctrl-C does, could strike when bytes have left the socket and are stored nowhere yet, or have gone out and are not
counted yet. One that makes a call of its own would wait for a reply that the interrupted code below it should read. So
while a thread reads or sends, a handler of ours only notes signals; they are raised again when that is over,
microseconds later. Where the thread sleeps until something arrives, nothing can be lost, and there a signal ends the
sleep at once.
"""

from __future__ import annotations

import asyncio
import signal
from _signal import getsignal  # type: ignore[import-not-found]  # those of `signal` make an enum of every handler
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final

_NAMES: Final = (
    "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGCHLD",
    "SIGCONT", "SIGTSTP", "SIGIO", "SIGWINCH",
)  # fmt: skip
_NUMBERS: Final = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class SignalNoted(BaseException):
    """Ends a sleep because a signal has come; it never leaves this package."""


class SignalShield:
    """For the main thread only, and not to be entered twice.

    Attributes:
        num_entered: of all shields; where it is not 0, the handlers are held back already.
        is_asleep: set by `fall_asleep`, and unset after the sleep: then a signal raises `SignalNoted` there.
    """

    __slots__ = ("_handler", "_known", "_noted", "_replaced", "is_asleep")

    num_entered: ClassVar[int] = 0

    def __init__(self) -> None:
        self.is_asleep = False
        self._handler = self._note  # the same object each time, so that it can be recognised
        self._noted: list[int] = []
        self._known: tuple[object, ...] = ()  # the handlers when it was entered last
        self._replaced: list[
            tuple[int, Callable[[int, FrameType | None], Any]]
        ] = []  # those of them that are functions

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if self.is_asleep:
            self.is_asleep = False  # once
            raise SignalNoted

    def enter(self) -> None:
        """Holds all handlers back."""
        handlers = tuple(map(getsignal, _NUMBERS))
        if handlers != self._known:
            self._replaced = [(n, handler) for n, handler in zip(_NUMBERS, handlers, strict=True) if callable(handler)]
            self._replaced.reverse()  # Ctrl-C is held back last, and let through last: nothing is left to be done then
            self._known = handlers
        try:
            for number, _ in self._replaced:
                set_handler(number, self._handler)
        except BaseException:  # the handler of another signal raised it, which was not replaced yet
            self._restore()
            raise
        SignalShield.num_entered += 1

    def fall_asleep(self) -> None:
        """From now on a signal ends the sleep; so does one that has come since `enter`."""
        self.is_asleep = True
        if self._noted:
            raise SignalNoted

    def leave(self) -> None:
        """Lets all handlers run, and has those run now whose signals have come meanwhile."""
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
    """Whether Ctrl-C may strike in the code that asks, on the main thread.

    It does not where a shield is up, nor under `asyncio.run`, whose handler cancels a task. In a notebook it does,
    though an event loop runs there.
    """
    if SignalShield.num_entered:
        return False
    return asyncio._get_running_loop() is None or getsignal(signal.SIGINT) is signal.default_int_handler
