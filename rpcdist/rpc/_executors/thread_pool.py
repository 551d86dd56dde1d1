"""The worker pool: runs synchronous user functions, and adds threads as needed so that no call starves.

Rules:
 1. `submit` never waits. Handing a job to an idle thread costs one lock release (each parks on its own lock). If a
    thread is running, the job is only queued, and that thread takes it when it gets there.
 2. A thread does not count as running inside `blocking()` (e.g. in `Future.wait`) or while it copies a large answer.
 3. The pool cannot see other waits of a job (`torch.futures.wait_all` waits in C++). So a monitor samples the pool
 while
    jobs are queued, and `threads_to_start` decides: up to one thread per core if the oldest job has waited for 1 ms;
    beyond that, one more each time no job has ended for 5 ms, in doubling bursts while the threads use no CPU time.
 4. A job may return a `DeferredReply`. Its thread sends the answer and then briefly reads from the job's session; it
    counts as blocked while it sleeps there. It runs the calls that it reads, so a call needs no thread switch.
    While more jobs wait, answers are held back briefly and written together (`HeldAnswers`).
 5. If no job ends for `stall_limit_s` at the cap, the pool logs an error that names the option, and hands the jobs that
    have waited that long to `on_exhausted`, so that their callers get an answer.
 6. A thread can be lent to work that must stay on one thread: an actor (`Lane`), or a generator that waits for its
    consumer. A lent thread counts neither as running nor toward the cap, so another takes its place. The cap also
    limits how many threads can be lent at once.
 7. No job is lost between a check and an append: a thread that parks, blocks or retires checks the queue again.
    The lists and sets only change by single operations that are atomic in CPython, so there is no lock to contend for.
 8. Each owner has its own FIFO line of jobs, and the lines take turns, so one owner's backlog does not delay another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import Context
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Final

from rpcdist.at_exit import STARTS_NO_THREAD, register_at_exit, unregister_at_exit
from rpcdist.deadline import Deadline
from rpcdist.errors import ForkedProcess, NotInitialized, PoolExhausted
from rpcdist.inspection import PoolFacts
from rpcdist.rpc._executors import torch_state
from rpcdist.rpc._executors.blocking import WorkerThread, forget_hooks, hooks, set_hooks
from rpcdist.rpc._executors.deferred_replies import DeferredReply, HeldAnswers
from rpcdist.rpc._executors.pool_monitor import LoadHistory, PoolMonitor
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._values.exceptions import traceback_of
from rpcdist.time_limits import CLOSE_LIMIT_S, IDLE_LIMIT_S, POOL_EXHAUSTED_LIMIT_S, POOL_READ_S, THREAD_GRACE_S
from rpcdist.transport import fork

logger = logging.getLogger(__name__)

Function = Callable[..., object]
NAME: Final = "rpcdist-worker"
MAX_EMPTY_LINES: Final = 256


Job = tuple[Callable[..., object], tuple[object, ...], float]
"""The function, its arguments, and when it was submitted (monotonic seconds)."""


class JobLine(deque[Job]):
    """One owner's queued jobs, in order. Hashable: a line equals only itself."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]  # in C, like `__eq__`: no thread switch inside
    __eq__ = object.__eq__

    @property
    def oldest_at(self) -> float | None:
        try:
            return self[0][2]
        except IndexError:
            return None


def _log_error(error: BaseException, function: Function) -> None:
    logger.error("a job of the worker pool failed: %r\n%s", function, traceback_of(error))


def _describe(function: Function, arguments: tuple[object, ...]) -> str:
    return repr(function)  # the arguments may be large


def _do_nothing() -> None:
    """The answer has been sent."""


