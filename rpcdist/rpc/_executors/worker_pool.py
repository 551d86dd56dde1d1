"""Threads that run synchronous user functions, as many as it takes for none to starve.

Rules:
 1. `submit` never waits. A job handed to an idle thread costs one lock release (each parks on a lock of its own); while
    a thread is running, a job is only appended to the queue, and that thread takes it when it gets there.
 2. A thread that will wait and says so (`blocking()`: our own `Future.wait`) does not count as running from then on.
 3. What else blocks a job (`torch.futures.wait_all` waits in C++) cannot be seen from inside. A monitor samples while
    jobs are queued, and `threads_to_start` decides: up to one thread a core when the oldest job has waited for 1 ms;
    beyond that one more whenever no job has ended for 5 ms, in doubling bursts while the threads use no processor time.
 4. At the cap, with nothing ending for `stall_limit_s`, an error is logged that names the option, and the jobs that
    have waited that long are handed to `on_exhausted`, so that their callers get an answer.
 5. Nothing is lost between a check and an append: who parks, blocks or retires looks at the queue once more afterwards.
    The lists and sets are changed by single operations that are atomic in CPython, so there is no lock to contend for.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from typing import Final, NamedTuple

from rpcdist.deadline import Deadline
from rpcdist.errors import ForkedProcess, NotInitialized, PoolExhausted
from rpcdist.rpc._executors.pool_monitor import Sampler
from rpcdist.time_limits import (
    LOOP_CLOSE_LIMIT_S,
    POOL_EXHAUSTED_LIMIT_S,
    POOL_IDLE_LIMIT_S,
    POOL_TICK_S,
    THREAD_GRACE_S,
)
from rpcdist.transport import fork

__all__ = ["PoolStats", "WorkerPool", "blocking"]

logger = logging.getLogger(__name__)

Function = Callable[..., object]
Job = tuple[Function, tuple[object, ...], float]  # what to call, and when it was submitted (monotonic seconds)

LINGER_TICKS: Final = 20  # the monitor goes on sampling for so many ticks after the queue was empty


class PoolStats(NamedTuple):
    threads: int
    idle: int
    running: int
    blocked: int
    queued: int


class _Worker:
    """One thread of the pool; its baton is a lock that is free for a moment when the thread shall wake up."""

    __slots__ = ("arguments", "baton", "blocked", "clock", "ended", "job", "pool", "thread")

    def __init__(self, pool: WorkerPool, number: int) -> None:
        self.pool = pool
        self.baton = _new_baton()
        self.ended = _new_baton()
        self.clock: int | None = None
        self.job: Function | None = None
        self.arguments: tuple[object, ...] = ()
        self.blocked = 0
        self.thread = threading.Thread(target=pool._work, args=(self,), name=f"{pool.name}-{number}", daemon=True)

    def cpu_s(self) -> float:
        """Processor time that the thread has used, in seconds; 0 where the system does not tell."""
        if self.clock is None:
            return 0.0
        try:
            return time.clock_gettime(self.clock)
        except OSError:  # the thread has ended
            return 0.0


class _Local(threading.local):
    worker: _Worker | None = None


_local = _Local()


def _new_baton() -> LockType:
    baton = allocate_lock()
    baton.acquire()
    return baton


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """While it lasts, this thread does not count as running, so that another may take its place at once (rule 2)."""
    worker = _local.worker
    if worker is None:
        yield
        return
    worker.pool._enter_blocking(worker)
    try:
        yield
    finally:
        worker.pool._leave_blocking(worker)


def _log_error(error: BaseException, function: Function) -> None:
    logger.error("a job of the worker pool failed: %r", function, exc_info=error)


def _describe(function: Function, arguments: tuple[object, ...]) -> str:
    return repr(function)  # not of the arguments, which may be large


class WorkerPool:
    """Runs synchronous jobs in threads; see the rules above.

    Each job runs in an empty `contextvars.Context`.

    Args:
        name: the threads are called `name-N`.
        max_threads: the cap; users know it as the option `max_worker_threads`.
        idle_s: a thread that had nothing to do for so long ends.
        stall_limit_s: rule 4.
        num_cores: rule 3; by default the number of cores that this process may use.
        on_error: gets what a job raises, `SystemExit` included, on the job's thread; the thread goes on in any case.
        on_exhausted: gets jobs that could not run (rule 4), on the monitor's thread; it must not block.
        prepare: called on each thread when it starts.
        cleanup: called after each job on its thread, to take away what a user function left behind there.
        describe: names a job in messages.
    """

    def __init__(
        self,
        *,
        name: str = "rpcdist-worker",
        max_threads: int = 1024,
        idle_s: float = POOL_IDLE_LIMIT_S,
        stall_limit_s: float = POOL_EXHAUSTED_LIMIT_S,
        num_cores: int | None = None,
        on_error: Callable[[BaseException, Function], object] = _log_error,
        on_exhausted: Callable[[PoolExhausted, Function, tuple[object, ...]], object] | None = None,
        prepare: Callable[[], object] = lambda: None,
        cleanup: Callable[[], object] | None = None,
        describe: Callable[[Function, tuple[object, ...]], str] = _describe,
    ) -> None:
        self.name = name
        self.max_threads = max_threads
        self._idle_s = idle_s
        self._stall_limit_s = stall_limit_s
        self._num_cores = num_cores or _usable_cores()
        self._on_error = on_error
        self._on_exhausted = on_exhausted
        self._prepare = prepare
        self._cleanup = cleanup
        self._describe = describe

        self._queue: deque[Job] = deque()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._blocked: set[_Worker] = set()
        self._numbers = itertools.count()
        self._progress = False  # set after each job, cleared by the monitor
        self._refusal: Callable[[], Exception] | None = None
        self._stopping = False
        self._monitor: threading.Thread | None = None
        self._monitor_started = allocate_lock()  # taken once
        self._monitor_parked: list[LockType] = []
        self._is_start_failure_logged = False
        fork.register(self)
        atexit.register(self.close)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def submit(self, function: Function, *arguments: object) -> None:
        """Has `function(*arguments)` called on a thread of the pool; never waits.

        Raises:
            NotInitialized: the pool is closed.
            ForkedProcess: called in a forked child.
        """
        if self._refusal is not None:
            raise self._refusal()
        self._queue.append((function, arguments, time.monotonic()))
        # One that is about to park looks at the queue again, so a running thread is enough.
        if len(self._workers) - len(self._idle) - len(self._blocked) <= 0:
            self._start_one()
        elif self._monitor_parked or self._monitor is None:
            self._wake_monitor()

    def submit_many(self, jobs: Iterable[tuple[Function, tuple[object, ...]]]) -> None:
        """Submits `(function, arguments)` pairs, in order, with one wake-up for all of them."""
        if self._refusal is not None:
            raise self._refusal()
        now = time.monotonic()
        self._queue.extend([(function, arguments, now) for function, arguments in jobs])
        if not self._queue:
            return
        if len(self._workers) - len(self._idle) - len(self._blocked) <= 0:
            self._start_one()
        elif self._monitor_parked or self._monitor is None:
            self._wake_monitor()

    def stats(self) -> PoolStats:
        threads, idle, blocked = len(self._workers), len(self._idle), len(self._blocked)
        return PoolStats(threads, idle, max(0, threads - idle - blocked), blocked, len(self._queue))

    def __repr__(self) -> str:
        stats = self.stats()
        counts = f"{stats.running} running, {stats.blocked} blocked, {stats.idle} idle, {stats.queued} queued"
        return f"<WorkerPool [{counts}]>"

    def close(self, timeout_s: float = LOOP_CLOSE_LIMIT_S) -> list[str]:
        """Takes no more jobs, lets those accepted end, and joins the threads; idempotent.

        Args:
            timeout_s: how long all of that may take, in seconds. Queued jobs that did not start by then never will.

        Returns:
            What still runs or never ran, as text for humans; it is logged, too, with the places where threads hang.
        """
        atexit.unregister(self.close)
        if self._stopping:
            return []
        self._refusal = self._refusal or NotInitialized
        self._stopping = True
        deadline = Deadline.after(timeout_s)
        while self._idle:
            self._wake_idle()
        self._wake_monitor()
        me = threading.current_thread()
        while workers := [worker for worker in list(self._workers) if worker.thread is not me]:
            if deadline.expired():
                break
            self._join(workers[0], deadline)
        jobs = [(worker.job, worker.arguments) for worker in list(self._workers) if worker.thread is not me]
        left = [self._describe(job, arguments) for job, arguments in jobs if job is not None]
        never_ran = [f"{self._describe(job[0], job[1])} (never started)" for job in self._drop_queue()]
        if left or never_ran:
            logger.error(
                "the worker pool was closed after %.1f s, but %d jobs did not end and %d never ran:\n%s",
                timeout_s, len(left), len(never_ran), self._stacks(),
            )  # fmt: skip
        if self._monitor is not None and self._monitor is not me:
            # It ends within a tick, now that the queue is empty.
            self._monitor.join(deadline.remaining_s() + THREAD_GRACE_S)
        return left + never_ran

    def _join(self, worker: _Worker, deadline: Deadline) -> None:
        """Waits for the end of a thread, which another thread may just be starting: that cannot be joined yet."""
        if worker.ended.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            worker.ended.release()
            if worker.thread.ident is not None:
                worker.thread.join(deadline.remaining_s() + THREAD_GRACE_S)

    # -- starting and parking ------------------------------------------------------------------------------------------

    def _wake_idle(self) -> bool:
        try:
            worker = self._idle.pop()
        except IndexError:
            return False
        worker.baton.release()
        return True

    def _start_one(self) -> bool:
        return self._wake_idle() or self._spawn()

    def _spawn(self) -> bool:
        worker = _Worker(self, next(self._numbers))
        self._workers.add(worker)
        if len(self._workers) > self.max_threads:
            self._workers.discard(worker)
            worker.ended.release()
            self._wake_monitor()
            return False
        try:
            worker.thread.start()
        except RuntimeError:  # the system's limit; the monitor tries again
            self._workers.discard(worker)
            worker.ended.release()
            if not self._is_start_failure_logged:
                self._is_start_failure_logged = True
                logger.exception(
                    "the system refuses another thread (%d run here); jobs wait. Raise its limit (`ulimit -u`), or "
                    "lower the option max_worker_threads",
                    len(self._workers),
                )
            self._wake_monitor()
            return False
        return True

    def _work(self, worker: _Worker) -> None:
        _local.worker = worker
        worker.clock = _thread_clock()
        self._prepare()
        queue, cleanup = self._queue, self._cleanup
        while True:
            try:
                function, arguments, _ = queue.popleft()
            except IndexError:
                if self._park(worker):
                    continue
                return
            worker.arguments = arguments
            worker.job = function
            if queue and (self._monitor_parked or self._monitor is None):
                self._wake_monitor()  # more than one job came for the one thread that was woken
            try:
                Context().run(function, *arguments)
            except BaseException as error:
                self._report(error, function)
            worker.arguments = ()
            del arguments  # an idle thread must not keep values alive
            if cleanup is not None:
                cleanup()
            function = worker.job = None  # type: ignore[assignment]
            self._progress = True

    def _report(self, error: BaseException, function: Function) -> None:
        try:
            self._on_error(error, function)
        except BaseException:
            logger.exception("the error hook of the worker pool failed on %r", error)

    def _park(self, worker: _Worker) -> bool:
        """Waits for work; False means that this thread shall end."""
        self._idle.append(worker)
        if (self._queue or self._stopping) and self._unpark(worker):
            return bool(self._queue) or not self._retire(worker)
        while not worker.baton.acquire(timeout=self._idle_s):
            if self._unpark(worker):
                return not self._retire(worker)
        return bool(self._queue) or not self._stopping or not self._retire(worker)

    def _unpark(self, worker: _Worker) -> bool:
        """Takes the worker out of the idle list, or returns False when another thread did and passes the baton."""
        try:
            self._idle.remove(worker)
        except ValueError:
            return False
        return True

    def _retire(self, worker: _Worker) -> bool:
        self._workers.discard(worker)
        if self._queue:  # it came while this thread still counted as running (rule 5)
            self._workers.add(worker)
            return False
        worker.ended.release()
        return True

    def _enter_blocking(self, worker: _Worker) -> None:
        worker.blocked += 1
        self._blocked.add(worker)
        if self._queue and len(self._workers) - len(self._idle) - len(self._blocked) <= 0:
            self._start_one()

    def _leave_blocking(self, worker: _Worker) -> None:
        worker.blocked -= 1
        if worker.blocked == 0:
            self._blocked.discard(worker)

    # -- the monitor ---------------------------------------------------------------------------------------------------

    def _wake_monitor(self) -> None:
        try:
            baton = self._monitor_parked.pop()
        except IndexError:
            if self._monitor is None and self._monitor_started.acquire(False):
                monitor = threading.Thread(target=self._watch, name=f"{self.name}-monitor", daemon=True)
                monitor.start()
                self._monitor = monitor  # not before: `close` joins it
        else:
            baton.release()

    def _watch(self) -> None:
        baton = _new_baton()
        sampler = Sampler(self)
        empty_ticks = 0
        while True:
            if self._queue:
                empty_ticks = 0
                for _ in range(sampler.num_to_start()):
                    if not self._start_one():
                        break
                sampler.check_exhausted()
            elif self._stopping and not self._workers:
                return
            else:
                empty_ticks += 1
                if empty_ticks > LINGER_TICKS:
                    self._monitor_parked.append(baton)
                    if not self._queue and not self._stopping:
                        baton.acquire()
                    elif not self._unpark_monitor(baton):
                        baton.acquire()
                    empty_ticks = 0
                    sampler.restart()
            if self._refusal is ForkedProcess or (self._stopping and not self._queue):
                return
            time.sleep(POOL_TICK_S)  # a sampling clock; nobody waits for this thread

    def _unpark_monitor(self, baton: LockType) -> bool:
        try:
            self._monitor_parked.remove(baton)
        except ValueError:
            return False
        return True

    def _drop_queue(self) -> list[Job]:
        dropped: list[Job] = []
        with contextlib.suppress(IndexError):
            while True:
                dropped.append(self._queue.popleft())
        return dropped

    def _stacks(self) -> str:
        frames = sys._current_frames()
        parts = []
        for worker in list(self._workers):
            frame = frames.get(worker.thread.ident or 0)
            job, arguments = worker.job, worker.arguments
            if frame is not None and job is not None and worker is not _local.worker:
                stack = "".join(traceback.format_stack(frame, 12))
                parts.append(f"{worker.thread.name} in {self._describe(job, arguments)}:\n{stack}")
        return "\n".join(parts)

    def after_fork_in_child(self) -> None:
        """The threads stayed in the parent; what is queued here runs there."""
        _local.worker = None
        self._refusal = ForkedProcess
        self._stopping = True
        self._workers, self._idle, self._blocked = set(), [], set()
        self._queue = deque()
        atexit.unregister(self.close)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _thread_clock() -> int | None:
    # Asked for by the thread itself: the identifier of a thread that has ended may crash the process.
    return time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None
