"""Runs the ranks of a job on an engine: starts them, handles their reports and stop signals, and ends them.

An engine runs processes on this machine (`local_ranks`) or on Ray (`rpcdist.ray`). `run_job` blocks until the job ends;
`BackgroundRanks` takes the same steps on its own thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, Self

from rpcdist._launch.progress import Failed, Outcome, Progress, error_of
from rpcdist._launch.reports import Event, Exited, Raised
from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.time_limits import FLIGHT_NOTICE_S, LONGEST_WAIT_S, SLOW_WORK_LIMIT_S


class StopSignals:
    """Within this context, SIGINT, SIGTERM and SIGHUP (the terminal was closed) do not interrupt or end the process:
    they are recorded, and make `fileno()` readable.

    It does not replace handlers of the program, or the choice of `nohup` or a shell to ignore a signal, and has no
    effect outside the main thread, where Python delivers signals.

    Args:
        on_stop: called in the main thread when the first signal comes.
    """

    def __init__(self, on_stop: Callable[[], object] = lambda: None) -> None:
        self.received: signal.Signals | None = None
        self._on_stop = on_stop
        self._replaced: dict[signal.Signals, Any] = {}
        self._read_end = self._write_end = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
        """Opened at the first call, because the end must be orderly even if no descriptor is free."""
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
            self._on_stop()


@contextmanager
def kept_interrupt() -> Iterator[None]:
    """Within this context, no Ctrl-C is lost: if other code swallows one, it is raised again at the end.

    C++ code that imports Python modules, such as torch's, drops errors of the import, `KeyboardInterrupt` included. It
    has no effect with handlers of the program, and outside the main thread.
    """
    has_come = False

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        nonlocal has_come
        has_come = True
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        if has_come and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if has_come:
        raise KeyboardInterrupt


class RankEngine(Protocol):
    """Starts processes of ranks, returns their reports, and ends them. Used on one thread."""

    def start_rank(self, rank: int, attempt: int) -> None:
        """Starts the process of a rank. `attempt` counts the starts of this rank, from 0.

        Raises:
            OSError, ConfigError: the process cannot be started.
        """

    def reports(self, limit_s: float) -> list[tuple[int, Event]]:
        """Waits until a rank reports, the engine is woken, or the limit has passed; returns the reports.

        Times in reports are of this process's `time.monotonic`.
        """

    def end(self) -> None:
        """Ends all running processes, and frees the engine's resources."""


def _advance(
    engine: RankEngine,
    progress: Progress,
    next_look: Callable[[], float],
    guard: AbstractContextManager[Any] | None = None,
) -> bool:
    """Starts ranks that are due, waits for reports and handles them; returns whether any came.

    Args:
        next_look: the time until which it may wait.
        guard: held while the progress is used, if other threads read it.
    """
    guard = nullcontext() if guard is None else guard
    with guard:
        starts = progress.to_start(time.monotonic())
        until = next_look()
    for rank, attempt in starts:
        engine.start_rank(rank, attempt)
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
            time.sleep(FLIGHT_NOTICE_S)  # the others notice the loss meanwhile, and write their flight records
        return outcome
    finally:
        engine.end()


# ---------------------------------------------------------------- beside the work of this process


class BackgroundRanks:
    """Processes in the background, until they end or `end` ends them. Any thread may call the methods.

    Their thread lives as long as they do, because Linux kills a process when the thread that started it ends. The death
    of one process does not end the others.

    Args:
        make_engine: makes the engine, from a descriptor that wakes it when it is readable.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        make_engine: Callable[[int], RankEngine],
        max_restarts: Mapping[int, int] | None = None,
    ) -> None:
        self._ranks = ranks
        self._progress = Progress(ranks, max_restarts=max_restarts or {})
        self._error: BaseException | None = None  # the thread's error, if a process could not be started or watched
        self._must_end = False  # `end` has been called
        self._changed = threading.Condition()  # guards all attributes above
        self._stop, self._stop_writer = os.pipe()
        self.engine = make_engine(self._stop)
        self._thread = threading.Thread(target=self._run, name="rpcdist-ranks", daemon=True)

    def start_ranks(self) -> None:
        """Starts the thread, which starts the processes. Raises `DeadlineExceeded` if `end` was called before."""
        with self._changed:
            self._check_not_ended()
            self._thread.start()

    def wait_until_ready(self, limit_s: float, notice_s: float, notice: Callable[[list[int]], object]) -> None:
        """Waits until every process has imported what it needs, and calls its function.

        Args:
            notice_s: after this time `notice` is called once with the ranks that are not ready.
            notice: tells the user why the start takes long.

        Raises:
            ProcessFailed, SystemExit: a rank failed before that.
            DeadlineExceeded: not all ranks were ready in time, or `end` was called.
            OSError: a process cannot be started.
        """
        deadline = Deadline.after(limit_s)

        def is_ready() -> bool:
            self._check_watched()
            self._check_not_ended()
            if isinstance(outcome := self._progress.outcome(time.monotonic()), Failed):
                raise error_of(outcome)
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
        """Waits until these ranks, or all, have ended. Raises `DeadlineExceeded` if a process does not end in time."""
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
        """Returns the first failure; waits up to `limit_s` for it."""
        self._wait_for(lambda: isinstance(self._progress.outcome(time.monotonic()), Failed), Deadline.after(limit_s))
        with self._changed:
            outcome = self._progress.outcome(time.monotonic())
        return outcome if isinstance(outcome, Failed) else None

    @contextmanager
    def blames_ranks(self) -> Iterator[None]:
        """Within this context, an `RpcdistError` after the failure of a rank is replaced by the error of that rank."""
        try:
            yield
        except RpcdistError as error:
            if (failure := self.failure()) is None:
                raise
            raise error_of(failure) from error

    def raise_exception(self) -> None:
        """Raises `ProcessFailed` if the function of a rank has raised an exception."""
        failure = self.failure()
        if failure is not None and isinstance(failure.cause, Raised):
            raise error_of(failure)

    def end(self) -> None:
        """Ends all running processes, the thread, and `wait_until_ready`; call it once, on any thread, at any time.

        It takes seconds only if a process resists SIGTERM.
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
        """Waits for a condition, which may also become true or raise as time passes."""
        with self._changed:
            while not condition():
                if deadline.expired():
                    return False
                next_change_s = self._progress.next_deadline() - time.monotonic()
                limits = deadline.remaining_s(), next_change_s, LONGEST_WAIT_S, longest_sleep_s()
                self._changed.wait(max(0.0, min(limits)))
        return True

    def _check_watched(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_not_ended(self) -> None:
        if self._must_end:
            raise DeadlineExceeded("the start of the cluster was cancelled")
