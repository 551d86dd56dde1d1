"""Counts and histograms of a process, which `rpcdist.metrics` reads, and curves that the program publishes.

Nothing is counted before metrics are requested. The number of labels is bounded, since peers choose the names of
functions and errors: names beyond the limits, and names that never led to a result, are counted as `OTHER`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from rpcdist.errors import ConfigError
from rpcdist.inspection.facts import CurveFacts

OK: Final = "ok"
"""The outcome of a successful call."""

OTHER: Final = "_OTHER"
"""The label that OpenTelemetry uses for values without a label of their own."""

BUCKET_BOUNDS: Final = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""The upper bounds of a histogram's buckets, in seconds; the last bucket has all longer times."""

METRICS_VARIABLE: Final = "RPCDIST_METRICS"

MAX_NAMES: Final = 200
MAX_NAME_LENGTH: Final = 200
MAX_ERRORS: Final = 50
_FOLDED_FROM: Final = 64  # number of ended calls after which a thread adds them up
E = TypeVar("E")

Kind = Literal["counter", "gauge", "histogram"]
"""The kinds of metrics."""

EndedCall = tuple[int, int, object, float, float, str, float]
"""A call that has ended: its number at its caller, the id of the other worker, what was called, begin and end in
seconds of the monotonic clock, the outcome (`OK`, or the name of an error, perhaps with its text behind a colon), and
when its function was called; 0 at its caller, and if the function was never called."""


def metrics_are_wanted() -> bool:
    """Whether the environment asks for metrics, or the program has imported the module that serves them."""
    return bool(os.environ.get(METRICS_VARIABLE)) or "rpcdist.metrics" in sys.modules


class Histogram:
    """A histogram of durations; not thread-safe.

    Attributes:
        counts: the numbers of the buckets: one for each of `BUCKET_BOUNDS`, and one for longer times.
        total_s: the sum of all times, in seconds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKET_BOUNDS) + 1)
        self.total_s = 0.0

    def add(self, time_s: float) -> None:
        """Adds a duration."""
        self.counts[bisect_left(BUCKET_BOUNDS, time_s)] += 1
        self.total_s += time_s

    def copy(self) -> Histogram:
        """A copy, which later additions do not change."""
        made = Histogram()
        made.counts, made.total_s = list(self.counts), self.total_s
        return made


@dataclass(eq=False, repr=False)
class Histograms(Generic[E]):
    """Histograms of durations by label, from events that have ended. Any thread, and any signal handler, may note one.

    [Note: folding] An event is appended to a deque, which is atomic and takes no lock: a signal handler may make calls
    while the interrupted thread holds the lock. Every `_fold_from` events, and for each reader, the waiting events are
    added up under a lock, which `note` only tries to take.

    Args:
        read: returns the labels of an event and its duration in seconds; None if it has not ended, and must wait for
            the next reading.
        max_waiting: limit of the waiting events; the oldest ones beyond it are not counted.
    """

    _read: Callable[[E], tuple[tuple[str, ...], float] | None]
    _fold_from: int = _FOLDED_FROM
    max_waiting: InitVar[int | None] = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)

    def __post_init__(self, max_waiting: int | None) -> None:
        self._waiting: deque[E] = deque(maxlen=max_waiting)

    def note(self, event: E) -> None:
        self._waiting.append(event)
        if len(self._waiting) >= self._fold_from and self._lock.acquire(False):
            try:
                self._fold()
            finally:
                self._lock.release()

    def histograms(self) -> dict[tuple[str, ...], Histogram]:
        """The histograms by labels."""
        with self._lock:
            self._fold()
            return {labels: histogram.copy() for labels, histogram in self._histograms.items()}

    def _fold(self) -> None:
        for _ in range(len(self._waiting)):
            event = self._waiting.popleft()
            found = self._read(event)
            if found is None:
                self._waiting.append(event)
                continue
            labels, time_s = found
            histogram = self._histograms.get(labels)
            if histogram is None:
                histogram = self._histograms[labels] = Histogram()
            histogram.add(time_s)


def call_histograms(
    are_peers_names: bool, observe: Callable[[str, str, float], object] | None = None
) -> Histograms[EndedCall]:
    """Returns histograms of calls by function and error, which is empty for successful calls.

    Args:
        are_peers_names: whether peers choose the functions, so that only names that led to a result get a label.
        observe: called with the function, error and duration in seconds of each call that is added up, for exporters
            with histograms of their own.
    """
    names: set[str] = set()
    errors: set[str] = set()

    def label_of(error: str) -> str:
        if error not in errors:
            if len(errors) >= MAX_ERRORS or not error.isidentifier() or len(error) > MAX_NAME_LENGTH:
                return OTHER
            errors.add(error)
        return error

    def read(row: EndedCall) -> tuple[tuple[str, ...], float]:
        _, _, called, began, ended, outcome, _ = row
        name = called if isinstance(called, str) else "to_here()"
        error = "" if outcome == OK else label_of(outcome.partition(":")[0])
        if name not in names:
            if (error and are_peers_names) or len(names) >= MAX_NAMES or len(name) > MAX_NAME_LENGTH:
                name = OTHER
            else:
                names.add(name)
        if observe is not None:
            observe(name, error, ended - began)
        return (name, error), ended - began

    return Histograms(read)


class TrainingCounts:
    """Counts of DDP and the pipelines of a process. Thread-safe.

    Args:
        observe: called with the seconds of each wait for a bucket, for exporters with histograms of their own.

    Attributes:
        bubble: the fraction of the last pipeline step driven here in which its workers were idle; None before the
            first step.
    """

    def __init__(self, observe: Callable[[float], object]) -> None:
        self.bubble: float | None = None
        self._observe = observe
        self._lock = threading.Lock()
        self._waits = Histogram()

    def bucket_waited(self, time_s: float) -> None:
        """Records how long a finished backward pass waited for the reduction of a bucket."""
        with self._lock:
            self._waits.add(time_s)
        self._observe(time_s)

    def bucket_waits(self) -> Histogram:
        with self._lock:
            return self._waits.copy()


training: list[TrainingCounts] = []
"""The counts of DDP and pipelines as the only entry; empty until metrics are requested."""


class Family(NamedTuple):
    """The values of one metric, under OpenTelemetry's name.

    Attributes:
        unit: in UCUM notation: "s", "By", or the counted objects in braces.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    samples: list[tuple[Mapping[str, str], float | Histogram]]


