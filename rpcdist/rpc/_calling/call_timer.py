"""Wakes the table of calls when the next deadline passes: one timer on the I/O loop for all calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rpcdist.rpc._executors.io_thread import IoThread


class CallTimer:
    """One per agent.

    Args:
        io: the I/O loop.
        expire: called on it when a time has come; it asks for the next.
    """

    def __init__(self, io: IoThread, expire: Callable[[], None]) -> None:
        self._io = io
        self._expire = expire
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0  # kept here: for a time that has passed, uvloop returns a handle that does not know it

    def wake_at(self, at: float) -> None:
        """Asks to be woken at a time, in seconds of the monotonic clock; any thread."""
        self._io.call_soon(self._arm, at)

    def _arm(self, at: float) -> None:
        loop = self._io.loop
        when = loop.time() + at - time.monotonic()
        if self._handle is not None and not self._handle.cancelled() and loop.time() < self._at <= when:
            return
        self.stop()
        self._handle, self._at = loop.call_at(when, self._fire), when

    def _fire(self) -> None:
        self._handle = None
        self._expire()

    def stop(self) -> None:
        """On the I/O loop."""
        if self._handle is not None:
            self._handle.cancel()
