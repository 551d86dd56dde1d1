"""The callbacks of a group's futures, and the order in which they run.

[Note: callbacks] A callback may call operations of its group while the program goes on calling others: which of them
comes first is chance, and another on each rank, where operations have to come in one order on all ranks. Therefore:

 1. The callbacks of a group run one at a time, in the order in which the program attached them: the same on all ranks,
    as that of the program's operations is. Each waits for its future before it runs.
 2. Operations that callbacks call have an order of their own: a second group of the same ranks runs it
    (`EngineBackend.here`), which is made when the first callback calls an operation.
 3. A callback that attaches another one waits for its future, and runs it at once.
 4. A callback whose future the attaching thread has waited for runs at once, like a call that the program writes there;
    operations that it calls come in the order of the program's. On torch it has run, too, when `then` returns.

So a callback may wait for whatever the program has called before, and for whatever it calls itself, in any way. The
program may go on meanwhile. Callbacks run on a thread that lives while there are any; if a future is done and no
callback waits its turn, on the thread that attaches.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

import torch

from rpcdist.own_shortage import own_shortage

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")


class Callbacks:
    """Runs the callbacks of one group in their order; any thread."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._busy = False
        self._runner = 0  # the thread that runs a callback now

    def runs_here(self) -> bool:
        """Whether this thread is in a callback."""
        return self._runner == threading.get_ident()

    def attach(self, future: torch.futures.Future[T], callback: Callable[[], None], was_awaited: bool = False) -> None:
        """Runs a callback, which must not raise, in its turn, once the future is done; at once with `was_awaited`."""
        if self.runs_here():
            _wait(future)
            callback()
            return
        if was_awaited:
            self._call(callback)
            return
        with self._changed:
            at_once = not self._busy and future.done()
            if not at_once:
                self._waiting.append((partial(_wait, future), callback))
            if self._busy:
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
                wait, callback = self._waiting.popleft()
            wait()
            self._run(callback)

    def _run(self, callback: Callable[[], None]) -> None:
        self._runner = threading.get_ident()
        try:
            self._call(callback)
        finally:
            self._runner = 0

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            logger.exception("a callback of group %r failed", self._group)

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
    """A future of an operation, or of a callback of one, whose callbacks run in the order of their group.

    Args:
        was_awaited: whether the calling thread has waited for the operation itself.
    """

    def __init__(self, callbacks: Callbacks, was_awaited: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._was_awaited = was_awaited
        self._waiter = 0  # the thread that has waited for it last

    def wait(self) -> T:
        """The value, once it is there."""
        value = super().wait()
        self._waiter = threading.get_ident()
        return value

    def _attach(self, callback: Callable[[], None]) -> None:
        was_awaited = self._waiter == threading.get_ident() or (self._was_awaited is not None and self._was_awaited())
        self._callbacks.attach(self, callback, was_awaited)

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

        self._attach(run)
        return following

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Calls back with this future, once it is done. See [Note: callbacks]."""
        self._attach(lambda: callback(self))
