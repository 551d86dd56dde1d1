"""When the worker pool needs another thread: pure decisions over samples, without threads and without a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from rpcdist.time_limits import POOL_CORE_DELAY_S, POOL_STALL_S

MAX_BURST: Final = 64
BUSY_SHARE: Final = 0.2  # threads that used less processor time than this, together, only wait


class PoolSample(NamedTuple):
    """A snapshot of the pool, with at least one job in its queue.

    Attributes:
        at: when it was taken, in monotonic seconds.
        queued: jobs that wait for a thread.
        oldest_at: when the oldest of them was submitted, in monotonic seconds.
        running: threads that run a job and have not said that they wait.
        num_threads: all threads of the pool.
        has_progress: whether a job has ended since the last sample.
    """

    at: float
    queued: int
    oldest_at: float
    running: int
    num_threads: int
    has_progress: bool


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the pool, as far as it decides whether threads are started.

    Attributes:
        queued: jobs that wait for a thread.
        oldest_s: how long the oldest has waited.
        running: threads that run a job and have not said that they wait.
        stalled_s: seconds since a job ended or the monitor started a thread.
        burst: threads to start at a stall.
        num_cores: threads that may run before the stall rule counts.
    """

    queued: int
    oldest_s: float
    running: int
    stalled_s: float
    burst: int
    num_cores: int


def threads_to_start(load: Load) -> int:
    """How many idle or new threads to set to work now (rule 3 of the pool)."""
    if load.queued == 0:
        return 0
    if load.running == 0:
        return 1
    if load.running < load.num_cores and load.oldest_s >= POOL_CORE_DELAY_S:
        return 1
    if load.stalled_s >= POOL_STALL_S and load.oldest_s >= POOL_CORE_DELAY_S:
        return min(load.burst, load.queued)
    return 0


class LoadHistory:
    """The state that the monitor keeps between two samples.

    Args:
        cpu_s: the processor time that the pool's threads have used so far, in seconds; None where the system does not
            tell. Asked for at stalls only, since it costs a system call per thread.
        num_cores: threads that may run before the stall rule counts.
        max_threads: the cap of the pool.
        stall_limit_s: a pool at its cap in which no job ends for so long is exhausted.
        now: monotonic seconds.

    Attributes:
        last_progress: when a job ended last, as far as samples tell.
    """

    def __init__(
        self, cpu_s: Callable[[], float] | None, num_cores: int, max_threads: int, stall_limit_s: float, now: float
    ) -> None:
        self._read_cpu_s = cpu_s
        self._num_cores = num_cores
        self._max_threads = max_threads
        self._stall_limit_s = stall_limit_s
        self.restart(now)

    def restart(self, now: float) -> None:
        """Forgets what was before a pause in which no job waited."""
        self.last_progress = now
        self._last_move = now  # a job ended, or threads were started
        self._burst = 1
        self._cpu_s = self._read_cpu_s() if self._read_cpu_s is not None else 0.0

    def num_to_start(self, sample: PoolSample) -> int:
        """How many threads to start now; the caller is expected to start them."""
        now = sample.at
        if sample.has_progress:
            self.last_progress = self._last_move = now
            self._burst = 1
        elif now - self._last_move >= POOL_STALL_S:
            self._choose_burst(now - self._last_move)
        stalled_s, oldest_s = now - self._last_move, now - sample.oldest_at
        wanted = threads_to_start(
            Load(sample.queued, oldest_s, sample.running, stalled_s, self._burst, self._num_cores)
        )
        if wanted:
            self._last_move = now
        return wanted

    def _choose_burst(self, elapsed_s: float) -> None:
        """Doubles the burst while the threads only wait. Busy ones get one at a time: each brings an OpenMP team."""
        if self._read_cpu_s is None:
            return
        cpu_s = self._read_cpu_s()
        is_waiting = 0 <= cpu_s - self._cpu_s < BUSY_SHARE * elapsed_s
        self._burst = min(2 * self._burst, MAX_BURST) if is_waiting else 1
        self._cpu_s = cpu_s

    def is_exhausted(self, sample: PoolSample) -> bool:
        """Whether the pool is at its cap and no job ends (rule 4 of the pool)."""
        return sample.num_threads >= self._max_threads and sample.at - self.last_progress >= self._stall_limit_s
