"""The flight recorder of calls: the last calls that a worker has made and served, and how they ended.

A call appends one row to a queue of a fixed length, in a single step that needs no lock. The row that falls out at the
other end gives its memory to the next one, so the recorder allocates nothing once it is full.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Final, NamedTuple

from rpcdist._counters import OK, EndedCall
from rpcdist.inspection import FunctionTimes

MAX_NAME_CHARS: Final = 500

Row = EndedCall


class RecordedCall(NamedTuple):
    """A call that has ended: a row, and whether the call was served here; otherwise it was made here."""

    id: int
    peer: int
    function: str
    began: float
    ended: float
    outcome: str
    is_served: bool


def _times_of(function: str, served: bool, calls: list[RecordedCall]) -> FunctionTimes:
    times_s = [call.ended - call.began for call in calls]
    failed = sum(call.outcome != OK for call in calls)
    return FunctionTimes(function, served, len(calls), failed, median(times_s), max(times_s))


class EndedCalls:
    """Those that are told of each call that has ended: the recorder, metrics, traces. Any thread may call any method.

    Args:
        recorder: takes the rows, if there is one.

    Attributes:
        note: takes a row; None if nobody wants to be told.
    """

    __slots__ = ("_listeners", "_lock", "note")

    def __init__(self, recorder: Callable[[Row], object] | None) -> None:
        self._listeners = [] if recorder is None else [recorder]
        self._lock = threading.Lock()
        self.note = recorder

    def add(self, listener: Callable[[Row], object]) -> Callable[[], None]:
        """Has a function called with the row of each call; returns what ends that."""
        with self._lock:
            self._listeners.append(listener)
            self._set()
        return partial(self._remove, listener)

    def _remove(self, listener: Callable[[Row], object]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            self._set()

    def _set(self) -> None:
        listeners = tuple(self._listeners)

        def tell_all(row: Row) -> None:
            for listener in listeners:
                listener(row)

        self.note = tell_all if len(listeners) > 1 else listeners[0] if listeners else None


class CallRecorder:
    """One per agent; any thread may write, and any may read.

    Args:
        size: how many calls are remembered, of those made and of those served.

    Attributes:
        made: takes the row of a call that was made here and has ended.
        served: the same of a call that was served here.
    """

    def __init__(self, size: int) -> None:
        self._made: deque[Row] = deque(maxlen=size)
        self._served: deque[Row] = deque(maxlen=size)
        self.made: Callable[[Row], None] = self._made.append
        self.served: Callable[[Row], None] = self._served.append

    def times(self, most: int) -> tuple[FunctionTimes, ...]:
        """How long the calls took, for each function; the functions with the most calls."""
        found: dict[tuple[str, bool], list[RecordedCall]] = {}
        for call in self:
            found.setdefault((call.function, call.is_served), []).append(call)
        largest = sorted(found.items(), key=lambda item: -len(item[1]))[:most]
        return tuple(_times_of(function[:MAX_NAME_CHARS], served, calls) for (function, served), calls in largest)

    def __iter__(self) -> Iterator[RecordedCall]:
        """The calls, in the order in which they ended."""
        found = [
            RecordedCall(id, peer, str(function), began, ended, outcome, rows is self._served)
            for rows in (self._made, self._served)
            for id, peer, function, began, ended, outcome, _ in rows.copy()
        ]
        return iter(sorted(found, key=lambda call: call.ended))
