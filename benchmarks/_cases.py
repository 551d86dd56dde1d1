"""The common parts of the benchmarks of RPC and of autograd: cases, their rows in the table, and how to time calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

__all__ = ["CALLEE", "KIB", "MIB", "Case", "Metrics", "Row", "percentiles", "scaled", "time_calls"]

CALLEE = "callee"
KIB, MIB = 2**10, 2**20

Metrics = dict[str, float]  # what was measured -> seconds, or calls per second for rates


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a metric of a case, and its budget on each channel that has one.

    Attributes:
        metric: key in what the case measured.
        unit: what the number is shown in.
        scale: what the measured value is multiplied with for that.
        ratios: channel ("local", "tcp", "grpc") -> limit on ours / the peer's: an upper one, or a lower one for what
            shall be large (`more_is_better`).
        limits: channel -> upper limit on ours alone, in `unit`; then ratios do not count.
        stretch: on the local channel, what would be better still than the ratio or the limit.
    """

    what: str
    size: str
    metric: str
    unit: str
    scale: float
    ratios: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    stretch: float | None = None
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement that runs on a pair, and the rows that come of it."""

    name: str
    measure: Callable[[ModuleType, float], Metrics]
    rows: tuple[Row, ...]


def time_calls(call: Callable[[], object], num_calls: int, num_warm_up: int) -> list[float]:
    """Seconds that each of `num_calls` calls takes, after some that are not counted."""
    for _ in range(num_warm_up):
        call()
    times_s = []
    for _ in range(num_calls):
        began = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began)
    return times_s


def percentiles(times_s: list[float]) -> Metrics:
    ordered = sorted(times_s)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


def scaled(num_calls: int, effort: float) -> int:
    """How often to call when a full run has effort 1."""
    return max(2, round(num_calls * effort))
