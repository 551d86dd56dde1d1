"""The receivers of a call's outcome: a blocked thread, or a future."""

from __future__ import annotations

import logging
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from functools import partial
from typing import Any

from rpcdist.errors import Cancelled
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._calling.call_table import PendingCall
from rpcdist.rpc._executors.blocking import blocking, hooks
from rpcdist.rpc._futures.interrupt import acquire
from rpcdist.rpc._marshal.arrived_value import Arrived, ArrivedFailure
from rpcdist.rpc._peers.demultiplexer import PoolJob
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc.future import Future
from rpcdist.time_limits import THREAD_GRACE_S

logger = logging.getLogger(__name__)


Submit = Callable[..., None]
"""Gives a function and its arguments to the pool."""


def result_of(failure: ArrivedFailure | None, payload: object) -> object:
    """The value of a reply; raises what the callee raised. Runs user code: never on the I/O loop."""
    if isinstance(payload, Arrived):
        return payload.decode()
    if failure is not None:
        raise failure.exception()
    return payload  # a stream, or None


def _is_made_here(payload: object) -> bool:
    """Whether the thread that has read a reply makes its value: that is quick, and runs no code of users."""
    if isinstance(payload, Arrived):
        return payload.is_simple and payload.is_short and payload.autograd is None
    return payload is None  # of most functions


def _settle_inside(context: CallContext, future: Future[Any]) -> None:
    """Callbacks of a call that was made in an autograd context run in it. Each job has a `contextvars` context."""
    current_autograd.set(context)
    future._settle()


class SyncReplySink:
    """One blocked thread. The value is decoded on that thread, so a call costs no third one.

    The constructor takes the lock, and the end of the call releases it. Until then the thread reads from the
    connection of the call, or, if another thread does, sleeps on the lock.
    """

    __slots__ = ("_error", "_failure", "_lock", "_payload", "_session", "_thread")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._failure: ArrivedFailure | None = None
        self._payload: object = None
        self._error: BaseException | None = None
        self._thread = 0  # the one that waits
        self._session: MessageSink | None = None  # where the thread may be reading

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        self._failure = failure
        self._payload = payload
        self._lock.release()
        if self._session is not None and self._thread != get_ident():
            self._session.ring()

    def failed(self, exc: BaseException) -> None:
        self._error = exc
        self._lock.release()
        if self._session is not None and self._thread != get_ident():
            self._session.ring()

    def wait(
        self,
        call: PendingCall,
        send: Callable[[], object] | None = None,
        session: MessageSink | None = None,
    ) -> object:
        """Waits for the call, and sends it before.

        Args:
            call: the call.
            send: sends it; None if it was sent already.
            session: by which it will go, if there is one.

        Returns:
            The result; raises the call's failure, or `DeadlineExceeded`.
        """
        try:
            if hooks.enter is None:  # a thread of the user's
                ended = self._wait(call, send, session)
            else:
                with blocking():
                    ended = self._wait(call, send, session)
        except BaseException:  # Ctrl-C in the main thread
            self._cancel(call, Cancelled(f"{call.what()} was interrupted"))
            raise
        if not ended:
            overdue = call.deadline_error()
            if self._cancel(call, None):
                raise overdue
            self._lock.acquire(timeout=THREAD_GRACE_S)  # the outcome arrived in this very moment
        if (error := self._error) is not None:
            self._error = None
            try:
                raise error
            finally:
                del error  # it holds this frame, and with it the arguments: a cycle, in which references would live on
        return result_of(self._failure, self._payload)

    def _cancel(self, call: PendingCall, exc: BaseException | None) -> bool:
        """Ends a call that was interrupted, or whose deadline is over; False if it has ended already."""
        return call.owner.cancel(call, exc)

    def _wait(self, call: PendingCall, send: Callable[[], object] | None, session: MessageSink | None) -> bool:
        if session is None and send is not None:
            send()
            send = None
        if (session := session or call.session) is not None:
            self._thread = get_ident()
            self._session = session  # before the lock is checked: a thread that releases it later then rings
            if session.lead(self._lock.locked, call.deadline.wait_s(), None, send):
                return True
        return acquire(self._lock, call.deadline.wait_s())


class CallFuture(Future[Any]):
    """The future of a call. The thread that reads the reply completes it if its value is plain and short and has no
    tensors. Another value is decoded by a thread that waits, or else by the pool, which runs callbacks, too.
    """

    __slots__ = ()

    def expect(self, call: PendingCall) -> None:
        """Says which call it is, before that is sent: a complete future lets go of its call, which holds it."""
        self._expected = call
        self._on_cancel = call.cancel

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        if failure is None and _is_made_here(payload):
            try:
                value = result_of(None, payload)
            except Exception as exc:  # it is damaged, or nested too deeply for the stack of this thread: see below
                logger.debug("a reply is left to the pool: %r", exc)
            else:
                if self._arrive(value):
                    jobs.append((self._run_callbacks, ()))
                return
        if isinstance(payload, Arrived) and payload.is_on_gpus:
            payload.keep_gpu_tensors()
            self._arrived = payload
        if self._deliver(partial(result_of, failure, payload)):
            context = payload.autograd if isinstance(payload, Arrived) else None
            jobs.append((self._settle, ()) if context is None else (_settle_inside, (context, self)))
        elif self.cancelled() and isinstance(payload, Arrived):
            payload.discard()
        elif self.cancelled() and failure is not None:
            failure.discard()

    def failed(self, exc: BaseException) -> None:
        call = self._expected
        if isinstance(call, PendingCall):  # else it is complete
            call.owner.submit(self._fail, exc)
