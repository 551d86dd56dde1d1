"""Calls of an actor's methods, numbered in the order in which this worker makes them.

A call gets its number before it is encoded and sent. Either step may fail, and a sent call may be lost with its
connection; the owner must not wait for such a number. Once no earlier call is open, the *floor* of later calls tells
the owner. If later calls are already open, a message does, which is retried until it arrives or the owner is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc.future import Future

ReportEnded = Callable[[int, tuple[int, ...]], Future[Any]]
"""Sends the owner the (stream, numbers) of ended calls."""


class CallOrder:
    """Numbers this process's calls of one actor; thread-safe.

    Args:
        stream: the id of this sequence of numbers; higher than that of any earlier `CallOrder` for the same actor.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # guards the rest; never held while sending
        self._next = 0
        self._open: dict[int, None] = {}
        self._over: list[int] = []  # not reported yet
        self._is_reporting = False

    def begin(self) -> CallNumber:
        """Numbers a call; `end` must follow."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = None
            return CallNumber(self._stream, number, next(iter(self._open)))

    def end(self, number: int, is_answered: bool, report: ReportEnded) -> None:
        """Records that a call has ended.

        Args:
            is_answered: whether the owner has returned a result, and so has certainly seen the call.
            report: called if the owner might still wait for this number.
        """
        with self._lock:
            del self._open[number]
            if not self._open:
                self._over.clear()  # the floor of the next call reports them
            elif not is_answered:
                self._over.append(number)
            if not self._over or self._is_reporting:
                return
            self._is_reporting = True
        self._report(report)

    def _report(self, report: ReportEnded) -> None:
        with self._lock:
            if not self._over:
                self._is_reporting = False
                return
            numbers, self._over = tuple(self._over), []
        try:
            sent = report(self._stream, numbers)
        except Exception:  # the owner is lost, or RPC shuts down: then the open calls fail anyway
            with self._lock:
                self._is_reporting = False
            return
        sent.is_quiet = True
        sent._when_done(lambda _: self._report(report))
