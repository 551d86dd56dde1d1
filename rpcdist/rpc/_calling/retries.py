"""Calls that are made again, or later than the program asked for them.

If the worker of an idempotent function is lost, the call is made again, until its deadline. If an event loop calls a
worker that is unknown here, the pool asks the coordinator for the worker, and then makes the call.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rpcdist.deadline import backoff
from rpcdist.errors import OwnerLost, WorkerLost, on_error
from rpcdist.rpc._calling.caller import Caller, Destination
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._executors.torch_state import StateSlot
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc.functions import IDEMPOTENT_MARK
from rpcdist.rpc.future import Future
from rpcdist.time_limits import FIRST_PAUSE_S, LONGEST_PAUSE_S
from rpcdist.transport.io_loop import Timer
from rpcdist.waiters import RareWaits


@dataclass(eq=False, repr=False)
class Retries:
    """The retried calls of one agent, and those to unknown workers; any thread may use it.

    Args:
        submit: runs functions that encode arguments, and so may run user code, on the pool.
    """

    caller: Caller
    directory: Directory
    call_later: Callable[[float, Callable[[], object]], Timer]
    submit: Callable[[Callable[[], None]], object]
    _open: set[_Retried] = field(default_factory=set)
    _idle: RareWaits = field(default_factory=RareWaits)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _to_strangers: dict[Destination, deque[_Retried]] = field(default_factory=dict)  # in the order of the calls

    def asks_first(self, to: Destination) -> bool:
        """Whether this thread, which must not block, makes its calls to a worker here: the worker is unknown, or calls
        that were made before it was known have not been sent yet.
        """
        return asyncio._get_running_loop() is not None and (self.directory.find(to) is None or to in self._to_strangers)

    def start_call(self, to: Destination, what: Invocation) -> Future[Any]:
        """Like `Caller.start_call`. Errors in the arguments are raised at once, as there, unless it `asks_first`."""
        retried = _Retried(self, to, what)
        self._open.add(retried)
        try:
            if self.asks_first(to):
                self._attempt_in_pool(to, retried)
            else:
                retried.attempt()
        except BaseException:
            self.forget(retried)
            raise
        return retried.future

    def _attempt_in_pool(self, to: Destination, retried: _Retried) -> None:
        with self._lock:
            waiting = self._to_strangers.setdefault(to, deque())
            waiting.append(retried)
            if len(waiting) == 1:
                with on_error(partial(self._to_strangers.pop, to)):  # no later call waits for a job that is not there
                    self.submit(partial(self._attempt_each, to, waiting))

    def _attempt_each(self, to: Destination, waiting: deque[_Retried]) -> None:
        """Makes the calls to a worker that was unknown, in their order; the first one asks for the worker."""
        while waiting:
            waiting[0].attempt_here()
            with self._lock:
                waiting.popleft()
                if not waiting:
                    del self._to_strangers[to]

    def forget(self, retried: _Retried) -> None:
        self._open.discard(retried)
        if self._idle.num:
            self._idle.recheck()

    def wait_empty(self, timeout_s: float) -> bool:
        return self._idle.wait_for(lambda: not self._open, timeout_s)

    def fail_all(self, exc: BaseException) -> None:
        """Ends the calls that pause; the caller ends those in flight."""
        for retried in self._open.copy():
            retried.end(exc)


class _Retried:
    """One retried call. At any time it has a call in flight, or a timer, or waits for its first attempt in the pool, or
    has ended.
    """

    def __init__(self, owner: Retries, to: Destination, what: Invocation) -> None:
        self.future: Future[Any] = Future(on_cancel=self._cancel)
        self._owner = owner
        self._to = to
        self._what = what
        self._deadline = owner.caller.deadline_of(what.timeout_s)
        self._pauses: Iterator[float] = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._deadline)
        # The calling thread's context and torch state, for all later attempts.
        self._context = copy_context()
        self._state = StateSlot()
        self._state.copy_current()
        self._lock = threading.Lock()
        self._current: Future[Any] | None = None
        self._timer: Timer | None = None
        self._ended = False

    def attempt(self) -> None:
        what = self._what._replace(timeout_s=self._deadline.timeout_s())
        current = self._context.copy().run(self._owner.caller.start_call, self._to, what)
        with self._lock:
            self._timer = None
            self._current = current
            ended = self._ended
        if ended:
            current.cancel()
        current._when_done(self._done)

    def attempt_here(self) -> None:
        """`attempt` on a pool thread."""
        try:
            if not self._ended:
                self._owner.directory.resolve(self._to, self._deadline.remaining_s())  # may wait for the coordinator
            if not self._ended:
                self._state.call(self.attempt)
        except BaseException as exc:
            self.end(exc)

    def _done(self, current: Future[Any]) -> None:
        error = current.exception()
        if error is None:
            self._finish()
            value = current.value()
            if current._arrived is not None:
                self.future._arrived = current._arrived.followed_by(value)
            self.future._complete(value)
        elif self._is_loss(error) and not self._deadline.expired():
            with self._lock:
                if not self._ended:
                    again = self._owner.submit
                    self._current = None
                    self._timer = self._owner.call_later(next(self._pauses), lambda: again(self.attempt_here))
        else:
            self.end(error)

    def _is_loss(self, error: BaseException) -> bool:
        """Whether the worker of an idempotent function is lost, which may raise `WorkerLost` about another worker."""
        if getattr(self._what.func, IDEMPOTENT_MARK, None) is not True:
            return False
        if not issubclass(type(error), WorkerLost) or issubclass(type(error), OwnerLost):
            return False
        assert isinstance(error, WorkerLost)
        directory = self._owner.directory
        return error.worker == directory.name_of(directory.resolve(self._to))

    def end(self, error: BaseException) -> None:
        if self._finish():
            self.future._fail(error)

    def _finish(self) -> bool:
        with self._lock:
            was_open, self._ended = not self._ended, True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._owner.forget(self)
        return was_open

    def _cancel(self) -> bool:
        with self._lock:
            current = self._current
        self._finish()
        if current is not None:
            current.cancel()
        return True
