"""How the time of a backward pass was spent on one worker, as plain data."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

__all__ = ["MAX_SPANS", "PassClock", "Span", "SpanKind"]

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


class PassClock:
    """Takes the times of one pass on one worker; any thread may call any method."""

    __slots__ = ("_idle_since", "parts")

    def __init__(self) -> None:
        self.parts: list[tuple[SpanKind, int, float, float]] = []  # kind, peer, start, end
        self._idle_since = 0.0

    def took(self, kind: SpanKind, start_s: float, peer: int = -1) -> None:
        """Something that began at `start_s` (`time.time()`) has just ended."""
        self.parts.append((kind, peer, start_s, time.time()))

    def idle(self) -> None:
        """From now on the pass has nothing to do here."""
        self._idle_since = time.time()

    def heard(self, peer: int) -> None:
        """A message of a worker ends the wait, if there is one."""
        since, self._idle_since = self._idle_since, 0.0
        if since:
            self.took("wait", since, peer)
