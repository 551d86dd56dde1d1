"""`Work`: an operation of a group that may still run."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch

from rpcdist.collectives._group.callbacks import Callbacks, OrderedFuture, fail_future
from rpcdist.errors import CollectiveTimeout, ForkedProcess, refuse_pickling
from rpcdist.own_shortage import own_shortage
from rpcdist.waiters import running_loop, wake_threadsafe

__all__ = ["Work"]

_this_process = object()


def _after_fork() -> None:
    global _this_process
    _this_process = object()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


class Work:
    """An operation called with `async_op=True`, to wait for, to await or to query. Any thread may use it.

    Args:
        title: names the operation in errors, e.g. "all_reduce #41 of group 'default'"; converted by `str` when needed.
            Classes of programs call the constructor without arguments, as in torch.
        result: the output tensors.
        callbacks: runs the callbacks of futures; if missing, the callbacks of each future have their own thread.

    Attributes:
        limit_s: the operation's own limit, in seconds; 0 without a limit.
    """

    limit_s: float = 0.0
    __reduce_ex__ = refuse_pickling
    # Defaults in the class: each attribute that the constructor sets takes time of a small operation.
    _waiter: threading.Event | None = None
    _callbacks: tuple[Callable[[Work], object], ...] = ()
    _done = False
    _settled = False  # done, and its callbacks were called, so that its futures are done when `wait` returns
    _awaited_by = 0  # the thread whose `wait` last returned
    _settler = 0  # the thread that runs the callbacks, which may wait for it
    _error: BaseException | None = None
    _source = -1

    def __init__(
        self,
        title: object = "of a program",
        result: list[torch.Tensor] | None = None,
        *,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._title = title
        self._process = _this_process
        self._callbacks_of_group = callbacks
        self._result = result or []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "running" if not self._done else "done" if self._error is None else f"failed: {self._error}"
        return f"<Work {self.title}: {state}>"

    @property
    def title(self) -> str:
        """The name of the operation."""
        return str(self._title)

    @classmethod
    def finished(cls, title: object, result: list[torch.Tensor] | None = None, source: int = -1) -> Work:
        """Makes a work that is already done."""
        work = cls(title, result)
        work._done = work._settled = True
        work._source = source
        return work

    # ------------------------------------------------------------ for backends

    def complete(self, source: int = -1) -> None:
        """Completes the operation; `source` is the sender's rank in the group, for a receive."""
        self._source = source
        self._finish(None)

    def fail(self, error: BaseException) -> None:
        """Fails the operation. Only the first call of `complete` or `fail` has an effect."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            callbacks = self._callbacks
            if callbacks:
                self._callbacks = ()
                self._settler = threading.get_ident()
            else:
                self._settled = True
        try:
            for callback in callbacks:
                callback(self)
        finally:
            if callbacks:
                with self._lock:
                    self._settled = True
                    self._settler = 0
            if self._waiter is not None:
                self._waiter.set()

    def when_done(self, callback: Callable[[Work], object]) -> None:
        """Calls `callback` once, on the thread that finishes the operation, or at once; it must not block or raise."""
        with self._lock:
            if not self._done:
                self._callbacks = (*self._callbacks, callback)
                return
        callback(self)

    def _ensure_progress(self) -> None:
        """Called when a future or a coroutine waits, and so no waiting thread can run the operation."""

    # ------------------------------------------------------------ for users

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Blocks until the operation is done. On the thread of an event loop, `await` the work instead.

        Args:
            timeout: seconds or a `timedelta`; the operation's own limit by default. If the wait times out, the
                operation continues.

        Returns:
            True.

        Raises:
            CollectiveError: the operation failed.
            CollectiveTimeout: the wait's own timeout passed.
            ForkedProcess: the operation runs in another process, from which this one was forked.
        """
        if not self._settled and self._settler != threading.get_ident():
            self._check_not_forked()
            self._block(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        self._awaited_by = threading.get_ident()
        if self._error is not None:
            raise self._error.with_traceback(None)  # otherwise each `wait` would lengthen the traceback
        return True

    def _check_not_forked(self) -> None:
        """Raises in a forked child: threads of the parent run the operation, and may have held its locks."""
        if self._process is not _this_process:
            raise ForkedProcess()

    def _block(self, timeout_s: float | None) -> None:
        with self._lock:
            if self._settled:
                return
            if self._waiter is None:
                self._waiter = threading.Event()
            waiter = self._waiter
        began = time.monotonic()
        self._ensure_progress()
        if not waiter.wait(timeout_s if timeout_s is None or timeout_s > 0 else None):
            waited_s = time.monotonic() - began
            text = f"the wait timed out after {waited_s:.3g} s; the operation continues, wait again"
            raise CollectiveTimeout(self.title, text)

    def is_completed(self) -> bool:
        """Whether it succeeded or failed."""
        return self._done

    def is_success(self) -> bool:
        """Whether it succeeded."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Returns the error; None if it succeeded or still runs."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Waits for the output tensors and returns them. Raises like `wait`."""
        self.wait()
        return self._result

    @property
    def timeout(self) -> timedelta:
        """The operation's own limit, not that of `wait`; 0 without a limit."""
        return timedelta(seconds=self.limit_s)

    def synchronize(self) -> None:
        """Like `wait`; on devices with streams, makes the current stream wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Makes the current stream wait on devices with streams, otherwise the caller."""
        self.wait()

    def source_rank(self) -> int:
        """Returns the sender of a finished receive, as a rank in the group; -1 for other operations."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the output tensors. Its callbacks may call further operations, and wait for them."""
        ordered = self._callbacks_of_group
        future: torch.futures.Future[list[torch.Tensor]]
        future = torch.futures.Future() if ordered is None else OrderedFuture(ordered, self._was_awaited)

        def settle(work: Work) -> None:
            if isinstance(work._error, Exception):
                fail_future(future, work._error)
            else:
                future.set_result(work._result)

        def settle_on_a_thread(work: Work) -> None:
            name = f"rpcdist callbacks of {self.title}"
            try:
                threading.Thread(target=settle, args=(work,), name=name, daemon=True).start()
            except RuntimeError as exc:  # the system cannot start a thread
                own_shortage(exc)
                settle(work)

        self.when_done(settle_on_a_thread if ordered is None and not self._done else settle)
        self._ensure_progress()
        return future

    def _was_awaited(self) -> bool:
        return self._awaited_by == threading.get_ident()

    def get_future_result(self) -> torch.futures.Future[int]:
        """Returns a future of 0 for success and 1 for failure; the future never fails."""
        future: torch.futures.Future[int] = torch.futures.Future()

        def settle(work: Work) -> None:
            future.set_result(0 if work._error is None else 1)

        self.when_done(settle)
        self._ensure_progress()
        return future

    def __await__(self) -> Generator[Any, None, list[torch.Tensor]]:
        """Waits without blocking the loop; after a cancellation the operation continues."""
        if not self._done:
            self._check_not_forked()
            waiter: asyncio.Future[None] = running_loop().create_future()
            self.when_done(lambda _: wake_threadsafe(waiter))
            self._ensure_progress()
            yield from waiter
        if self._error is not None:
            raise self._error
        return self._result
