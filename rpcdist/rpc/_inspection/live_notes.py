"""Takes the notes that a live view shows: log lines, and spans of pipelines, DDP, backward passes and collectives.

The first request of a live view starts the recording, which ends some time after the last request.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from rpcdist.collectives._group.flight_records import Record
from rpcdist.inspection import LiveNotes, LogLine, SpanFacts
from rpcdist.profile_ranges import span_taps
from rpcdist.time_limits import LIVE_NOTES_S

MAX_LINES: Final = 200
MAX_SPANS: Final = 600
MAX_OPERATIONS: Final = 300
MAX_TEXT: Final = 500
MAX_NAME: Final = 100

N = TypeVar("N", LogLine, SpanFacts)


@dataclass(eq=False, repr=False)
class NoteTaker:
    """Takes the notes of an agent; requests and `stop_if_unused` on the I/O loop, notes on any thread.

    Args:
        is_mine: whether the running code belongs to this agent: several may live in one process.
        pass_taps: the functions that get the spans of each backward pass.
        operations: returns the operations in the flight recorder of collectives.
    """

    _is_mine: Callable[[], bool]
    _pass_taps: list[Callable[[int, Sequence[Any], Sequence[Any]], object]]
    _operations: Callable[[], Iterable[Record]]
    _until: float = 0.0  # 0 while nothing is noted
    _operations_until_ns: int = 0
    _lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    _spans: deque[SpanFacts] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    _ended: deque[SpanFacts] = field(default_factory=lambda: deque(maxlen=MAX_OPERATIONS))

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)

    def since(self, number: int) -> LiveNotes:
        """The notes with larger numbers; recording continues for `LIVE_NOTES_S` seconds."""
        if not self._until:
            self._operations_until_ns = time.time_ns()
            _add_log_tap(self._on_record)
            span_taps.append(self._on_span)
            self._pass_taps.append(self._on_pass)
        self._until = time.monotonic() + LIVE_NOTES_S
        self._note_operations()
        spans = [*_after(self._ended, number), *_after(self._spans, number)]
        return LiveNotes(tuple(_after(self._lines, number)), tuple(spans))

    def stop_if_unused(self, now: float) -> None:
        """Stops recording if the last request is long ago; `now` is in monotonic seconds."""
        if self._until and now >= self._until:
            self.stop()

    def stop(self) -> None:
        """Stops recording, and drops all notes."""
        if not self._until:
            return
        self._until = 0.0
        _remove_log_tap(self._on_record)
        span_taps.remove(self._on_span)
        self._pass_taps.remove(self._on_pass)
        for notes in (self._lines, self._spans, self._ended):
            notes.clear()

    # ------------------------------------------------------------ any thread

    def _on_record(self, record: logging.LogRecord) -> None:
        if self._is_mine():
            number = next(self._numbers)
            line = LogLine(number, record.created, record.levelname, record.name[:MAX_NAME], _text_of(record))
            self._lines.append(line)

    def _on_span(self, lane: str, name: str, began: float, ended: float) -> None:
        if self._is_mine():
            shift_s = time.time() - time.monotonic()
            self._spans.append(SpanFacts(next(self._numbers), lane, name[:MAX_NAME], began + shift_s, ended + shift_s))

    def _on_pass(self, id: int, spans: Sequence[Any], hops: Sequence[Any]) -> None:
        for kind, _, began_s, ended_s in spans:
            self._spans.append(SpanFacts(next(self._numbers), "backward", f"{kind} of pass {id}", began_s, ended_s))

    def _note_operations(self) -> None:
        seen_ns = self._operations_until_ns
        for record in self._operations():
            if record.ended_ns > seen_ns and record.started_ns:
                lane, began_s = f"group {record.group}"[:MAX_NAME], record.started_ns / 1e9
                self._ended.append(
                    SpanFacts(next(self._numbers), lane, record.operation, began_s, record.ended_ns / 1e9)
                )
                self._operations_until_ns = max(self._operations_until_ns, record.ended_ns)


def _after(notes: deque[N], number: int) -> Iterator[N]:
    return (note for note in notes.copy() if note.number > number)


def _text_of(record: logging.LogRecord) -> str:
    """The text of a log record, formatted now: its arguments may change, and must not be kept alive."""
    try:
        text = record.getMessage()
        if record.exc_info and isinstance(error := record.exc_info[1], BaseException):
            text += f": {type(error).__name__}: {error}"
    except Exception:  # a mistake of the program, which its own handlers report
        text = f"a message that cannot be formatted, from {record.pathname}, line {record.lineno}"
    return text[:MAX_TEXT]


# ---------------------------------------------------------------- the log records of this process
#
# They are seen in the factory of records: a handler would change what the program prints, since `logging` prints by
# itself only without handlers, and `basicConfig` does nothing if there is one.

_taps: Final[list[Callable[[logging.LogRecord], object]]] = []
_taps_lock: Final = threading.Lock()
_replaced: Final[list[Callable[..., logging.LogRecord]]] = []
"""The program's own factory while `_make_record` is in its place; otherwise empty."""


def _add_log_tap(tap: Callable[[logging.LogRecord], object]) -> None:
    """Has `tap` called with each log record, on the thread that logs."""
    with _taps_lock:
        _taps.append(tap)
        if not _replaced:
            _replaced.append(logging.getLogRecordFactory())
            logging.setLogRecordFactory(_make_record)


def _remove_log_tap(tap: Callable[[logging.LogRecord], object]) -> None:
    with _taps_lock:
        _taps.remove(tap)
        # If the program has wrapped this factory in one of its own, it stays, and calls no tap.
        if not _taps and logging.getLogRecordFactory() is _make_record:
            logging.setLogRecordFactory(_replaced[0])  # before it is forgotten: other threads log meanwhile
            _replaced.clear()


def _make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = next(iter(_replaced), logging.LogRecord)(*args, **kwargs)
    for tap in list(_taps):
        tap(record)
    return record
