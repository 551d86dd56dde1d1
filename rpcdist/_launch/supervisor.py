"""Runs the ranks of a job on an engine: starts them, takes their reports, and ends them all; and handles stop signals.

An engine runs processes: on this machine (`local_ranks`), or on Ray (`rpcdist.ray`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, Self

from rpcdist._launch.progress import Failed, Outcome, Progress
from rpcdist._launch.reports import Event, Exited, Raised
from rpcdist.time_limits import FLIGHT_NOTICE_S


class StopSignals:
    """While entered, SIGINT and SIGTERM interrupt nothing: they are recorded, and make `fileno()` readable.

    Handlers that the program installed stay in place, and so does everything when this is not the main thread, where
    Python delivers signals.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}
        self._read_end = self._write_end = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                    self._replaced[signum] = signal.signal(signum, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._replaced.items():
            signal.signal(signum, handler)
        if self._read_end >= 0:
            os.close(self._read_end)
            os.close(self._write_end)

    def fileno(self) -> int:
        """Opened when it is first asked for: an end has to be orderly also where no descriptor is left."""
        if self._read_end < 0:
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            if self.received is not None:
                os.write(self._write_end, b"\0")
        return self._read_end

    def _record(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            if self._write_end >= 0:
                os.write(self._write_end, b"\0")


class KeptInterrupt:
    """While entered, no Ctrl-C gets lost: one that other code swallows is raised again at the end.

    C++ that imports Python modules drops the errors of that, `KeyboardInterrupt` included; so does the import of torch.
    This has no effect beside handlers that the program installed, and outside of the main thread.
    """

    def __init__(self) -> None:
        self._is_installed = False
        self._has_come = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._is_installed = True
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._has_come and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error

    def _interrupt(self, number: int, _: FrameType | None) -> NoReturn:
        self._has_come = True
        raise KeyboardInterrupt


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
