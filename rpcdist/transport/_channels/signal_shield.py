"""Holds signal handlers back while the main thread reads from a connection or sends.

Python runs signal handlers on the main thread, between any two of its instructions. A handler that raises, such as that
of Ctrl-C, could strike when bytes have left the socket and are not stored yet, or are sent and not counted yet. A
handler that makes a call would wait for a reply that the interrupted code below it should read. So while the thread
reads or sends, a handler of ours only notes signals, and raises them again microseconds later. While the thread sleeps
until a message arrives, nothing can be lost, and a signal ends the sleep at once.
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
    """Holds the handlers back between `enter` and `leave`. For the main thread only; not reentrant.

    Attributes:
        num_entered: how many shields are entered; if it is not 0, the handlers are already held back.
        harmless: handlers that neither raise, nor make a call, nor take a lock. They are not held back: replacing one
            and putting it back costs a call 0.7 us.
        is_asleep: True from `fall_asleep` to the end of the sleep; meanwhile a signal raises `SignalNoted`.
    """

    __slots__ = ("_handler", "_known", "_noted", "_replaced", "is_asleep")

    num_entered: ClassVar[int] = 0
    harmless: ClassVar[list[object]] = []

    def __init__(self) -> None:
        self.is_asleep = False
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
        """Holds all handlers back."""
        handlers = tuple(map(getsignal, _NUMBERS))
        if handlers != self._known:
            self._replaced = [
                (number, handler)
                for number, handler in zip(_NUMBERS, handlers, strict=True)
                if callable(handler) and not any(handler is each for each in self.harmless)
            ]
            self._replaced.reverse()  # Ctrl-C is held back last and restored last, when nothing else is left to do
            self._known = handlers
        try:
            for number, _ in self._replaced:
                set_handler(number, self._handler)
        except BaseException:  # raised by the handler of a signal that was not replaced yet
            self._restore()
            raise
        SignalShield.num_entered += 1

    def fall_asleep(self) -> None:
        """Lets signals end the sleep that follows; a signal that came since `enter` ends it at once."""
        self.is_asleep = True
        if self._noted:
            raise SignalNoted

    def leave(self) -> None:
        """Restores all handlers, and runs those whose signals came meanwhile."""
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

    It does not while a shield is entered, nor under `asyncio.run`, whose handler cancels a task. In a notebook it does,
    although an event loop runs there.
    """
    if SignalShield.num_entered:
        return False
    return asyncio._get_running_loop() is None or getsignal(signal.SIGINT) is signal.default_int_handler
