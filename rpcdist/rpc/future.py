"""Futures: what `rpc_async` returns.

A `Future` is a `torch.futures.Future`, so scripts may pass it to `torch.futures.wait_all`. Code can also await it,
cancel it, wait for it with a timeout, and pass it to asyncio's waiting functions (`asyncio.wait`, `gather`, ...).

[Note: two halves]
    The Python half (this class) holds the state. The C++ half, which `torch.futures.collect_all` waits for, mirrors it
    and is completed right after it. They are separate because waiting in C++ ignores Ctrl-C, timeouts and event loops,
    and because completing the C++ half may run user callbacks, which must not run on the I/O loop.

Rules:
 1. A future is completed once. The thread that takes `_once`, a lock that is never released, completes it.
 2. A thread appends an observer first and checks `_finished` afterwards; the completing thread sets `_finished` first
    and removes the observers afterwards. One atomic operation removes an observer, so each is called exactly once.
    No lock is held: a signal handler or a finalizer may complete a future in the middle of any of this.
 3. The thread that reads the reply calls `_deliver`, which stores a function that makes the result. A thread that is
    blocked in `wait`, `wait_all` or the like calls that function itself, which saves a thread switch; otherwise the
    caller of `_deliver` has the pool call `_settle`. The function is called once.

[Note: frames]
    An error holds the frames that it passed through and their callers, and the future holds the error. So the methods
    on that path delete `self` when they end: otherwise the future and all local variables of the functions that waited
    for it, remote references among them, would live until the garbage collector runs. The collector does not see the
    C++ half; `rpcdist.rpc._futures.failure` takes care of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar, cast

import torch
import torch.futures

from rpcdist.deadline import acquire
from rpcdist.errors import BlockingInLoop, Cancelled, DeadlineExceeded, RpcdistError, described, text_of
from rpcdist.profile_ranges import is_profiling, record_function
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._futures.failure import Failure, raise_failure
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._values.exceptions import drop_first_frame, get_traceback, set_traceback, traceback_of
from rpcdist.waiters import running_loop, wake_threadsafe

__all__ = ["Future"]

T = TypeVar("T")
S = TypeVar("S")

logger = logging.getLogger(__name__)

_COMPLETED_TWICE: Final = (
    "Attempting to mark a completed Future as complete again. Note that a Future can only be marked completed once."
)
_Base: Final = cast(Any, torch._C.Future)
_init = _Base.__init__
_base_set_result = _Base.set_result
_NO_DEVICES: Final[list[torch.device]] = []
_get_running_loop = asyncio._get_running_loop


class Expected(Protocol):
    """The operation that will complete a future."""

    @property
    def session(self) -> AnySession | None:
        """The session that will bring the result; None if it is not known."""

    def what(self) -> str:
        """For messages, such as "rpc to 'w1' of torch.add"."""


class OnGpus(Protocol):
    """A result with GPU tensors."""

    def join_gpus(self) -> None:
        """Makes the current streams of this thread wait for the tensors."""

    def followed_by(self, result: object) -> OnGpus:
        """The tensors that a callback computed from it on the current streams of this thread."""


class FutureObserver:
    """One observer for several futures, which can also take over results before their futures are done. So a thread
    that waits for several futures makes their results itself, like a thread that waits for one.
    """

    def note_done(self, future: Future[Any]) -> None:
        """An observed future is done. Called once for each, on the completing thread; it must be quick."""
        raise NotImplementedError

    def take_over(self, future: Future[Any]) -> bool:
        """The result of a future has arrived and is not decoded yet; called on the thread that has read it.

        Returns:
            True if a waiting thread is certain to call the future's `_settle`.
        """
        raise NotImplementedError


class Future(torch.futures.Future[T]):
    """The result of a call that is still running.

    Any thread may call any method. Callbacks run on the thread that completes the future, or immediately if it is done;
    callbacks that are added on an event loop run on that loop.

    Args:
        devices: the accelerators on which tensors of the result may lie, as in torch.
        on_cancel: called once if `cancel` wins; it must not block.
    """

    __slots__ = (
        "_arrived", "_callbacks", "_debt", "_devices", "_error", "_expected", "_failure", "_finished", "_observers",
        "_on_cancel", "_once", "_result", "_traceback", "is_quiet",
    )  # fmt: skip

    def __init__(
        self,
        *,
        devices: Sequence[int | str | torch.device] | None = None,
        on_cancel: Callable[[], object] | None = None,
    ) -> None:
        self._devices = devices
        _init(self, [torch.device(device) for device in devices] if devices else _NO_DEVICES)
        self._once = allocate_lock()
        self._finished = False
        self._on_cancel = on_cancel
        self._observers: list[LockType | FutureObserver | Callable[[], object]] = []  # a lock for each blocked thread
        self._callbacks: list[Callable[[Future[T]], object]] = []  # of the user
        self._debt: list[Callable[[], T]] | None = None  # rule 3
        self._error: BaseException | None = None
        self._failure: Failure | None = None
        self._expected: Expected | None = None
        self._arrived: OnGpus | None = None
        self.is_quiet = False
        """Set by code that reports the error itself: an unread error is then not logged."""

    # -- asking --------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._finished

    def cancelled(self) -> bool:
        """Whether `cancel` ended the call."""
        return self._finished and type(self._error) is Cancelled

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the result.

        Args:
            timeout: the limit of this wait, in seconds; None waits until the call ends (by its own deadline at the
                latest). The call continues after the timeout.

        Raises:
            DeadlineExceeded: the timeout expired.
            BlockingInLoop: called on an event loop's thread before the future is done; write `await`.
            BaseException: the call's own error, the same object each time.
        """
        if not self._finished:
            if is_profiling():
                self._block_in_range(timeout)
            else:
                self._block(timeout)
        if self._devices and self._error is None:
            _Base.wait(self)  # makes the current streams wait for pending copies
        try:
            return self._outcome()
        finally:
            del self  # [Note: frames]

    def value(self) -> T:
        """The result or error of a future that is done."""
        if not self._finished:
            raise RuntimeError("the Future is not completed yet; use wait() or await")
        return self._outcome()

    def result(self) -> T:
        """`value` as asyncio calls it: raises `asyncio.InvalidStateError` while the future is pending."""
        if not self._finished:
            raise asyncio.InvalidStateError("there is no result yet; use wait() or await")
        try:
            return self._outcome()
        finally:
            del self  # [Note: frames]

    def exception(self, timeout: float | None = 0) -> BaseException | None:
        """The error, or None for a result; `timeout` as in `wait`, but by default it does not wait."""
        if not self._finished:
            self._block(timeout)
        if self._failure is not None:
            self._failure.seen = True
        return self._error

    def __await__(self) -> Generator[Any, None, T]:
        """Waits on the running asyncio loop. Cancelling the awaiting task cancels the call."""
        if not self._finished:
            waiter: asyncio.Future[None] = running_loop().create_future()
            wake = partial(wake_threadsafe, waiter)
            self._observe(wake)
            try:
                yield from waiter
            except asyncio.CancelledError:
                self._forget(wake)
                self._ignore_error()
                self.cancel()
                raise
        if self._devices and self._error is None:
            _Base.wait(self)  # as in `wait`
        try:
            return self._outcome()
        finally:
            del self  # [Note: frames]

    def _outcome(self) -> T:
        error = self._error
        if error is None:
            if self._arrived is not None:
                self._arrived.join_gpus()
            return self._result
        if self._failure is not None:
            self._failure.seen = True
        if self._arrived is not None:
            self._arrived.join_gpus()
        try:
            # Each wait starts from the original traceback; otherwise the traceback would grow with each wait.
            set_traceback(error, self._traceback)
            raise error
        finally:
            del error, self  # [Note: frames]

    def _block_in_range(self, timeout: float | None) -> None:
        what = "a future" if self._expected is None else self._expected.what()
        with record_function(f"wait for {what}"):
            self._block(timeout)

    def _block(self, timeout: float | None) -> None:
        """Returns when done; raises `DeadlineExceeded` after `timeout` seconds."""
        try:
            if self._debt:
                self._settle()
                if self._finished:
                    return
            if _get_running_loop() is not None:
                raise BlockingInLoop("Future.wait()", "await future")
            ends_at = None if timeout is None else time.monotonic() + timeout
            with blocking():
                while not self._finished and self._sleep(ends_at):
                    if self._debt:
                        self._settle()
            if not self._finished:
                raise DeadlineExceeded(f"no result arrived within the {timeout} s of wait(); the call continues")
        except (KeyboardInterrupt, SystemExit):
            self._ignore_error()
            raise
        finally:
            del self  # [Note: frames]

    def _ignore_error(self) -> None:
        """Keeps an unread error out of the log: the waiting thread was interrupted and could not read it."""
        self.is_quiet = True
        if self._failure is not None:
            self._failure.seen = True

    def _sleep(self, ends_at: float | None) -> bool:
        """Waits for one wake-up; False if `ends_at` comes first."""
        baton = allocate_lock()
        baton.acquire()
        woken = False
        try:
            self._observers.append(baton)
            if self._finished or self._debt:
                return True
            left_s = None if ends_at is None else ends_at - time.monotonic()
            if left_s is None or left_s > 0:
                woken = self._read_while_waiting(baton, left_s) or acquire(baton, _left_s(ends_at))
            return woken
        finally:
            # `_deliver` would choose a lock that stayed here, and no thread would make the result. So one call of a
            # builtin removes it: Ctrl-C cannot interrupt that, as it could the beginning of a Python function.
            if not woken:
                try:
                    self._observers.remove(baton)
                except ValueError:  # removed already, even if Ctrl-C or the limit ended this wait
                    if self._debt:
                        self._settle()

    def _read_while_waiting(self, baton: LockType, timeout_s: float | None) -> bool:
        """Reads from the session that will bring the result; True when this thread's baton was released."""
        session = self._session()
        return session is not None and session.read_while_waiting(baton.locked, timeout_s)

    def _session(self) -> AnySession | None:
        expected = self._expected  # read once: another thread may complete this now
        return None if expected is None else expected.session

    def _give(self, baton: LockType) -> None:
        """Wakes a waiting thread, which may be asleep on its baton or reading from the session."""
        baton.release()
        session = self._session()
        if session is not None:
            session.interrupt()

    # -- completing ----------------------------------------------------------------------------------------------------

    def set_result(self, result: T) -> None:
        """Completes the future. Raises `RuntimeError` if it is complete already."""
        if not self._complete(result):
            raise RuntimeError(_COMPLETED_TWICE)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Completes the future with an error. Raises `RuntimeError` if it is complete already."""
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        if not self._fail(result):
            raise RuntimeError(_COMPLETED_TWICE)

    def cancel(self, msg: object = None) -> bool:
        """Ends the call: here immediately with `Cancelled`, at the callee when the cancellation arrives.

        Args:
            msg: accepted for compatibility with asyncio, and ignored.

        Returns:
            False if the future was done, or its result has arrived and is being decoded.
        """
        if not self._once.acquire(False):
            return False
        hook = self._on_cancel
        self._finish_error(Cancelled("the call was cancelled"))
        if hook is not None:
            try:
                hook()
            except Exception:
                logger.exception("cancelling a call failed; the callee may continue it")
        return True

    def _complete(self, result: T) -> bool:
        """`set_result`, but returns False if the future is done; may run user callbacks on this thread."""
        if not self._once.acquire(False):
            return False
        self._finish_result(result)
        return True

    def _fail(self, error: BaseException) -> bool:
        """`set_exception`, but returns False if the future is done; may run user callbacks on this thread."""
        if not self._once.acquire(False):
            return False
        self._finish_error(error)
        return True

    def _deliver(self, decode: Callable[[], T]) -> bool:
        """Stores the function that makes the result, without running user code on this thread (rule 3).

        Returns:
            True if the caller must have `_settle` called on a thread that may run user code. False if a waiting thread
            calls it, or if the future was complete already; then `decode` is dropped.
        """
        if not self._once.acquire(False):
            return False
        self._debt = [decode]
        for observer in tuple(self._observers):
            if type(observer) is LockType and self._forget(observer):
                self._give(observer)
                return False
        # User callbacks run on the pool: they may take long, and an observing thread waits for other futures, too.
        if self._callbacks:
            return True
        for observer in tuple(self._observers):
            if isinstance(observer, FutureObserver) and observer.take_over(self):
                return False
        return True

    def _arrive(self, result: T) -> bool:
        """Completes the future, on the thread that has read the reply, with a result that needs no user code.

        Returns:
            True if the caller must have `_run_callbacks` called on a thread that may run user code.
        """
        if not self._once.acquire(False):
            return False
        self._publish(result)
        return bool(self._callbacks)

    def _settle(self) -> None:
        """Makes the delivered result, unless another thread makes or made it."""
        try:
            decode = (self._debt or []).pop()
        except IndexError:
            return
        try:
            result = decode()
        except BaseException as error:
            drop_first_frame(error)  # that of this function, and then that of `result_of`
            drop_first_frame(error)
            self._finish_error(error)
        else:
            self._finish_result(result)
        finally:
            del self  # [Note: frames]

    def _finish_result(self, result: T) -> None:
        self._publish(result)
        if self._callbacks:
            self._run_callbacks()

    def _publish(self, result: T) -> None:
        self._result = result
        self._on_cancel = None
        self._finished = True
        if self._observers:
            self._wake()
        self._expected = None  # after `_wake`, which uses it; it refers to this future, which would be a cycle
        _base_set_result(self, result)

    def _finish_error(self, error: BaseException) -> None:
        self._traceback: TracebackType | None = get_traceback(error)
        self._failure = failure = Failure(error)
        if self.is_quiet:
            failure.seen = True
        self._error = error
        self._on_cancel = None
        self._finished = True
        self._wake()
        self._expected = None
        _Base._set_unwrap_func(self, raise_failure)
        _base_set_result(self, failure)
        self._run_callbacks()

    # -- observers -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        observers = self._observers
        while observers:
            try:
                observer = observers.pop(0)
            except IndexError:
                return
            if type(observer) is LockType:
                self._give(observer)
            elif isinstance(observer, FutureObserver):
                observer.note_done(self)
            else:
                observer()

    def _observe(self, observer: FutureObserver | Callable[[], object]) -> None:
        """Calls `observer` once when the future is done, on the completing thread or at once; it must be quick."""
        self._observers.append(observer)
        if self._finished and self._forget(observer):
            if isinstance(observer, FutureObserver):
                observer.note_done(self)
            else:
                observer()

    def _forget(self, observer: LockType | FutureObserver | Callable[[], object]) -> bool:
        """Removes an observer; False if the completing thread has removed it and calls it."""
        try:
            self._observers.remove(observer)
        except ValueError:
            return False
        return True

    def add_done_callback(
        self, callback: Callable[[Future[T]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Calls `callback(future)` when the future is done; an error that the callback raises is logged.

        On an event loop's thread it behaves like asyncio's futures: the callback runs on that loop, in `context` or a
        copy of the current one, and never before this method returns. It does not run if the loop is closed by then.
        """
        _check_callable("add_done_callback", callback)
        loop = _get_running_loop()
        if loop is not None:
            callback = partial(
                _call_on_loop, loop, contextvars.copy_context() if context is None else context, callback
            )
        self._when_done(callback)

    def remove_done_callback(self, callback: Callable[[Future[T]], object]) -> int:
        """Removes a callback as often as it was added, and returns that number. A running callback continues."""
        removed = 0
        for entry in tuple(self._callbacks):
            is_on_loop = isinstance(entry, partial) and entry.func is _call_on_loop
            if (cast(Any, entry).args[-1] if is_on_loop else entry) == callback:
                with contextlib.suppress(ValueError):  # the future is done by now, and calls it
                    self._callbacks.remove(entry)
                    removed += 1
        return removed

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop: the future belongs to no loop, so code on any loop may wait for it."""
        return asyncio.get_running_loop()

    def _when_done(self, callback: Callable[[Future[T]], object]) -> None:
        """`add_done_callback` regardless of event loops: the callback runs on the completing thread, or at once."""
        if self._finished:
            self._call_back(callback)
            return
        self._callbacks.append(callback)
        if self._finished:
            self._run_callbacks()

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Calls `callback(future)` when the future is done, and returns a future of the callback's result.

        An exception of the callback becomes the error of the returned future: unchanged if it is a RuntimeError,
        otherwise wrapped in one, as in torch. Cancelling the returned future cancels this one.
        """
        _check_callable("then", callback)
        child: Future[S] = Future(devices=self._devices, on_cancel=self.cancel)
        self._when_done(partial(_complete_child, child, callback))
        return child

    def _run_callbacks(self) -> None:
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                return
            try:
                self._call_back(callback)
            except KeyboardInterrupt:
                self._run_callbacks()
                raise

    def _call_back(self, callback: Callable[[Future[T]], object]) -> None:
        try:
            if self._devices and self._error is None:
                _Base.wait(self)
            callback(self)
        except BaseException as error:
            logger.error("Got the following error when running the callback: %s", traceback_of(error))
            if issubclass(type(error), KeyboardInterrupt):  # the user pressed Ctrl-C while the callback ran
                raise

    def __repr__(self) -> str:
        if not self._finished:
            state = "pending"
        elif self._error is not None:
            state = f"failed: {described('its repr', partial(repr, self._error))}"
        else:
            state = f"done: {type(self._result).__name__}"
        return f"<Future {state}>"


