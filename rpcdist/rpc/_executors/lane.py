"""Runs all jobs of an actor on one thread, because the actor's objects may be bound to a thread.

The pool lends the thread with the first job, and gets it back when the lane is closed, so a lane that blocks or waits
for another lane delays no other work. An idle lane briefly reads from its last job's session, like the pool's threads,
so that the next call needs no thread switch.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable

from rpcdist.rpc._executors.blocking import new_baton
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._peers.network import AnySession
from rpcdist.time_limits import POOL_READ_S


class Lane:
    """Runs jobs in order on one lent thread. Any thread may call any method; none of them waits."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._jobs: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._lock = threading.Lock()  # guards the next three
        self._is_started = False
        self._is_parked = False
        self._is_closed = False
        self._baton = new_baton()
        self._thread = 0
        self._reading: AnySession | None = None  # the session that the thread may be reading from

    @property
    def is_here(self) -> bool:
        return get_ident() == self._thread

    @property
    def is_free(self) -> bool:
        """Whether the thread is idle, so that a job could run at once."""
        return not self._jobs and (self._is_parked or self._reading is not None)

    def submit(self, function: Callable[..., object], *arguments: object) -> None:
        """Queues `function(*arguments)` after the earlier jobs; if the lane is closed, on any thread of the pool.

        Raises:
            PoolExhausted: the pool can lend no thread. See `ThreadPool.submit` for others.
        """
        if self.is_here:  # this thread checks for jobs before it parks or ends
            self._jobs.append((function, arguments))
            return
        with self._lock:
            is_closed = self._is_closed
            begins = not is_closed and not self._is_started
            if begins:
                self._pool.reserve()
            if not is_closed:
                self._jobs.append((function, arguments))
                self._is_started = True
            is_parked, self._is_parked = self._is_parked, False
        if is_closed:
            self._pool.submit(function, *arguments)
        elif begins:
            self._pool.submit(self._serve)
        else:
            self._wake(is_parked)

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Returns the thread after its queued jobs and `last`; without a thread, runs `last` here. Idempotent."""
        with self._lock:
            has_thread = self._is_started and not self._is_closed
            if last is not None and has_thread:
                self._jobs.append((last, ()))
            self._is_closed = True
            is_parked, self._is_parked = self._is_parked, False
        self._wake(is_parked)
        if last is not None and not has_thread:
            last()

    def _wake(self, is_parked: bool) -> None:
        if is_parked:
            self._baton.release()
        elif (reading := self._reading) is not None:
            reading.interrupt()

    # ------------------------------------------------------------ its thread

    def _serve(self) -> None:
        self._thread = get_ident()
        try:
            with self._pool.lent():
                while (job := self._next()) is not None:
                    deferred = self._pool.run_here(*job)
                    del job
                    if deferred is not None:
                        self._answer(deferred)
                        del deferred
        finally:
            self._thread = 0
            self._pool.give_back()

    def _next(self) -> tuple[Callable[..., object], tuple[object, ...]] | None:
        while True:
            if self._jobs:  # only this thread takes them
                return self._jobs.popleft()
            with self._lock:
                if self._jobs:
                    continue
                if self._is_closed:
                    return None
                self._is_parked = True
            self._baton.acquire()

    def _answer(self, deferred: DeferredReply) -> None:
        """Sends an answer, and, if no job is queued, reads the next one from the same session."""
        if deferred.is_long or not self._has_nothing_to_do():
            self._pool.answer_now(deferred)
            return
        self._reading = deferred.session
        try:
            deferred.session.read_while_waiting(self._has_nothing_to_do, POOL_READ_S, None, deferred.send)
        except BaseException as error:
            self._pool.report(error, deferred.send)
        finally:
            self._reading = None

    def _has_nothing_to_do(self) -> bool:
        return not self._jobs and not self._is_closed
