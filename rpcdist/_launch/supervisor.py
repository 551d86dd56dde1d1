"""Runs the ranks of a job on an engine: starts them, listens to what it says of them, and ends them all at the end.

An engine is where processes run: this machine (`local_ranks`), or Ray (`rpcdist.ray`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Protocol

from rpcdist._launch.progress import Failed, Outcome, Progress
from rpcdist._launch.reports import Event, Exited, Raised
from rpcdist._launch.stop_signals import StopSignals
from rpcdist.time_limits import FLIGHT_NOTICE_S


class RankEngine(Protocol):
    """Starts processes of ranks, says what they report, and ends them. Used on one thread."""

    def start(self, rank: int, attempt: int) -> None:
        """Starts the process of a rank. `attempt` counts the starts of this rank, from 0.

        Raises:
            OSError, ConfigError: it cannot be started.
        """

    def reports(self, limit_s: float) -> list[tuple[int, Event]]:
        """Waits until a rank reports something, or the engine is woken, or the time is over; returns the reports.

        The moments in reports are those of this process's `time.monotonic`.
        """

    def end(self) -> None:
        """Ends all processes that still run, and frees what the engine holds."""


def run_job(
    engine: RankEngine, progress: Progress, stop: StopSignals, changed: Callable[[], object] = lambda: None
) -> Outcome | signal.Signals:
    """Starts the ranks and waits for the outcome; when this returns or raises, all processes have ended.

    Args:
        engine: where they run; it is woken by `stop`.
        progress: decides.
        stop: Ctrl-C and SIGTERM.
        changed: called after each step in which something was started or reported.
    """
    try:
        while not (outcome := stop.received or progress.outcome(time.monotonic())):
            starts = progress.to_start(time.monotonic())
            for rank, attempt in starts:
                engine.start(rank, attempt)
            events = engine.reports(max(0.0, progress.next_deadline() - time.monotonic()))
            now = time.monotonic()
            for rank, event in events:
                progress.take(rank, event, now)
            if starts or events:
                changed()
        if isinstance(outcome, Failed) and not isinstance(outcome.cause, Raised | Exited):
            time.sleep(FLIGHT_NOTICE_S)  # the others notice the loss meanwhile, and write what they do
        return outcome
    finally:
        engine.end()
