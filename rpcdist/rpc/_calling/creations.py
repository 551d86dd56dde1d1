"""The call of a `remote()`: its outcome concerns the reference, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import Cancelled
from rpcdist.rpc._calling.reply_sinks import Submit
from rpcdist.rpc._peers.demultiplexer import PoolJob
from rpcdist.rpc._rref.identifiers import ReferenceShare
from rpcdist.rpc._values.failures import exception_of
from rpcdist.rpc.future import Future

__all__ = ["Creation", "CreationListener"]


class CreationListener(Protocol):
    """Who counts references."""

    def on_created(self, share: ReferenceShare) -> None:
        """The owner holds the result; any thread."""

    def on_creation_failed(self, share: ReferenceShare, exc: BaseException) -> None:
        """The call failed; not on the I/O loop."""


class Creation:
    """What becomes of a `remote()` (`ReplySink`). Its future is made when somebody asks for it: hardly anybody does.

    It must not hold the reference, which the table of calls would keep alive.

    Args:
        share: the reference, and the share of it that this worker will have.
        listener: is told the outcome.
        submit: gives functions that may run code of users to the pool.
        may_unpickle: whether an exception may be unpickled.
    """

    __slots__ = ("_call", "_error", "_future", "_has_ended", "_listener", "_lock", "_may_unpickle", "_share", "_submit")

    def __init__(self, share: ReferenceShare, listener: CreationListener, submit: Submit, may_unpickle: bool) -> None:
        self._share = share
        self._listener = listener
        self._submit = submit
        self._may_unpickle = may_unpickle
        self._lock = threading.Lock()  # around the four below
        self._call: Callable[[], bool] | None = None  # ends it; None when it has ended
        self._future: Future[Any] | None = None
        self._has_ended = False
        self._error: BaseException | None = None

    def replied(self, failure: rpc_pb2.Failure | None, payload: object, jobs: list[PoolJob]) -> None:
        if failure is not None:
            jobs.append((self._fail_with, (failure,)))
            return
        self._listener.on_created(self._share)
        future = self._end(None)
        if future is not None:  # its callbacks are code of users
            jobs.append((partial(future._complete, None), ()))

    def failed(self, exc: BaseException) -> None:
        self._submit(self.fail, exc)

    def _fail_with(self, failure: rpc_pb2.Failure) -> None:
        self.fail(exception_of(failure, may_unpickle=self._may_unpickle))

    def fail(self, exc: BaseException) -> None:
        """The call failed, or could not be made; not on the I/O loop."""
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

    def began(self, cancel: Callable[[], bool]) -> None:
        """The call was made; `cancel` ends it, and says whether that was before its outcome came."""
        with self._lock:
            if not self._has_ended:
                self._call = cancel

    def cancel(self) -> bool:
        """Ends the call, so that the reference fails; False if it has ended. Runs callbacks on this thread."""
        with self._lock:
            call = self._call
        if call is None or not call():
            return False
        self.fail(Cancelled("it was cancelled before its value existed"))
        return True

    def future(self) -> Future[Any]:
        """The same one each time; done when the owner holds the result."""
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
