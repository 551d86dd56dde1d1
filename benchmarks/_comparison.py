"""Measures a case on our pair and on a peer's in alternation, and judges the table's lines by their budgets."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence

from _cases import Case, Metrics, Row
from _pairs import Pair
from _report import Line, show

__all__ = [
    "CHANNELS",
    "STEADY_SHARE",
    "channel_in_use",
    "head",
    "in_turns",
    "make_line",
    "make_lines",
    "measure_in_turns",
]

CHANNELS = ("auto", "local", "tcp", "grpc")
STEADY_FACTOR = 1.5  # a round counts as steady when it is at most so many times slower or faster than the median
STEADY_SHARE = 0.9

Sample = tuple[Metrics, Metrics]  # ours, the peer's


def head(peer: str) -> Line:
    """The table's first line."""
    return (
        "what", "size", "unit", "ours", peer, f"ours/{peer}", "in single rounds", "steady", "budget", "stretch", "ok",
    )  # fmt: skip


def channel_in_use() -> str:
    """The channel that two processes of this host take: "local", "tcp" or "grpc"; torch's may always share memory."""
    wanted = os.environ.get("RPCDIST_CHANNELS", "auto")
    if wanted in ("auto", "local"):
        return "local" if sys.platform == "linux" else "tcp" if wanted == "auto" else wanted
    return wanted


def measure_in_turns(case: Case, ours: Pair, peer: Pair, rounds: int, effort: float, module: str) -> list[Sample]:
    """Measures a case on two pairs, in changing order; the one that is not measured is stopped."""

    def ask(pair: Pair, other: Pair) -> Metrics:
        with other.stopped():
            metrics: Metrics = pair.ask_first("measure", case.name, effort, module)
        return metrics

    before = ours.ask_both("waits")
    samples = in_turns(lambda: ask(ours, peer), lambda: ask(peer, ours), rounds)
    for who, old, new in zip(("caller", "callee"), before, ours.ask_both("waits"), strict=True):
        polled, slept, in_vain = (after - earlier for after, earlier in zip(new, old, strict=True))
        if polled + slept:
            share = polled / (polled + slept)
            print(f"  {who}: {share:.0%} of {polled + slept} waits polled, {in_vain} in vain", file=sys.stderr)
    return samples


def in_turns(ours: Callable[[], Metrics], peer: Callable[[], Metrics], rounds: int) -> list[Sample]:
    """Calls both once a round, in changing order, so that a machine that slows down slows down both."""
    samples: list[Sample] = []
    for number in range(rounds):
        if number % 2 == 0:
            mine = ours()
            samples.append((mine, peer()))
        else:
            others = peer()
            samples.append((ours(), others))
    return samples


def make_lines(rows: Sequence[Row], samples: Sequence[Sample]) -> list[Line]:
    """The lines of a case."""
    return [make_line(row, [(mine[row.metric], peer[row.metric]) for mine, peer in samples]) for row in rows]


def make_line(row: Row, rounds: Sequence[tuple[float, float]]) -> Line:
    """The table's line for what was measured as (ours, the peer's) in each round."""
    mine, others = zip(*rounds, strict=True)
    ours, peer = (statistics.median(values) * row.scale for values in (mine, others))
    ratio = None if row.unit == "MiB" else ours / peer  # growths may be zero or negative
    ratios = sorted(mine / peer for mine, peer in rounds) if ratio is not None else []
    budget, stretch, verdict = judge(row, ours, ratio)
    return (
        row.what,
        row.size,
        row.unit,
        show(ours),
        show(peer),
        "" if ratio is None else f"{ratio:.2f}x",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "",
        "" if ratio is None else f"{steadiness(mine):.0%}",
        budget,
        stretch,
        verdict,
    )


def steadiness(values: Sequence[float]) -> float:
    """The share of rounds within `STEADY_FACTOR` of the median: two ways for a call to go would halve it."""
    median = statistics.median(values)
    return sum(median / STEADY_FACTOR <= value <= median * STEADY_FACTOR for value in values) / len(values)


def judge(row: Row, ours: float, ratio: float | None) -> tuple[str, str, str]:
    """The budget and the stretch in words, and the verdict: "NO", "yes", "stretch", or "" where there is no budget."""
    channel = channel_in_use()
    if channel in row.limits:
        limit, value, unit = row.limits[channel], ours, f" {row.unit}"
    elif channel in row.ratios and ratio is not None:
        limit, value, unit = row.ratios[channel], ratio, "x"
    else:
        return "", "", ""
    stretch = row.stretch if channel == "local" else None
    words = "at least" if row.more_is_better else "at most"

    def keeps(bound: float | None) -> bool:
        return bound is not None and (value >= bound if row.more_is_better else value <= bound)

    verdict = "stretch" if keeps(stretch) else "yes" if keeps(limit) else "NO"
    return f"{words} {limit:g}{unit}", "" if stretch is None else f"{stretch:g}{unit}", verdict
