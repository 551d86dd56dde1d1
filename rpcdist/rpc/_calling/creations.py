"""The call of a `remote()`: its outcome concerns the reference, and no thread waits for it."""

from __future__ import annotations

import threading
from _thread import LockType
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rpcdist.errors import Cancelled, NotInitialized
from rpcdist.rpc._calling.call_table import PendingCall, Submit
from rpcdist.rpc._calling.new_calls import SyncReplySink
from rpcdist.rpc._marshal.arrived_value import Arrived, ArrivedFailure
from rpcdist.rpc._peers.network import PoolJob
from rpcdist.rpc._rref.messages import ReferenceShare
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc.future import Future

NOT_INCLUDED: Final = object()
"""Returned in place of the value if the reply to a `remote()` did not include it."""


@dataclass(slots=True, eq=False)
class Creation:
    """The outcome of a `remote()` (`ReplySink`). Its future is created on demand, since few programs ask for it.

    It must not hold the reference, which the table of calls would keep alive.
    """

    _share: ReferenceShare
    _listener: RRefShell
    _submit: Submit
    _lock: LockType = field(default_factory=threading.Lock)  # protects everything below
    _call: PendingCall | None = None  # None when it has ended
    _value_sink: SyncReplySink | None = None  # waits for the value, which comes with the reply
    _future: Future[Any] | None = None
    _has_ended: bool = False
    _error: BaseException | None = None

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        value_sink = self._take_value_sink()
        if failure is not None:
            jobs.append((self._fail_with, (failure, value_sink)))
            return
        self._listener.on_created(self._share)
        future = self._end(None)
        if future is not None:  # its callbacks are user code
            jobs.append((partial(future._complete, None), ()))
        if value_sink is not None:
            value_sink.replied(None, NOT_INCLUDED if payload is None else payload, jobs)
        elif isinstance(payload, Arrived):  # the thread that wanted it no longer waits
            payload.discard()

    def failed(self, exc: BaseException) -> None:
        value_sink = self._take_value_sink()
        if value_sink is not None:
            value_sink.failed(exc)
        with suppress(NotInitialized):  # the program ends without `shutdown`, and callbacks do not run any more
            self._submit(self.fail, exc)

    def _take_value_sink(self) -> SyncReplySink | None:
        with self._lock:
            value_sink, self._value_sink = self._value_sink, None
            return value_sink

    def _fail_with(self, failure: ArrivedFailure, value_sink: SyncReplySink | None) -> None:
        exc: BaseException
        try:
            exc = failure.exception()
        except BaseException as why:  # from the user's `__setstate__`, Ctrl-C included: it also ends the creation
            exc = why
        try:
            self.fail(exc)
        finally:
            if value_sink is not None:
                value_sink.failed(copied(exc))

    def fail(self, exc: BaseException) -> None:
        """Records that the call failed, or could not be made; not on the I/O loop."""
        self._listener.on_creation_failed(self._share, exc)
        future = self._end(exc)
        if future is not None:
            future._fail(exc)

    def _end(self, error: BaseException | None) -> Future[Any] | None:
        with self._lock:
            self._has_ended = True
            self._call = None
            self._error = error
            return self._future

    def began(self, call: PendingCall) -> None:
        with self._lock:
            if not self._has_ended:
                self._call = call

    def cancel(self) -> bool:
        """Ends the call, so that the reference fails; False if it has ended. Runs callbacks on this thread."""
        call = self._call
        if call is None or not call.cancel():
            return False
        value_sink, error = self._take_value_sink(), Cancelled("it was cancelled before its value existed")
        self.fail(error)
        if value_sink is not None:
            value_sink.failed(error)
        return True

    def want_value(self, value_sink: SyncReplySink, limit_s: float) -> PendingCall | None:
        """Makes the reply include the value, if the call's message has not been sent yet.

        Args:
            value_sink: gets the value, or `NOT_INCLUDED`; only one may wait for it.
            limit_s: limit of the caller's wait. A call that may take longer is left unchanged.

        Returns:
            The call, for which the caller then waits; None if the value must be fetched.
        """
        call = self._call
        if call is None or call.session is None or call.autograd is not None or call.timeout_s > limit_s:
            return None
        with self._lock:
            if self._has_ended or self._value_sink is not None:
                return None
            self._value_sink = value_sink  # before the message is changed: its reply may come at once
        if call.session.want_value(call.id):
            return call
        self.forget(value_sink)
        return None

    def forget(self, value_sink: SyncReplySink) -> bool:
        """Records that the sink no longer waits; False if the value has arrived."""
        with self._lock:
            if self._value_sink is not value_sink:
                return False
            self._value_sink = None
            return True

    def future(self) -> Future[Any]:
        """The future, always the same one; done when the owner holds the result."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            future.is_quiet = True  # the error surfaces where the reference is used
            has_ended, error = self._has_ended, self._error
        if has_ended and error is None:
            future._complete(None)
        elif error is not None:
            future._fail(error)
        return future
