"""Runs the ranks of a job on an engine: starts them, takes their reports, and ends them all; and handles stop signals.

An engine runs processes: on this machine (`local_ranks`), or on Ray (`rpcdist.ray`). `run_job` does nothing else until
the job ends; `BackgroundRanks` has a thread of its own for the same steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, Self

from rpcdist._launch.progress import Failed, Outcome, Progress, error_of, restart_pause_s
from rpcdist._launch.reports import Event, Exited, Raised
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.time_limits import FLIGHT_NOTICE_S, LONGEST_WAIT_S, QUICK_ANSWER_LIMIT_S, SLOW_WORK_LIMIT_S


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


def _advance(
    engine: RankEngine,
    progress: Progress,
    next_look: Callable[[], float],
    guard: AbstractContextManager[Any] | None = None,
) -> bool:
    """Starts what is due, waits for reports and takes them in; returns whether there was anything.

    Args:
        next_look: the moment until which the wait may last.
        guard: held while the progress is used, where other threads look at it.
    """
    guard = nullcontext() if guard is None else guard
    with guard:
        starts = progress.to_start(time.monotonic())
        until = next_look()
    for rank, attempt in starts:
        engine.start(rank, attempt)
    events = engine.reports(max(0.0, min(until - time.monotonic(), LONGEST_WAIT_S)))
    now = time.monotonic()
    with guard:
        for rank, event in events:
            progress.take(rank, event, now)
    return bool(starts or events)


def run_job(
    engine: RankEngine, progress: Progress, stop: StopSignals, changed: Callable[[], object] = lambda: None
) -> Outcome | signal.Signals:
    """Starts the ranks and waits for the outcome; when this returns or raises, all processes have ended."""
    try:
        while not (outcome := stop.received or progress.outcome(time.monotonic())):
            if _advance(engine, progress, progress.next_deadline):
                changed()
        if isinstance(outcome, Failed) and not isinstance(outcome.cause, Raised | Exited):
            time.sleep(FLIGHT_NOTICE_S)  # the others notice the loss meanwhile, and write what they do
        return outcome
    finally:
        engine.end()


# ---------------------------------------------------------------- beside the work of this process


class BackgroundRanks:
    """Processes that run beside this one, until they end by themselves or `end` ends them. Methods: on any thread.

    Their thread lives as long as they do: when the thread that started a process ends, Linux kills the process. The
    death of one ends no other.

    Args:
        make_engine: makes the engine where they run, from a descriptor that wakes it when it is readable.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        make_engine: Callable[[int], RankEngine],
        max_restarts: Mapping[int, int] | None = None,
    ) -> None:
        self._ranks = ranks
        self._progress = Progress(
            ranks,
            float("inf"),
            QUICK_ANSWER_LIMIT_S,
            SLOW_WORK_LIMIT_S,
            max_restarts=max_restarts,
            pause_s=restart_pause_s,
        )
        self._error: BaseException | None = None  # of the thread: a process could not be started, or watched
        self._must_end = False  # `end` has been called
        self._changed = threading.Condition()  # guards all of these
        self._stop, self._stop_writer = os.pipe()
        self.engine = make_engine(self._stop)
        self._thread = threading.Thread(target=self._run, name="rpcdist-ranks", daemon=True)

    def start(self) -> None:
        """Starts the thread, which starts the processes. Raises `DeadlineExceeded` if `end` was called before."""
        with self._changed:
            self._check_not_ended()
            self._thread.start()

    def wait_until_ready(self, limit_s: float, notice_s: float, notice: Callable[[list[int]], object]) -> None:
        """Waits until every process has imported what it needs, and calls its function.

        Args:
            notice_s: after this time `notice` is called, once, with the ranks that are not so far.
            notice: tells the user why nothing happens.

        Raises:
            ProcessFailed, SystemExit: one failed before that.
            DeadlineExceeded: not all came so far in time, or `end` was called.
            OSError: a process cannot be started.
        """
        deadline = Deadline.after(limit_s)

        def is_ready() -> bool:
            self._check_watched()
            self._check_not_ended()
            self._raise_failure()
            return not self._progress.not_ready()

        if self._wait_for(is_ready, Deadline.after(notice_s).earlier(deadline)):
            return
        notice(self._progress.not_ready())
        if not self._wait_for(is_ready, deadline):
            missing = ", ".join(map(str, self._progress.not_ready()))
            raise DeadlineExceeded(
                f"after {limit_s:g} s these ranks had not imported the program: {missing}; is the machine overloaded, "
                "or does an import wait for something?"
            )

    def wait_until_ended(self, ranks: Sequence[int] | None = None) -> None:
        """Waits until these have ended, or all. Raises `DeadlineExceeded` after the limit for what has returned."""
        waited_for = self._ranks if ranks is None else ranks

        def have_ended() -> bool:
            self._check_watched()
            return all(map(self._progress.has_ended, waited_for))

        if not self._wait_for(have_ended, Deadline.after(SLOW_WORK_LIMIT_S)):
            with self._changed:
                running = ", ".join(str(rank) for rank in waited_for if not self._progress.has_ended(rank))
            raise DeadlineExceeded(
                f"{SLOW_WORK_LIMIT_S:g} s after `shutdown` these ranks have not ended: {running}; is a thread still "
                "running there?"
            )

    def failure(self, limit_s: float = 0.0) -> Failed | None:
        """The failure that came first; waits `limit_s` for one."""
        self._wait_for(lambda: isinstance(self._progress.outcome(time.monotonic()), Failed), Deadline.after(limit_s))
        with self._changed:
            outcome = self._progress.outcome(time.monotonic())
        return outcome if isinstance(outcome, Failed) else None

    def end(self) -> None:
        """Ends all that still run, the thread, and `wait_until_ready`; called once, on any thread, also before `start`.

        It takes seconds only where a process resists SIGTERM.
        """
        with self._changed:
            self._must_end = True
            self._changed.notify_all()
        if self._thread.ident is not None:  # it was started
            os.write(self._stop_writer, b"\0")
            self._thread.join()
        else:
            self.engine.end()
        os.close(self._stop)
        os.close(self._stop_writer)

    def _run(self) -> None:
        try:
            while not self._must_end:
                _advance(self.engine, self._progress, self._progress.next_start, self._changed)
                with self._changed:
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self.engine.end()

    def _wait_for(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Waits for a condition, which may also become true, or raise, because time passes."""
        with self._changed:
            while not condition():
                if deadline.expired():
                    return False
                next_change_s = self._progress.next_deadline() - time.monotonic()
                self._changed.wait(max(0.0, min(deadline.remaining_s(), next_change_s, LONGEST_WAIT_S)))
        return True

    def _check_watched(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_not_ended(self) -> None:
        if self._must_end:
            raise DeadlineExceeded("the start of the cluster was cancelled")

    def _raise_failure(self) -> None:
        outcome = self._progress.outcome(time.monotonic())
        if isinstance(outcome, Failed):
            raise error_of(outcome, len(self._ranks))
