"""Calls of idempotent functions: if their worker is lost, they are made again, until their deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from rpcdist.deadline import backoff
from rpcdist.errors import OwnerLost, WorkerLost
from rpcdist.rpc._calling.caller import Caller, Destination
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc.future import Future
from rpcdist.time_limits import FIRST_PAUSE_S, LONGEST_PAUSE_S
from rpcdist.transport.io_loop import Timer
from rpcdist.waiters import RareWaits


@dataclass(eq=False, repr=False)
class Retries:
    """The retried calls of one agent; any thread may use it.

    Args:
        submit: runs functions that encode arguments, and so may run user code, on the pool.
    """

    caller: Caller
    directory: Directory
    call_later: Callable[[float, Callable[[], object]], Timer]
    submit: Callable[[Callable[[], None]], object]
    _open: set[_Retried] = field(default_factory=set)
    _idle: RareWaits = field(default_factory=RareWaits)

    def start_call(self, to: Destination, what: Invocation) -> Future[Any]:
        """Like `Caller.start_call`. Errors in the arguments are raised at once, as there."""
        retried = _Retried(self, to, what)
        self._open.add(retried)
        try:
            retried.attempt()
        except BaseException:
            self.forget(retried)
            raise
        return retried.future

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
    """One retried call. At any time it has a call in flight, or a timer, or has ended."""

    def __init__(self, owner: Retries, to: Destination, what: Invocation) -> None:
        self.future: Future[Any] = Future(on_cancel=self._cancel)
        self._owner = owner
        self._to = to
        self._what = what
        self._deadline = owner.caller.deadline_of(what.timeout_s)
        self._pauses: Iterator[float] = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._deadline)
        self._context = copy_context()  # the calling thread's context, for all later attempts
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

    def _attempt_again(self) -> None:
        try:
            self.attempt()
        except BaseException as exc:
            self.end(exc)

    def _done(self, current: Future[Any]) -> None:
        error = current.exception()
        if error is None:
            self._finish()
            self.future._complete(current.value())
        elif self._is_loss(error) and not self._deadline.expired():
            with self._lock:
                if not self._ended:
                    again = self._owner.submit
                    self._current = None
                    self._timer = self._owner.call_later(next(self._pauses), lambda: again(self._attempt_again))
        else:
            self.end(error)

    def _is_loss(self, error: BaseException) -> bool:
        """Whether the called worker is lost; the function may also raise a `WorkerLost` about another worker."""
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
