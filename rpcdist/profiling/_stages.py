"""From marks to a table: which stages a call has, and how long each takes. Pure.

Calls are made one at a time, so all marks between the begin and the end of a call belong to it. Processes and threads
run side by side, so their marks do not come in one order in every call. Each mark therefore gets its own median, of the
time since its call began, and the table is in the order of these medians.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final, NamedTuple

from rpcdist.profiling._marks import Mark

USUAL_SHARE: Final = 0.9
"""A mark that fewer calls have is no stage of the call: a heartbeat, or something that happens now and then."""

_NUMBER: Final = re.compile(r"[-_ ]?\d+$")


class CallTimes(NamedTuple):
    """When a call began and ended, in nanoseconds."""

    began_ns: int
    ended_ns: int


class CallStage(NamedTuple):
    """What happens at one moment of a call, and how long it takes until the next stage.

    Attributes:
        thread: the name of the thread, without its number; several if the calls differ.
        at_us: median of the time since the call began.
        takes_us: until the next stage of the table begins, whichever thread that is on.
    """

    process: str
    thread: str
    event: str
    at_us: float
    takes_us: float


class Profile(NamedTuple):
    """The stages of one kind of call.

    Attributes:
        stages: in the order in which they begin; the last one takes until the call ends.
        total_us: median time of a call.
        rare: events that fewer than `USUAL_SHARE` of the calls had, with the number of calls that had them.
    """

    stages: list[CallStage]
    total_us: float
    rare: dict[str, int]


class _Key(NamedTuple):
    """The same mark in different calls, on whichever thread: which one it is of its kind."""

    process: str
    event: str
    number: int


def profile_calls(calls: Sequence[CallTimes], marks: Sequence[Mark]) -> Profile:
    """The stages of the calls.

    Args:
        calls: they do not overlap.
        marks: of all processes, in any order.

    Raises:
        ValueError: there are no calls.
    """
    if not calls:
        raise ValueError("a profile needs at least one call")
    offsets: dict[_Key, list[int]] = {}
    threads: dict[_Key, Counter[str]] = {}
    for call, own in _marks_of(calls, sorted(marks)):
        seen: Counter[tuple[str, str]] = Counter()
        for mark in own:
            kind = (mark.process, mark.event)
            key = _Key(*kind, seen[kind])
            seen[kind] += 1
            offsets.setdefault(key, []).append(mark.time_ns - call.began_ns)
            threads.setdefault(key, Counter())[_NUMBER.sub("", mark.thread)] += 1
    usual = {key: median(times) / 1e3 for key, times in offsets.items() if len(times) >= USUAL_SHARE * len(calls)}
    total_us = median(call.ended_ns - call.began_ns for call in calls) / 1e3
    ordered = sorted(usual, key=usual.__getitem__)
    ends_us = [*(usual[key] for key in ordered[1:]), total_us]
    stages = [
        CallStage(key.process, _name(threads[key], len(calls)), key.event, usual[key], end_us - usual[key])
        for key, end_us in zip(ordered, ends_us, strict=True)
    ]
    rare: Counter[str] = Counter()
    for key in offsets.keys() - usual.keys():
        rare[f"{key.event} ({key.process}, {_name(threads[key], len(calls))})"] += len(offsets[key])
    return Profile(stages, total_us, dict(sorted(rare.items())))


def _name(threads: Counter[str], num_calls: int) -> str:
    """The threads on which something happens, the most frequent one first, without those of single calls."""
    often = [thread for thread, number in threads.most_common() if number > (1 - USUAL_SHARE) * num_calls]
    return " or ".join(often or [threads.most_common(1)[0][0]])


def _marks_of(calls: Sequence[CallTimes], marks: Sequence[Mark]) -> Iterator[tuple[CallTimes, Sequence[Mark]]]:
    times = [mark.time_ns for mark in marks]
    for call in calls:
        yield call, marks[bisect_left(times, call.began_ns) : bisect_right(times, call.ended_ns)]


def table(profile: Profile) -> list[str]:
    """The profile as a Markdown table that is also readable as plain text."""
    before_us = profile.stages[0].at_us if profile.stages else profile.total_us
    lines = [("at us", "takes us", "share", "process", "thread", "what happens")]
    lines += [
        (
            f"{stage.at_us:.1f}",
            f"{stage.takes_us:.1f}",
            f"{stage.takes_us / profile.total_us:.0%}",
            stage.process,
            stage.thread,
            stage.event,
        )
        for stage in (CallStage("caller", "", "the call begins", 0, before_us), *profile.stages)
    ]
    lines.append((f"{profile.total_us:.1f}", "", "", "caller", "", "the call has ended"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
