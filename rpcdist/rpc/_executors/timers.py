"""Functions that are called later, on the I/O loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rpcdist.rpc._executors.io_thread import IoThread


class Timer:
    """One function that waits for its time."""

    __slots__ = ("_function", "_handle", "_io")

    def __init__(self, io: IoThread, function: Callable[[], object]) -> None:
        self._io = io
        self._function: Callable[[], object] | None = function
        self._handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """The function is not called any more, unless it is being called; any thread, any number of times."""
        if self._function is not None:
            self._function = None
            self._io.call_soon(self._stop)

    def _start(self, delay_s: float) -> None:
        if self._function is not None:
            self._handle = self._io.loop.call_later(delay_s, self._fire)

    def _stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


class Timers:
    """Starts timers; any thread may use it.

    Args:
        io: the thread that calls the functions, so they must be short.
    """

    def __init__(self, io: IoThread) -> None:
        self._io = io

    def __repr__(self) -> str:
        return f"<Timers on {self._io!r}>"

    def call_later(self, delay_s: float, function: Callable[[], object]) -> Timer:
        """Has `function` called on the I/O loop in `delay_s` seconds."""
        timer = Timer(self._io, function)
        self._io.call_soon(timer._start, delay_s)
        return timer
