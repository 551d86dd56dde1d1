"""The callbacks of a group's futures, and the order in which they run.

[Note: callbacks] A callback may call operations of its group while the program calls others. Which of them comes first
is random on each rank, but all ranks must call operations in the same order. Therefore:

 1. The callbacks of a group run one at a time, in the order in which the program attached them. That order is the same
    on all ranks, like the order of the program's operations. Each callback waits for its future before it runs.
 2. Operations of callbacks have a separate order: a second group of the same ranks runs them (`EngineBackend.here`),
    which is made when the first callback calls an operation.
 3. A callback that attaches another callback waits for its future, and runs that callback at once.
 4. A callback whose future the attaching thread has waited for runs at once, like a call at that place of the program;
    its operations are in the order of the program's. With torch, too, it has run when `then` returns.

So a callback may wait for any operation that the program has called before, and for its own operations, while the
program continues. Callbacks run on a thread that lives while any are left; if a future is done and no callback waits
for its turn, the callback runs on the thread that attaches it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

import torch

from rpcdist.errors import RpcdistError, described_error, on_error
from rpcdist.own_shortage import own_shortage

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")


class Callbacks:
    """Runs the callbacks of one group in order. Any thread may use it."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._busy = False
        self._runner = 0  # the thread that runs a callback now

    def runs_here(self) -> bool:
        return self._runner == threading.get_ident()

    def attach(self, future: torch.futures.Future[T], callback: Callable[[], None], was_awaited: bool = False) -> None:
        """Runs a callback in its turn, when the future is done; at once with `was_awaited`."""
        if self.runs_here():
            _wait(future)
            callback()
            return
        if was_awaited:
            self._call(callback)
            return
        with self._changed:
            at_once = not (self._busy or self._waiting) and future.done()
            if not at_once:
                self._waiting.append((partial(_wait, future), callback))
            if self._busy:
                return
            self._busy = True
        with on_error(self._pause):
            if at_once:
                self._run(callback)
                with self._changed:
                    if not self._waiting:
                        self._busy = False
                        self._changed.notify_all()
                        return
            try:
                threading.Thread(target=self._run_all, name=f"rpcdist callbacks {self._group}", daemon=True).start()
            except RuntimeError as exc:  # the system cannot start a thread, so the caller waits itself
                own_shortage(exc)
                self._run_all()

    def _pause(self) -> None:
        """Ctrl-C has ended this thread's turn. The next thread that attaches a callback runs the waiting ones first."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _run_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._busy = False
                    self._changed.notify_all()
                    return
                wait, callback = self._waiting[0]  # it stays there if Ctrl-C ends the wait
            wait()
            self._waiting.popleft()
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
        except KeyboardInterrupt:  # the user pressed Ctrl-C while the callback ran
            raise
        except BaseException:  # `SystemExit` ends the callback, not the thread, which has others to run
            logger.exception("a callback of group %r failed", self._group)

    def drain(self, timeout_s: float) -> bool:
        """Waits until no callback runs or waits; returns False after `timeout_s`. A callback does not wait."""
        if self.runs_here():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)


def _wait(future: torch.futures.Future[T]) -> None:
    """Waits for the future of an operation, which has its own limit; the callback reads the result."""
    try:
        torch._C.Future.wait(future)
    except Exception as exc:
        logger.debug("a callback gets the error %r", exc)


class _FailedValue:
    """The value of a future that failed. Any use of it raises the error.

    torch's C++ code, such as that of its DDP, does not read the error that Python code has set on a future, but looks
    for tensors in its value: it pickles the value, or checks its type.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise self.error

    @property  # type: ignore[misc]  # no code sets it
    def __class__(self) -> NoReturn:  # type: ignore[override]  # it always raises
        raise self.error


def _raise(failure: _FailedValue) -> NoReturn:
    raise failure.error


def fail_future(future: torch.futures.Future[T], error: Exception) -> None:
    """Like `set_exception`, but torch's C++ code sees the error as well."""
    torch._C.Future._set_unwrap_func(future, _raise)
    torch._C.Future.set_result(future, _FailedValue(error))


class OrderedFuture(torch.futures.Future[T]):
    """A future of an operation, or of a callback of one, whose callbacks run in the order of their group.

    Args:
        was_awaited: whether the calling thread has already waited for the operation.
    """

    def __init__(self, callbacks: Callbacks, was_awaited: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._was_awaited = was_awaited
        self._waiter = 0  # the thread that last waited for it

    def wait(self) -> T:
        value = super().wait()
        self._waiter = threading.get_ident()
        return value

    def _attach(self, callback: Callable[[], None]) -> None:
        was_awaited = self._waiter == threading.get_ident() or (self._was_awaited is not None and self._was_awaited())
        self._callbacks.attach(self, callback, was_awaited)

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> OrderedFuture[S]:
        """Returns a future of the callback's result; the callback gets this future when done. See [Note: callbacks]."""
        following: OrderedFuture[S] = OrderedFuture(self._callbacks)

        def run() -> None:
            try:
                result = callback(self)
            except Exception as exc:
                fail_future(following, exc)
            except BaseException as exc:  # as in torch, it must not end the thread that waits for the result
                text = f"Got the following error when running the callback: {described_error(exc)}"
                fail_future(following, RpcdistError(text))
                raise
            else:
                following.set_result(result)

        self._attach(run)
        return following

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Calls the callback with this future, when it is done. See [Note: callbacks]."""
        self._attach(lambda: callback(self))
