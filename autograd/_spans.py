"""How the time of a backward pass was spent on one worker, as plain data."""

from __future__ import annotations

from typing import Literal, NamedTuple

SpanKind = Literal["analysis", "run", "wait", "gate"]

MAX_SPANS = 1000
"""So many of the latest spans a context keeps on each worker."""


class Span(NamedTuple):
    """A part of the time that a backward pass took on one worker.

    Attributes:
        worker: name of the worker.
        kind: "analysis" of the graph; "run", one call of torch's engine; "wait", with nothing to do; "gate", a wait in
            the middle of a run.
        peer: name of the worker that was waited for: whose message ended the wait. Empty for the other kinds.
        start_s: when it began, by the clock of that worker, in seconds since the epoch.
        duration_s: how long it took, in seconds. What a run waits at gates is part of its duration.
        backward: number of the pass, the same on all workers.
    """

    worker: str
    kind: SpanKind
    peer: str
    start_s: float
    duration_s: float
    backward: int
