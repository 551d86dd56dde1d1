"""The thread that watches a worker pool while jobs wait in its queue, and sleeps otherwise."""

from __future__ import annotations

import threading
import time
from _thread import LockType
from collections.abc import Callable
from typing import Final, Protocol

from rpcdist.rpc._executors.pool_load import LoadHistory, PoolSample
from rpcdist.rpc._executors.worker_thread import new_baton
from rpcdist.time_limits import POOL_TICK_S

LINGER_TICKS: Final = 20  # it goes on sampling for so many ticks after the queue was empty: waking it costs more


class MonitoredPool(Protocol):
    """The pool as the monitor sees it."""

    def sample(self) -> PoolSample | None:
        """A snapshot of the pool now; None if no job waits."""

    def start_one(self) -> bool:
        """Sets one more thread to work; False if there can be none."""

    def write_held_answers(self) -> None:
        """Writes the answers that wait behind a job that takes longer."""

    def report_exhaustion(self) -> None:
        """Logs that the pool is exhausted."""

    def give_up_jobs(self) -> None:
        """Hands the jobs back that have waited for too long in an exhausted pool."""

    def needs_monitor(self) -> bool:
        """Whether the monitor must stay awake: jobs or answers wait, or the pool is closing."""

    def is_drained(self) -> bool:
        """Whether the pool is closing, and neither jobs nor answers wait any more: the monitor ends."""


class PoolMonitor:
    """See the module. Any thread may wake it; the first wake starts its thread.

    Attributes:
        sleeping: how to wake it, as the only entry, while it sleeps; empty while it samples. The thread
            that takes the entry out wakes it: exactly one, so no lock is needed. Callers may look at it before they
            call `wake`.
    """

    def __init__(self, pool: MonitoredPool, history: LoadHistory, name: str) -> None:
        self.sleeping: list[Callable[[], object]] = [self._start]
        self._pool = pool
        self._history = history
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._is_started = False
        self._reported_stall = -1.0  # `last_progress` of the stall that was logged: one line for each

    def wake(self) -> None:
        """Has it look at the pool soon; does nothing while it is awake."""
        try:
            wake = self.sleeping.pop()
        except IndexError:
            return
        wake()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # the system's limit of threads; the next job tries again
            self.sleeping.append(self._start)
        else:
            self._is_started = True  # not before: `join` must not find a thread that has not begun

    def join(self, timeout_s: float) -> None:
        if self._is_started and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        baton = new_baton()
        empty_ticks = 0
        while not self._pool.is_drained():
            self._pool.write_held_answers()
            sample = self._pool.sample()
            if sample is not None:
                empty_ticks = 0
                self._act_on(sample)
            else:
                empty_ticks += 1
                if empty_ticks > LINGER_TICKS:
                    self._sleep(baton)
                    empty_ticks = 0
            time.sleep(POOL_TICK_S)  # a sampling clock; nobody waits for this thread

    def _act_on(self, sample: PoolSample) -> None:
        for _ in range(self._history.num_to_start(sample)):
            if not self._pool.start_one():
                break
        if self._history.is_exhausted(sample):
            if self._reported_stall != self._history.last_progress:
                self._reported_stall = self._history.last_progress
                self._pool.report_exhaustion()
            self._pool.give_up_jobs()

    def _sleep(self, baton: LockType) -> None:
        wake = baton.release
        self.sleeping.append(wake)
        # `submit` appends its job first and looks at `sleeping` then. Here the order is reversed, so one of the two
        # sees what the other did.
        if not (self._pool.needs_monitor() and self._withdraw(wake)):
            baton.acquire()
        self._history.restart(time.monotonic())

    def _withdraw(self, wake: Callable[[], object]) -> bool:
        """Takes the entry back; False if another thread has it by now, and is about to call it."""
        try:
            self.sleeping.remove(wake)
        except ValueError:
            return False
        return True
