"""When the worker pool needs another thread: a pure decision, and the samples that it is made from."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcdist.errors import PoolExhausted
from rpcdist.time_limits import POOL_CORE_DELAY_S, POOL_STALL_S

if TYPE_CHECKING:
    from rpcdist.rpc._executors.worker_pool import WorkerPool

__all__ = ["Load", "Sampler", "threads_to_start"]

logger = logging.getLogger(__name__)

MAX_BURST: Final = 64
HAS_THREAD_CLOCK: Final = hasattr(time, "pthread_getcpuclockid")


@dataclass(frozen=True, slots=True)
class Load:
    """What the monitor saw.

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
    """How many idle or new threads to set to work now (rule 3)."""
    if load.queued == 0:
        return 0
    if load.running == 0:
        return 1
    if load.running < load.num_cores and load.oldest_s >= POOL_CORE_DELAY_S:
        return 1
    if load.stalled_s >= POOL_STALL_S and load.oldest_s >= POOL_CORE_DELAY_S:
        return min(load.burst, load.queued)
    return 0


class Sampler:
    """The monitor's memory between two samples."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.restart()

    def restart(self) -> None:
        now = time.monotonic()
        self.last_progress = now  # a job ended
        self.last_move = now  # a job ended, or we started a thread
        self.burst = 1
        self.cpu_s = self._cpu_s()
        self.is_exhaustion_logged = False

    def _cpu_s(self) -> float:
        return sum(worker.cpu_s() for worker in list(self.pool._workers))

    def num_to_start(self) -> int:
        pool, now = self.pool, time.monotonic()
        if pool._progress:
            pool._progress = False
            self.last_progress = self.last_move = now
            self.burst = 1
            self.is_exhaustion_logged = False
        elif now - self.last_move >= POOL_STALL_S:
            self._choose_burst(now - self.last_move)
        stats = pool.stats()
        try:
            oldest_s = now - pool._queue[0][2]
        except IndexError:
            return 0
        load = Load(stats.queued, oldest_s, stats.running, now - self.last_move, self.burst, pool._num_cores)
        wanted = threads_to_start(load)
        if wanted:
            self.last_move = now
        return wanted

    def _choose_burst(self, elapsed_s: float) -> None:
        """Doubles the burst while the threads only wait. Busy ones get one at a time: each brings an OpenMP team."""
        cpu_s = self._cpu_s()
        is_waiting = 0 <= cpu_s - self.cpu_s < 0.2 * elapsed_s
        self.burst = min(2 * self.burst, MAX_BURST) if is_waiting and HAS_THREAD_CLOCK else 1
        self.cpu_s = cpu_s

    def check_exhausted(self) -> None:
        pool, limit_s = self.pool, self.pool._stall_limit_s
        if len(pool._workers) < pool.max_threads or time.monotonic() - self.last_progress < limit_s:
            return
        if not self.is_exhaustion_logged:
            self.is_exhaustion_logged = True
            logger.error("%s\n%s", self._error(), pool._stacks())
        while pool._on_exhausted is not None and pool._queue and time.monotonic() - pool._queue[0][2] >= limit_s:
            try:
                function, arguments, _ = pool._queue.popleft()
            except IndexError:
                return
            try:
                pool._on_exhausted(self._error(), function, arguments)
            except Exception:
                logger.exception("the exhaustion hook of the worker pool failed")

    def _error(self) -> PoolExhausted:
        return PoolExhausted(
            f"all {self.pool.max_threads} worker threads wait, none has finished for {self.pool._stall_limit_s:g} s, "
            f"and {len(self.pool._queue)} calls are queued. Raise the option max_worker_threads, or make the handlers "
            "`async def`, which need no thread while they wait."
        )
