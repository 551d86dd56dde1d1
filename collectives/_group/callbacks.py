"""The callbacks of a group's futures, and the order in which they run.

[Note: callbacks] A callback may call operations of its group while the program goes on calling others: which of them
comes first is chance, and another on each rank, where operations have to come in one order on all ranks. Therefore:

 1. The callbacks of a group run one at a time, in the order in which the program attached them: the same on all ranks,
    as that of the program's operations is. Each waits for its future before it runs.
2. Operations that callbacks call have an order of their own: a second group of the same ranks runs it
(`EngineBackend.here`), which
    is made when the first callback calls an operation.
 3. A callback that attaches another one waits for its future, and runs it at once.

So a callback may wait for whatever the program has called before, and for whatever it calls itself, in any way. The
program may go on meanwhile. Callbacks run on a thread that lives while there are any; if a future is done and no
callback waits its turn, on the thread that attaches.

Programs rely on torch's way with a future that is done: its callback has run when `then` returns. So the thread that
attaches such a callback waits for it, where only callbacks of futures that are done come before it. The wait has a
limit, as one of these may in turn wait for what that thread does next.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import CALLBACK_TURN_LIMIT_S

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")


@dataclass(slots=True)
class _Attached:
    future: torch.futures.Future[Any]
    callback: Callable[[], None]
    has_run: bool = False


class Callbacks:
    """Runs the callbacks of one group in their order; any thread."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._changed = threading.Condition()
        self._waiting: deque[_Attached] = deque()
        self._current: _Attached | None = None  # which the thread of the callbacks has taken
        self._busy = False
        self._runner = 0  # the thread that runs a callback now

    def runs_here(self) -> bool:
        """Whether this thread is in a callback."""
        return self._runner == threading.get_ident()

    def attach(self, future: torch.futures.Future[T], callback: Callable[[], None]) -> None:
        """Runs a callback, which must not raise, in its turn, once the future is done."""
        if self.runs_here():
            _wait(future)
            callback()
            return
        attached = _Attached(future, callback)
        with self._changed:
            at_once = not self._busy and future.done()
            if not at_once:
                self._waiting.append(attached)
            if self._busy:
                if all(each.future.done() for each in (self._current, *self._waiting) if each is not None):
                    self._changed.wait_for(lambda: attached.has_run, CALLBACK_TURN_LIMIT_S)
                return
            self._busy = True
        if at_once:
            self._run(callback)
            with self._changed:
                if not self._waiting:
                    self._busy = False
                    self._changed.notify_all()
                    return
        try:
            threading.Thread(target=self._run_all, name=f"rpcdist callbacks {self._group}", daemon=True).start()
        except RuntimeError as exc:  # the system gives no more threads: the caller waits itself
            own_shortage(exc)
            self._run_all()

    def _run_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._busy = False
                    self._changed.notify_all()
                    return
                self._current = attached = self._waiting.popleft()
            _wait(attached.future)
            self._run(attached.callback)
            with self._changed:
                self._current = None
                attached.has_run = True
                self._changed.notify_all()

    def _run(self, callback: Callable[[], None]) -> None:
        self._runner = threading.get_ident()
        try:
            callback()
        except Exception:
            logger.exception("a callback of group %r failed", self._group)
        finally:
            self._runner = 0

    def drain(self, timeout_s: float) -> bool:
        """Waits until no callback runs or waits; returns False if that took too long. A callback waits for no other."""
        if self.runs_here():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)


def _wait(future: torch.futures.Future[T]) -> None:
    """Waits for a future of an operation, which its own limit ends; the callback reads its result."""
    try:
        torch._C.Future.wait(future)
    except Exception as exc:
        logger.debug("a callback is told of %r", exc)


class _FailedValue:
    """The value of a future that failed. Any use of it raises the error.

    torch's C++ code, its DDP for one, does not ask a future for the error that Python code has set, and takes the value
    for tensors. It finds these by pickling, or asks whether the value is one.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise self.error

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> NoReturn:  # type: ignore[override]  # nobody gets as far as the type
        raise self.error


def _raise(failure: _FailedValue) -> NoReturn:
    raise failure.error


def fail_future(future: torch.futures.Future[T], error: Exception) -> None:
    """`set_exception`, of which torch's C++ code learns as well."""
    torch._C.Future._set_unwrap_func(future, _raise)
    torch._C.Future.set_result(future, _FailedValue(error))


class OrderedFuture(torch.futures.Future[T]):
    """A future of an operation, or of a callback of one, whose callbacks run in the order of their group."""

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._callbacks = callbacks

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> OrderedFuture[S]:
        """A future of what the callback returns; it gets this future, which is done. See [Note: callbacks]."""
        following: OrderedFuture[S] = OrderedFuture(self._callbacks)

        def run() -> None:
            try:
                result = callback(self)
            except Exception as exc:
                fail_future(following, exc)
            else:
                following.set_result(result)

        self._callbacks.attach(self, run)
        return following

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Calls back with this future, once it is done. See [Note: callbacks]."""
        self._callbacks.attach(self, lambda: callback(self))
