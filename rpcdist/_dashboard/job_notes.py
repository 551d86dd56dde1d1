"""Log lines and timelines of a job, computed from the notes that its workers send with successive queries.

Pure, and bounded. It trusts the clocks of the workers' hosts.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Any, Final

from rpcdist.inspection import SpanFacts, WorkerFacts

KEPT_LINES: Final = 400
KEPT_SPANS: Final = 1200
"""Of each worker."""

MAX_BARS: Final = 2000
"""Of one timeline."""

_NUMBERED: Final = re.compile(r"(.*) (?:of step|of pass) (-?\d{1,20})|(?:iteration|gradients) (\d{1,20})")

Spans = list[tuple[str, SpanFacts]]
"""With their workers."""


class JobNotes:
    """The notes of one job. Not thread-safe."""

    def __init__(self) -> None:
        self._lines: deque[dict[str, Any]] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0
        self._spans: dict[str, deque[SpanFacts]] = {}
        self._seen: dict[str, tuple[str, int]] = {}  # by worker: its incarnation, and the number of its last note

    def add(self, workers: Iterable[WorkerFacts], names: Set[str]) -> None:
        """Adds the notes of a query, except those received before."""
        lines: list[tuple[float, str, Any]] = []
        for facts in workers:
            incarnation, last = self._seen.get(facts.worker, ("", 0))
            if incarnation != facts.incarnation:  # the last step of a process that ended stays until there is a new one
                last = 0
            notes = facts.notes
            lines += [(line.time_s, facts.worker, line) for line in notes.log_lines if line.number > last]
            new = [span for span in notes.spans if span.number > last]
            if new:
                self._spans.setdefault(facts.worker, deque(maxlen=KEPT_SPANS)).extend(new)
            self._seen[facts.worker] = facts.incarnation, max(last, notes.last_number)
        for gone in self._seen.keys() - names:
            del self._seen[gone]
            self._spans.pop(gone, None)
        for time_s, worker, line in sorted(lines, key=lambda item: item[0]):
            self._num_lines += 1
            self._lines.append(
                {
                    "id": self._num_lines, "time_s": time_s, "worker": worker, "level": line.level,
                    "logger": line.logger, "text": line.text,
                }
            )  # fmt: skip

    def view(self) -> dict[str, Any]:
        """Everything as data for JSON; a timeline without data is None."""
        return {
            "lines": list(self._lines),
            "timelines": {
                "pipeline": self._latest("pipeline", "step", len),
                "backward": self._latest("backward", "pass", lambda spans: len({worker for worker, _ in spans})),
                "ddp": self._iteration(),
            },
        }

    # ------------------------------------------------------------ timelines

    def _in(self, lane: str) -> Spans:
        return [(worker, span) for worker, spans in self._spans.items() for span in spans if span.lane == lane]

    def _latest(self, lane: str, word: str, size: Callable[[Spans], int]) -> dict[str, Any] | None:
        """The newest step or pass with the most data: the very newest may have just begun."""
        found = _by_number(self._in(lane))
        if not found:
            return None
        largest = max(map(size, found.values()))
        complete = [item for item in found.items() if size(item[1]) == largest]
        number, spans = max(complete, key=lambda item: max(span.ended_s for _, span in item[1]))
        bars = [(worker, span.name.rsplit(" of ", 1)[0], span.began_s, span.ended_s) for worker, span in spans]
        return _timeline(f"{word} {number}", bars)

    def _iteration(self) -> dict[str, Any] | None:
        """The newest DDP iteration: the times at which each rank computed gradients and reduced them."""
        found = _by_number(self._in("DDP"))
        if not found:
            return None
        most = max(len({worker for worker, _ in spans}) for spans in found.values())
        number = max(number for number, spans in found.items() if len({worker for worker, _ in spans}) == most)
        bars: list[tuple[str, str, float, float]] = []
        reduced_s = overlapped_s = 0.0
        num_buckets = 0
        by_worker: dict[str, dict[str, SpanFacts]] = {}
        for worker, span in found[number]:
            by_worker.setdefault(worker, {})[span.name.partition(" ")[0]] = span
        for worker, parts in by_worker.items():
            whole, gradients = parts.get("iteration"), parts.get("gradients")
            if whole is None or gradients is None:
                continue
            bars.append((worker, "gradients", gradients.began_s, gradients.ended_s))
            for span in self._spans[worker]:
                if not (whole.began_s <= span.began_s and span.ended_s <= whole.ended_s + _SLACK):
                    continue
                if span.lane == "DDP buckets":
                    num_buckets += 1
                    bars.append((worker, span.name, span.began_s, span.ended_s))
                elif span.lane.startswith("group "):
                    bars.append((worker, span.name, span.began_s, span.ended_s))
                    reduced_s += span.ended_s - span.began_s
                    overlapped_s += max(0.0, min(span.ended_s, gradients.ended_s) - span.began_s)
        if not bars:
            return None
        made = _timeline(f"iteration {number}", bars)
        made["buckets"] = num_buckets // len(by_worker)
        made["overlap"] = round(overlapped_s / reduced_s, 3) if reduced_s > 0 else None
        return made


_SLACK: Final = 0.001  # seconds; clocks are read one after the other


def _by_number(spans: Iterable[tuple[str, SpanFacts]]) -> dict[int, Spans]:
    """The spans by the number of their step, pass or iteration."""
    found: dict[int, Spans] = {}
    for worker, span in spans:
        if (match := _NUMBERED.fullmatch(span.name)) is not None:
            found.setdefault(int(match[2] or match[3]), []).append((worker, span))
    return found


def _timeline(title: str, bars: list[tuple[str, str, float, float]]) -> dict[str, Any]:
    bars = sorted(bars, key=lambda bar: bar[2])[:MAX_BARS]
    begin_s = bars[0][2]
    return {
        "title": title,
        "time_s": begin_s,
        "bars": [
            [worker, name, round(began_s - begin_s, 6), round(max(0.0, ended_s - began_s), 6)]
            for worker, name, began_s, ended_s in bars
        ],
    }