def _left_s(ends_at: float | None) -> float | None:
    return None if ends_at is None else max(0.0, ends_at - time.monotonic())


def _call_on_loop(
    loop: asyncio.AbstractEventLoop,
    context: contextvars.Context,
    callback: Callable[[Future[T]], object],
    future: Future[T],
) -> None:
    try:
        loop.call_soon_threadsafe(callback, future, context=context)
    except RuntimeError:
        if not loop.is_closed():  # on a closed loop nothing waits for the callback
            raise


def _check_callable(name: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"{name}(): incompatible function arguments. It takes a callable, not {callback!r}")


def _complete_child(child: Future[S], callback: Callable[[Future[T]], S], parent: Future[T]) -> None:
    if child.done():  # cancelled
        return
    try:
        result = callback(parent)
        if parent._arrived is not None:
            child._arrived = parent._arrived.followed_by(result)
    except BaseException as error:
        drop_first_frame(error)  # it holds both futures
        child._fail(_as_runtime_error(error))
        if issubclass(type(error), KeyboardInterrupt):
            raise
    else:
        child._complete(result)


def _as_runtime_error(error: BaseException) -> BaseException:
    if issubclass(type(error), RuntimeError):
        return error
    wrapped = RpcdistError(
        f"Got the following error when running the callback: {type(error).__name__}: {text_of(error)}"
    )
    wrapped.__cause__ = error
    wrapped.__traceback__ = get_traceback(error)  # the log of an unread error shows where it came from
    return wrapped
