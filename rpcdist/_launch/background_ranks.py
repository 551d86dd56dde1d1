"""Processes of ranks beside the work of this process: a thread of their own starts, watches and ends them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rpcdist._launch.progress import Failed, Progress, error_of, restart_pause_s
from rpcdist._launch.supervisor import RankEngine
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.time_limits import LONGEST_WAIT_S, QUICK_ANSWER_LIMIT_S, SLOW_WORK_LIMIT_S


class BackgroundRanks:
    """Processes that run beside this one, until they end by themselves or `end` ends them. Methods: on any thread.

    Their thread lives as long as they do: when the thread that started a process ends, Linux kills the process. The
    death of one ends no other.

    Args:
        ranks: those to start.
        make_engine: makes the engine where they run, from a descriptor that wakes it when it is readable.
        max_restarts: as in `Progress`.
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
            limit_s: of the wait.
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
                self._advance()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self.engine.end()

    def _advance(self) -> None:
        """One step of `run_job`, while other threads look at the progress."""
        with self._changed:
            starts = self._progress.to_start(time.monotonic())
            next_start_s = self._progress.next_start() - time.monotonic()
        for rank, attempt in starts:
            self.engine.start(rank, attempt)
        events = self.engine.reports(max(0.0, min(next_start_s, LONGEST_WAIT_S)))
        now = time.monotonic()
        with self._changed:
            for rank, event in events:
                self._progress.take(rank, event, now)
            self._changed.notify_all()

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
