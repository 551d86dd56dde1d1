"""What waits for the outcome of a call: a blocked thread, or a future."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from rpcdist._proto import rpc_pb2
from rpcdist.errors import Cancelled
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._calling.call_table import Job, PendingCall
from rpcdist.rpc._calling.interrupt import acquire
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._values.arrived import ArrivedValue
from rpcdist.rpc._values.failures import exception_of
from rpcdist.rpc.future import Future
from rpcdist.time_limits import THREAD_GRACE_S

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

__all__ = ["FutureReplySink", "Job", "SyncReplySink", "result_of"]


def result_of(reply: rpc_pb2.Reply, payload: object, may_unpickle: bool) -> object:
    """The value of a reply; raises what the callee raised. Runs user code: never on the I/O loop."""
    if isinstance(payload, ArrivedValue):
        return payload.decode()
    if reply.HasField("failure"):
        raise exception_of(reply.failure, may_unpickle=may_unpickle)
    return payload  # a stream, or nothing


def _settle_inside(context: CallContext, future: Future[Any]) -> None:
    """Callbacks of a call that was made in an autograd context run in it. Each job has a `contextvars` context."""
    current_autograd.set(context)
    future._settle()


class SyncReplySink:
    """One blocked thread. The value is decoded on that thread, so a call costs no third one.

    The lock is taken when this is made, and released by whoever ends the call.
    """

    __slots__ = ("_error", "_lock", "_may_unpickle", "_payload", "_reply")

    def __init__(self, may_unpickle: bool) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._may_unpickle = may_unpickle
        self._reply: rpc_pb2.Reply | None = None
        self._payload: object = None
        self._error: BaseException | None = None

    def replied(self, reply: rpc_pb2.Reply, payload: object, jobs: list[Job]) -> None:
        self._reply = reply
        self._payload = payload
        self._lock.release()

    def failed(self, exc: BaseException) -> None:
        self._error = exc
        self._lock.release()

    def wait(self, call: PendingCall, agent: Agent) -> object:
        """The result; raises the call's failure, or `DeadlineExceeded`."""
        left_s = call.deadline.wait_s()
        try:
            with blocking():
                ended = acquire(self._lock, left_s)
        except BaseException:  # Ctrl-C in the main thread
            agent.caller.cancel(call, Cancelled(f"{call.what()} was interrupted"))
            raise
        if not ended:
            if agent.caller.cancel(call, None):
                raise call.deadline_error()
            self._lock.acquire(timeout=THREAD_GRACE_S)  # the outcome arrived in this very moment
        if (error := self._error) is not None:
            self._error = None
            try:
                raise error
            finally:
                del error  # it holds this frame, and with it the arguments: a cycle, in which references would live on
        assert self._reply is not None  # one of the two is set before the lock is released
        return result_of(self._reply, self._payload, self._may_unpickle)


class FutureReplySink:
    """A future. Its value is decoded by a thread that waits for it, or in the pool; callbacks run in the pool."""

    __slots__ = ("_agent", "future")

    def __init__(self, agent: Agent, future: Future[Any]) -> None:
        self._agent = agent
        self.future = future

    def replied(self, reply: rpc_pb2.Reply, payload: object, jobs: list[Job]) -> None:
        future = self.future
        if future._deliver(partial(result_of, reply, payload, self._agent.options.allow_pickle)):
            context = payload.autograd if isinstance(payload, ArrivedValue) else None
            jobs.append((future._settle, ()) if context is None else (_settle_inside, (context, future)))
        elif future.cancelled() and isinstance(payload, ArrivedValue):
            payload.discard()

    def failed(self, exc: BaseException) -> None:
        self._agent.pool.submit(self.future._fail, exc)
