"""The I/O loop, as the parts of a worker see it, and functions that are called on it later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol


class IoThread(Protocol):
    """The event loop on which everything of the network runs, and its thread."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; to be used on its thread only."""

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Has a function called on the loop soon; any thread."""

    def spawn(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Starts a task on the loop; on its thread only."""


class Timer:
    """Has a function called on the I/O loop later, so it must be short; any thread may make and cancel it.

    Args:
        delay_s: in seconds.
    """

    __slots__ = ("_function", "_handle", "_io")

    def __init__(self, io: IoThread, delay_s: float, function: Callable[[], object]) -> None:
        self._io = io
        self._function: Callable[[], object] | None = function
        self._handle: asyncio.TimerHandle | None = None
        io.call_soon(self._start, delay_s)

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