MAX_CURVES: Final = 64
MAX_NAME_CHARS: Final = 100
KEPT_POINTS: Final = 100
"""Limit on the points of each curve. A live view asks twice a second, and keeps earlier points itself."""

_lock = threading.Lock()
_curves: dict[str, deque[tuple[float, float]]] = {}


def publish(name: str, value: float) -> None:
    """Adds a point to a curve of this process, which `python -m rpcdist dashboard` shows.

    It takes about a microsecond, sends nothing, and works before `init_rpc` and without it. The latest points are kept.
    Numbers that are not finite are ignored. Any thread may call it.

    Args:
        name: the name of the curve, such as "loss".
        value: a number, or a tensor of one element.

    Raises:
        TypeError, ValueError, OverflowError: the value is not a number.
        ConfigError: the name is not a string of 1 to 100 characters, or this process has 64 curves already.
    """
    number = float(value)
    points = _curves.get(name) if isinstance(name, str) else None
    if points is None:
        points = _new_curve(name)
    if math.isfinite(number):
        points.append((time.time(), number))


def published_curves() -> tuple[CurveFacts, ...]:
    """All curves of this process."""
    return tuple(CurveFacts(name, tuple(points.copy())) for name, points in list(_curves.items()))


def _new_curve(name: str) -> deque[tuple[float, float]]:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ConfigError(
            f"the name of a curve must be a string of 1 to {MAX_NAME_CHARS} characters, not {name!r:.200}"
        )
    with _lock:
        if name not in _curves and len(_curves) >= MAX_CURVES:
            raise ConfigError(f"curve {name!r} is not published: this process has {MAX_CURVES} curves already")
        return _curves.setdefault(name, deque(maxlen=KEPT_POINTS))