@dataclass(kw_only=True, eq=False, repr=False)
class ThreadPool:
    """Runs synchronous jobs in threads, each in its own `contextvars.Context`; see the rules above.

    Args:
        max_threads: the cap; users know it as the option `max_worker_threads`.
        idle_s: a thread ends after being idle this long.
        stall_limit_s: rule 5.
        num_cores: rule 3; by default the number of cores that this process may use.
        on_error: called on the job's thread with what the job raised, `SystemExit` included; the thread continues.
        on_exhausted: called on the monitor's thread with jobs that could not run (rule 5); must not block.
        describe: names a job in messages.
        keeps_one: whether one thread stays: Python 3.12 cannot start threads at interpreter exit, when `shutdown` may
            be called.
    """

    max_threads: int = 1024
    idle_s: float = IDLE_LIMIT_S
    stall_limit_s: float = POOL_EXHAUSTED_LIMIT_S
    num_cores: InitVar[int | None] = None
    on_error: Callable[[BaseException, Function], object] = _log_error
    on_exhausted: Callable[[PoolExhausted, Function, tuple[object, ...]], object] | None = None
    describe: Callable[[Function, tuple[object, ...]], str] = _describe
    new_context: Callable[[], Context] = Context
    keeps_one: bool = STARTS_NO_THREAD
    _lines: dict[Hashable, JobLine] = field(default_factory=dict)  # by owner: rule 8
    # The lines with jobs; the first has the next turn.
    _turns: OrderedDict[JobLine, None] = field(default_factory=OrderedDict)
    _workers: set[WorkerThread] = field(default_factory=set)
    # LIFO: the stack of the last one is warm, and the others can retire.
    _idle: list[WorkerThread] = field(default_factory=list)
    _blocked: set[WorkerThread] = field(default_factory=set)
    _lent: set[WorkerThread] = field(default_factory=set)  # rule 6
    num_reserved: int = 0
    _lending: threading.Lock = field(default_factory=threading.Lock)  # guards `num_reserved`
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _progress: bool = False  # set after each job, cleared by the monitor
    _refusal: Callable[[], Exception] | None = None
    _stopping: bool = False
    _reported_stall: float = -1.0  # `last_progress` of the last logged stall: each is logged once
    _is_start_failure_logged: bool = False

    def __post_init__(self, num_cores: int | None) -> None:
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        now = time.monotonic()
        self._history = LoadHistory(self._cpu_s, self._num_cores, self.max_threads, self.stall_limit_s, now)
        self._monitor = PoolMonitor(
            f"{NAME}-monitor",
            adjust=self._adjust,
            must_stay=lambda: bool(self._turns) or bool(self._held) or self._stopping,
            is_drained=lambda: self._stopping and not self._turns and not self._held,
            restart=self._history.restart,
        )
        self._held = HeldAnswers(self._watch_held_answers, self.report)
        fork.register(self)
        register_at_exit(self.close)

    def start_kept_thread(self) -> None:
        """Starts the thread that stays, if there is one; jobs start the others."""
        if self.keeps_one:
            self.start_one()

    # -- any thread ----------------------------------------------------------------------------------------------------

    def submit(self, function: Function, *arguments: object) -> None:
        """Queues `function(*arguments)` to run on a thread of the pool; never waits.

        Raises:
            NotInitialized: the pool is closed.
            ForkedProcess: called in a forked child.
        """
        if self._refusal is not None:
            raise self._refusal()
        self.submit_many(((function, arguments),))

    def submit_many(self, jobs: Iterable[tuple[Function, tuple[object, ...]]], owner: Hashable = None) -> None:
        """Submits `(function, arguments)` pairs, in order, with one wake-up for all of them.

        Args:
            owner: whose line they join (rule 8); None for this process.
        """
        if self._refusal is not None:
            raise self._refusal()
        line = self._lines.get(owner)
        if line is None:
            line = self._new_line(owner)
        now = time.monotonic()
        for function, arguments in jobs:
            line.append((function, arguments, now))
        if not line:  # no jobs were given, or a thread has taken them all
            return
        self._turns[line] = None  # after the jobs: a thread that takes a turn and finds no job drops the turn
        # One running thread is enough: it checks the queue again before it parks.
        if len(self._workers) - len(self._idle) - len(self._blocked) <= 0:
            self.start_one()
        elif self._monitor.sleeping and not hooks.reads_jobs:  # otherwise this thread takes the job itself, at once
            self._monitor.wake()

    def _new_line(self, owner: Hashable) -> JobLine:
        """Adds a line for an owner, and drops the empty lines if there are many. If another thread is just adding jobs
        to a dropped line, `_turns` keeps that line until its jobs have run.
        """
        if len(self._lines) >= MAX_EMPTY_LINES:
            for idle in [other for other, line in list(self._lines.items()) if not line]:
                self._lines.pop(idle, None)
        return self._lines.setdefault(owner, JobLine())

    @property
    def has_queue(self) -> bool:
        return bool(self._turns)

    def facts(self) -> PoolFacts:
        threads, idle, blocked = len(self._workers), len(self._idle), len(self._blocked)
        running, queued = max(0, threads - idle - blocked), sum(map(len, list(self._turns)))
        oldest_at = min((at for line in list(self._turns) if (at := line.oldest_at) is not None), default=None)
        oldest_s = None if oldest_at is None else time.monotonic() - oldest_at
        return PoolFacts(threads, idle, running, blocked, queued, len(self._lent), self.max_threads, oldest_s)

    def jobs(self) -> list[tuple[int, Function, tuple[object, ...]]]:
        """Lists (thread ident, function, arguments) of the running jobs; any thread."""
        found = [(worker.thread.ident, worker.job, worker.arguments) for worker in self._all_workers()]
        return [(ident, job, arguments) for ident, job, arguments in found if ident is not None and job is not None]

    def close(self, timeout_s: float = CLOSE_LIMIT_S) -> list[str]:
        """Refuses new jobs, finishes the accepted ones, and joins the threads; idempotent.

        Args:
            timeout_s: limit for all of that, in seconds. Jobs still queued then are dropped.

        Returns:
            Descriptions of the jobs that still run or never ran; they are also logged, with stack traces.
        """
        unregister_at_exit(self.close)
        if self._stopping:
            return []
        self._refusal = self._refusal or NotInitialized
        self._stopping = True
        deadline = Deadline.after(timeout_s)
        while self._idle:
            self._wake_idle()
        self._monitor.wake()
        me = threading.current_thread()
        while workers := [worker for worker in self._all_workers() if worker.thread is not me]:
            if deadline.expired():
                break
            self._join(workers[0], deadline)
        jobs = [(worker.job, worker.arguments) for worker in self._all_workers() if worker.thread is not me]
        left = [self.describe(job, arguments) for job, arguments in jobs if job is not None]
        never_ran = [f"{self.describe(job[0], job[1])} (never started)" for job in self._drop_queue()]
        if left or never_ran:
            logger.error(
                "the worker pool was closed after %.1f s, but %d jobs did not end and %d never ran:\n%s",
                timeout_s, len(left), len(never_ran), self._stacks(),
            )  # fmt: skip
        self._monitor.join(deadline.remaining_s() + THREAD_GRACE_S)  # the queue is empty: it ends within a tick
        return left + never_ran

    def _join(self, worker: WorkerThread, deadline: Deadline) -> None:
        """Waits until a thread ends; it may still be starting, and could not be joined then."""
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

    def start_one(self) -> bool:
        """Wakes an idle thread or starts a new one; False at the cap, or if the system refuses."""
        return self._wake_idle() or self._spawn()

    def _spawn(self) -> bool:
        worker = WorkerThread(self._work, f"{NAME}-{next(self._numbers)}")
        # Added first, then counted: if two threads spawn at once at the cap, both may fail, but the cap holds. The
        # monitor starts the missing thread.
        self._workers.add(worker)
        if len(self._workers) > self.max_threads:
            self._workers.discard(worker)
            worker.ended.release()
            self._monitor.wake()
            return False
        try:
            worker.thread.start()
        except RuntimeError:  # the system's limit; the monitor tries again
            self._workers.discard(worker)
            worker.ended.release()
            if not self._is_start_failure_logged:
                self._is_start_failure_logged = True
                logger.exception(
                    "the system refused to start a worker thread (%d run); queued jobs wait. Unless the process is "
                    "exiting, raise its thread limit (`ulimit -u`) or lower the option max_worker_threads",
                    len(self._workers),
                )
            self._monitor.wake()
            return False
        return True

    def _work(self, worker: WorkerThread) -> None:
        worker.begin()
        sleep = partial(self._enter_blocking, worker), partial(self._leave_blocking, worker)
        set_hooks(*sleep)
        hooks.worker = worker
        torch_state.adopt_num_threads()
        turns, held = self._turns, self._held
        while True:
            try:
                line = turns.popitem(False)[0]
                function, arguments, _ = line.popleft()
                if line:
                    turns[line] = None
                del line
            except LookupError:
                if turns:  # only this line was empty: another thread has taken its last job
                    continue
                if held:
                    held.write()
                if self._park(worker):
                    continue
                return
            if turns and self._monitor.sleeping:
                self._monitor.wake()  # more jobs arrived than threads were woken
            deferred = self._run(worker, function, arguments)
            del function, arguments  # an idle thread must not keep them alive
            if deferred is not None:
                answer: Function = deferred.send
                if deferred.is_long:
                    self._answer_long(worker, deferred)
                    answer = _do_nothing
                if not turns and not self._stopping:
                    self._answer_and_read(deferred.session, answer, sleep)
                elif not deferred.is_long:
                    held.hold(deferred.session, answer)
                del deferred, answer
            self._progress = True  # after the cleanup: a job has ended when its thread can take the next one

    def _run(self, worker: WorkerThread, function: Function, arguments: tuple[object, ...]) -> DeferredReply | None:
        """Runs one job; returns the reply that the thread must send, if any."""
        result: object = None
        worker.arguments = arguments
        worker.job = function
        try:
            # A fresh context: the next job must not see a deadline or autograd context that this one leaves set.
            result = self.new_context().run(function, *arguments)
        except BaseException as error:  # `SystemExit` in a user function ends the job, not the thread
            self.report(error, function)
        worker.arguments = ()
        del function, arguments  # the traceback of an error that the job has kept refers to this frame
        torch_state.reset()  # undoes what a user function left behind on this thread
        worker.job = None
        return result if type(result) is DeferredReply else None

    # -- lent threads --------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserves a thread to be `lent`; `give_back` must follow.

        Raises:
            PoolExhausted: `max_threads` threads are reserved already.
        """
        with self._lending:
            if self.num_reserved >= self.max_threads:
                raise PoolExhausted(
                    f"all {self.max_threads} threads are in use: each actor keeps one for its lifetime, and each plain "
                    "generator one while it waits for its consumer. Raise the option max_worker_threads, or use "
                    "`async def` generators, which need no thread."
                )
            self.num_reserved += 1

    def give_back(self) -> None:
        with self._lending:
            self.num_reserved -= 1

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the current thread does not belong to the pool (rule 6)."""
        worker = hooks.worker
        if worker is None:  # an extra thread beside an exhausted pool
            worker = hooks.worker = WorkerThread(self._work, threading.current_thread().name)
        assert not worker.is_lent
        self._held.write()
        worker.is_lent = True
        self._lent.add(worker)
        self._workers.discard(worker)
        if self._turns and len(self._workers) - len(self._idle) - len(self._blocked) <= 0:
            self.start_one()  # `submit` relied on this thread
        try:
            yield
        finally:
            if worker.thread is threading.current_thread():
                self._workers.add(worker)
            else:
                worker.ended.release()
            self._lent.discard(worker)
            worker.is_lent = False

    def run_here(self, function: Function, arguments: tuple[object, ...]) -> DeferredReply | None:
        """Runs a job on this lent thread like the pool does; returns the reply that the thread must send, if any."""
        worker = hooks.worker
        assert worker is not None, "not on a pool thread"
        return self._run(worker, function, arguments)

    def answer_now(self, deferred: DeferredReply) -> None:
        try:
            deferred.send()
        except BaseException as error:
            self.report(error, deferred.send)

    def _all_workers(self) -> list[WorkerThread]:
        return [*self._workers, *self._lent]

    def _answer_long(self, worker: WorkerThread, deferred: DeferredReply) -> None:
        """Sends a large answer; other threads meanwhile read and run the arriving jobs (rules 2 and 4)."""
        self._enter_blocking(worker)
        try:
            deferred.session.hold_back(deferred.send)
            deferred.session.flush()
        except BaseException as error:
            self.report(error, deferred.send)
        finally:
            self._leave_blocking(worker)

    def _answer_and_read(
        self, session: AnySession, answer: Function, sleep: tuple[Callable[[], object], Callable[[], object]]
    ) -> None:
        """Sends a job's answer, and reads the next job (rule 4)."""
        try:
            hooks.reads_jobs = True
            session.read_while_waiting(self._has_nothing_to_do, POOL_READ_S, sleep, answer)
        except BaseException as error:
            self.report(error, answer)
        finally:
            hooks.reads_jobs = False

    def _watch_held_answers(self) -> None:
        if self._monitor.sleeping:
            self._monitor.wake()

    def _has_nothing_to_do(self) -> bool:
        return not self._turns and not self._stopping

    def report(self, error: BaseException, function: Function) -> None:
        try:
            self.on_error(error, function)
        except BaseException as why:
            logger.error("the error hook of the worker pool failed: %s", traceback_of(why))

    def _park(self, worker: WorkerThread) -> bool:
        """Waits for work; False means that this thread must end."""
        self._idle.append(worker)
        # A job submitted before the line above woke no thread, because this one counted as running (rule 7).
        if (self._turns or self._stopping) and self._unpark(worker):
            return bool(self._turns) or not self._retire(worker)
        while not worker.baton.acquire(timeout=self.idle_s):
            if self._unpark(worker):
                return not self._retire(worker)
            # Another thread has just taken this one out of the list, and is about to release the baton.
        return bool(self._turns) or not self._stopping or not self._retire(worker)

    def _unpark(self, worker: WorkerThread) -> bool:
        """Removes the worker from the idle list; False if another thread did, and will release the baton."""
        try:
            self._idle.remove(worker)
        except ValueError:
            return False
        return True

    def _retire(self, worker: WorkerThread) -> bool:
        self._workers.discard(worker)
        is_kept = self.keeps_one and not self._workers and not self._stopping
        if self._turns or is_kept:  # the job arrived while this thread still counted as running (rule 7)
            self._workers.add(worker)
            return False
        worker.ended.release()
        return True

    def _enter_blocking(self, worker: WorkerThread) -> None:
        self._held.write()
        if worker.is_lent:
            return
        worker.blocked += 1
        self._blocked.add(worker)
        # `submit` relied on this thread while it counted as running, so its jobs need another one now.
        if self._turns and len(self._workers) - len(self._idle) - len(self._blocked) <= 0:
            self.start_one()

    def _leave_blocking(self, worker: WorkerThread) -> None:
        if worker.is_lent:
            return
        worker.blocked -= 1
        if worker.blocked == 0:
            self._blocked.discard(worker)

    # -- for the monitor -----------------------------------------------------------------------------------------------

    def _adjust(self) -> bool:
        """Writes held-back answers; starts threads for queued jobs, or fails those jobs; returns whether jobs wait."""
        if self._held:
            self._held.write()
        facts, history = self.facts(), self._history
        if facts.oldest_s is None:
            return False
        has_progress, self._progress = self._progress, False
        now = time.monotonic()
        for _ in range(history.num_to_start(now, facts.queued, facts.oldest_s, facts.running, has_progress)):
            if not self.start_one():
                break
        if history.is_exhausted(now, facts.threads):
            if self._reported_stall != history.last_progress:
                self._reported_stall = history.last_progress
                logger.error("%s\n%s", self._exhaustion(), self._stacks())
            self._fail_stalled_jobs()
        return True

    def _cpu_s(self) -> float:
        return sum(worker.cpu_s() for worker in list(self._workers))

    def _fail_stalled_jobs(self) -> None:
        """Hands the jobs that have waited for `stall_limit_s` to `on_exhausted`; without it they keep waiting."""
        hook = self.on_exhausted
        if hook is None:
            return
        for line in list(self._turns):
            while (at := line.oldest_at) is not None and time.monotonic() - at >= self.stall_limit_s:
                try:
                    job = line.popleft()
                except IndexError:  # a thread was faster
                    break
                try:
                    hook(self._exhaustion(), *job[:2])
                except Exception:
                    logger.exception("the exhaustion hook of the worker pool failed; the job waits again")
                    line.appendleft(job)
                    self._turns[line] = None  # a thread that found no job may have dropped it meanwhile
                    break
            if not line:
                with contextlib.suppress(KeyError):
                    del self._turns[line]
                if line:  # a job arrived in between
                    self._turns[line] = None

    def _exhaustion(self) -> PoolExhausted:
        return PoolExhausted(
            f"all {self.max_threads} worker threads are busy, no call has ended for {self.stall_limit_s:g} s, and "
            f"{self.facts().queued} calls are queued. Raise the option max_worker_threads, or make the handlers "
            "`async def`, which need no thread while they wait."
        )

    def _drop_queue(self) -> list[Job]:
        dropped: list[Job] = []
        for line in list(self._turns):
            with contextlib.suppress(IndexError):
                while True:
                    dropped.append(line.popleft())
        self._turns.clear()
        return dropped

    def _stacks(self) -> str:
        frames = sys._current_frames()
        parts = []
        for worker in self._all_workers():
            frame = frames.get(worker.thread.ident or 0)
            job, arguments = worker.job, worker.arguments
            if frame is not None and job is not None and worker.thread is not threading.current_thread():
                stack = "".join(traceback.format_stack(frame, 12))
                parts.append(f"{worker.thread.name} in {self.describe(job, arguments)}:\n{stack}")
        return "\n".join(parts)

    def after_fork_in_child(self) -> None:
        """Forgets the threads and jobs: both stay in the parent."""
        forget_hooks()
        self._refusal = ForkedProcess
        self._stopping = True
        self._workers, self._idle, self._blocked, self._lent = set(), [], set(), set()
        self._lines, self._turns = {}, OrderedDict()
        self._held.after_fork_in_child()
        unregister_at_exit(self.close)
