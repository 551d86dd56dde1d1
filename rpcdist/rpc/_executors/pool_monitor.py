"""A thread that watches a worker pool while jobs are queued, and sleeps otherwise.

`threads_to_start` and `LoadHistory` decide how many threads to start; both are pure.
"""

from __future__ import annotations

import threading
import time
from _thread import LockType
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Final

from rpcdist.rpc._executors.blocking import new_baton
from rpcdist.time_limits import POLL_S, POOL_STALL_S

MAX_BURST: Final = 64
BUSY_SHARE: Final = 0.2  # if the threads together used less CPU time than this, they only wait
LINGER_TICKS: Final = 2  # keep sampling this long after the queue is empty, so that a burst wakes the monitor once


def threads_to_start(queued: int, oldest_s: float, running: int, stalled_s: float, burst: int, num_cores: int) -> int:
    """Returns how many idle or new threads to start now (rule 3 of the pool).

    Args:
        oldest_s: how long the oldest queued job has waited.
        running: threads that run a job and are not in `blocking()`.
        stalled_s: seconds since a job ended or the monitor started a thread.
        burst: threads to start at a stall.
        num_cores: threads that may run before the stall rule applies.
    """
    if queued == 0:
        return 0
    if running == 0 or (running < num_cores and oldest_s >= POLL_S):
        return 1
    if stalled_s >= POOL_STALL_S and oldest_s >= POLL_S:
        return min(burst, queued)
    return 0


class LoadHistory:
    """The state that the monitor keeps between two samples.

    Args:
        cpu_s: returns the CPU time that the pool's threads have used, in seconds. Called at stalls only, since it
            costs a system call per thread.
        num_cores: threads that may run before the stall rule applies.
        stall_limit_s: a pool at its cap is exhausted if no job ends for this long.

    Attributes:
        last_progress: the last sample that saw a job end, in monotonic seconds.
    """

    def __init__(
        self, cpu_s: Callable[[], float], num_cores: int, max_threads: int, stall_limit_s: float, now: float
    ) -> None:
        self._read_cpu_s = cpu_s
        self._num_cores = num_cores
        self._max_threads = max_threads
        self._stall_limit_s = stall_limit_s
        self.restart(now)

    def restart(self, now: float) -> None:
        self.last_progress = now
        self._last_move = now  # when a job ended or threads were started
        self._burst = 1
        self._cpu_s = self._read_cpu_s()

    def num_to_start(self, now: float, queued: int, oldest_s: float, running: int, has_progress: bool) -> int:
        """Returns how many threads the caller must start now, when at least one job is queued.

        Args:
            queued: this and the next two as for `threads_to_start`.
            has_progress: whether a job has ended since the last call.
        """
        if has_progress:
            self.last_progress = self._last_move = now
            self._burst = 1
        elif now - self._last_move >= POOL_STALL_S:
            self._choose_burst(now - self._last_move)
        stalled_s = now - self._last_move
        wanted = threads_to_start(queued, oldest_s, running, stalled_s, self._burst, self._num_cores)
        if wanted:
            self._last_move = now
        return wanted

    def _choose_burst(self, elapsed_s: float) -> None:
        """Doubles the burst while the threads only wait; otherwise 1, because each thread brings an OpenMP team."""
        cpu_s = self._read_cpu_s()
        is_waiting = 0 <= cpu_s - self._cpu_s < BUSY_SHARE * elapsed_s
        self._burst = min(2 * self._burst, MAX_BURST) if is_waiting else 1
        self._cpu_s = cpu_s

    def is_exhausted(self, now: float, num_threads: int) -> bool:
        """Whether the pool is at its cap and no job ends (rule 5 of the pool)."""
        return num_threads >= self._max_threads and now - self.last_progress >= self._stall_limit_s


@dataclass(eq=False, repr=False)
class PoolMonitor:
    """Samples a pool on its own thread. Any thread may wake it; the first wake starts the thread.

    Args:
        adjust: acts on the state of the pool; returns whether jobs are queued.
        must_stay: whether the monitor must stay awake: jobs or answers wait, or the pool is closing.
        is_drained: whether the monitor must end: the pool is closing, and neither jobs nor answers wait.
        restart: called after a pause without queued jobs, with the time in monotonic seconds.

    Attributes:
        sleeping: has the wake-up function as its only entry while the monitor sleeps; empty while it samples. Only the
            thread that pops the entry wakes the monitor, so no lock is needed. Callers may check it before `wake`.
    """

    name: InitVar[str]
    _: KW_ONLY
    adjust: Callable[[], bool]
    must_stay: Callable[[], bool]
    is_drained: Callable[[], bool]
    restart: Callable[[float], object]
    _is_started: bool = False

    def __post_init__(self, name: str) -> None:
        self.sleeping: list[Callable[[], object]] = [self._start]
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def wake(self) -> None:
        """Makes the monitor sample the pool soon; does nothing if it is awake."""
        try:
            wake = self.sleeping.pop()
        except IndexError:
            return
        wake()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # the system's thread limit; the next job tries again
            self.sleeping.append(self._start)
        else:
            self._is_started = True  # only now: `join` must not find a thread that has not started

    def join(self, timeout_s: float) -> None:
        if self._is_started and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        baton = new_baton()
        empty_ticks = 0
        while not self.is_drained():
            empty_ticks = 0 if self.adjust() else empty_ticks + 1
            if empty_ticks > LINGER_TICKS:
                self._sleep(baton)
                empty_ticks = 0
            time.sleep(POLL_S)  # a sampling clock; no thread waits for this one

    def _sleep(self, baton: LockType) -> None:
        wake = baton.release
        self.sleeping.append(wake)
        # `submit` appends its job and then checks `sleeping`; here the order is reversed, so one sees the other.
        if not (self.must_stay() and self._withdraw(wake)):
            baton.acquire()
        self.restart(time.monotonic())

    def _withdraw(self, wake: Callable[[], object]) -> bool:
        """Takes the entry back; False if another thread has taken it, and is about to call it."""
        try:
            self.sleeping.remove(wake)
        except ValueError:
            return False
        return True
