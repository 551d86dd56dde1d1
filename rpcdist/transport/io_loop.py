"""The I/O loop: one thread per process that runs the transport, and never user code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from errno import EBADF
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import BlockingInLoop, DeadlineExceeded, RpcdistError, TransportError, on_error
from rpcdist.giving_up import check_not_given_up, wake_if_given_up
from rpcdist.own_shortage import NO_THREAD, START_DESCRIPTORS, check_can_start
from rpcdist.time_limits import CHECK_INTERVAL_S, CLOSE_LIMIT_S, CLOSE_STEP_LIMIT_S

T = TypeVar("T")
Check = Callable[[], None] | None
"""Raises an error that ends a wait, if there is one."""

logger = logging.getLogger(__name__)


def new_event_loop(what: str, num_descriptors: int) -> asyncio.AbstractEventLoop:
    """A new loop; `what` names it. It is made only if `num_descriptors` are free.

    Raises:
        TransportError: this process has too few free descriptors.
    """
    import uvloop  # late: programs that only import the package do not need it

    check_can_start(what, starts_threads=False, num_descriptors=num_descriptors)
    return uvloop.new_event_loop()


def _report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs what failed on the loop.

    All loops of a process share gRPC's poller. A loop may get the event of a cancelled call whose own loop has closed,
    and fails to forward it; or the poller itself has ended. No code waits for such an event.
    """
    message, error = str(context.get("message")), context.get("exception")
    is_late = (isinstance(error, RuntimeError) and "closed" in str(error)) or getattr(error, "errno", None) == EBADF
    if is_late and "PollerCompletionQueue" in message:
        logger.debug("gRPC had an event for a loop that has been closed")
    else:
        loop.default_exception_handler(context)


class IoLoop:
    """An event loop on a thread of its own.

    The thread is a daemon, so that it cannot keep a process alive, and `close` joins it (a daemon thread that runs
    while the interpreter shuts down can crash it).
    """

    def __init__(self, name: str = "rpcdist-io") -> None:
        self.name = name
        self.loop = new_event_loop("an event loop", START_DESCRIPTORS)
        self.loop.set_exception_handler(_report_loop_error)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._workers: set[threading.Thread] = set()
        self.is_closed = False

    def start_thread(self) -> None:
        """Raises `TransportError` if the system gives no more threads; the loop is then closed."""
        try:
            self._thread.start()
        except RuntimeError as exc:
            self.is_closed = True
            self.loop.close()
            raise TransportError(f"an event loop cannot start: {NO_THREAD}") from exc

    def _run(self) -> None:
        # The loop's own writes to connections do not pass `NO_SIGPIPE`, and this thread runs no user code.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        _blocked_signals.update({signal.SIGPIPE} - before)
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self._cancel_all()
            self.loop.close()

    def start_worker(self, work: Callable[[], None], name: str) -> None:
        """Runs `work`, which must end soon after the tasks of this loop, on its own thread; `close` joins it.

        Raises:
            RuntimeError: the system gives no more threads.
        """

        def run() -> None:
            try:
                work()
            finally:
                self._workers.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._workers.add(thread)
        with on_error(partial(self._workers.discard, thread)):  # `close` would join it
            thread.start()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_STEP_LIMIT_S))

    def on_thread(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.get_ident() == self._thread.ident

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function` on the loop soon; any thread may call it. Raises `RpcdistError` if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError as exc:
            raise RpcdistError(f"the loop {self.name!r} is closed") from exc

    def spawn(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Starts a task that this loop owns; on the loop's thread only. An exception that ends it is logged."""
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            logger.error("task %s failed", task.get_name(), exc_info=exc)

    def run(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None, may_give_up: bool = False, check: Check = None
    ) -> T:
        """Runs a coroutine on the loop and waits for its result, from any other thread.

        Args:
            coroutine: what to run; it is cancelled when the wait ends early.
            may_give_up: whether the wait ends with `CancelledError` if the task for which this thread works is
                cancelled; for a coroutine that waits for other processes, and loses nothing then. [Note: given up]
            check: called about every 50 ms; an exception that it raises ends the wait.

        Raises:
            DeadlineExceeded: the time limit expired.
            RpcdistError: the loop was closed, before the call or during it.
            BlockingInLoop: called on an event loop's thread.
        """
        try:
            check_off_loop()
        except BlockingInLoop:
            coroutine.close()
            raise
        return self.finish(coroutine, timeout_s, may_give_up, check)

    def finish(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None, may_give_up: bool = False, check: Check = None
    ) -> T:
        """`run`, also on the thread of an event loop: for what ends a part of this process, and takes little time."""
        if self.on_thread():
            coroutine.close()
            raise RpcdistError(f"the loop {self.name!r} cannot wait for itself")
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError as exc:
            coroutine.close()
            raise RpcdistError(f"the loop {self.name!r} is closed") from exc
        if may_give_up:
            wake_if_given_up(future.cancel)
        deadline, stood_still = Deadline.after(timeout_s), False
        try:
            while not future.done():
                with suppress(concurrent.futures.TimeoutError):
                    slice_s = longest_sleep_s() if check is None else CHECK_INTERVAL_S
                    return future.result(min(slice_s, deadline.remaining_s()))
                if not future.done() and deadline.expired():
                    if stood_still or time.monotonic() - deadline.at < CHECK_INTERVAL_S:
                        raise DeadlineExceeded(f"an operation took longer than {timeout_s} s")
                    # This thread woke late, as after SIGSTOP: the loop did not have that time either.
                    deadline, stood_still = Deadline.after(CLOSE_STEP_LIMIT_S), True
                if not future.done() and check is not None:
                    check()
            return future.result()
        except concurrent.futures.CancelledError as exc:
            if may_give_up:
                check_not_given_up()
            raise RpcdistError(f"the loop {self.name!r} was closed while an operation ran on it") from exc
        finally:
            if not future.done():
                future.cancel()

    def close(self, timeout_s: float = CLOSE_LIMIT_S) -> None:
        """Stops the loop and joins its threads; idempotent, bounded by `timeout_s`."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._thread.is_alive():
            deadline = Deadline.after(timeout_s)
            self.loop.call_soon_threadsafe(self.loop.stop)
            for thread in (self._thread, *tuple(self._workers)):
                thread.join(deadline.remaining_s())


_PASSED_THROUGH: Final = ("contextlib", "functools")


def check_off_loop() -> None:
    """Raises `BlockingInLoop` if an event loop runs on this thread.

    The text names the function that the program has called: the outermost one of this package before its own code.
    """
    if asyncio._get_running_loop() is None:
        return
    name = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(f"{_PACKAGE}."):
            name = frame.f_code.co_qualname.removesuffix(".__init__")
        elif module not in _PASSED_THROUGH:
            break
        frame = frame.f_back
    raise BlockingInLoop(name, f"await asyncio.to_thread({name}, ...)")


_PACKAGE: Final = __name__.partition(".")[0]

_blocked_signals: Final[set[int]] = set()
"""The signals that I/O loops block on their threads, without those that the program itself had blocked."""


def unblock_signals() -> None:
    """Unblocks the signals that I/O loops block. A thread calls it before it runs user code.

    A thread that an I/O loop starts inherits the blocked signals, and so would the commands that it runs: the `yes` of
    `yes | head` would not end.
    """
    if _blocked_signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked_signals)


class Timer:
    """Calls a function, which must be short, on the I/O loop after a delay. Any thread may create and cancel it."""

    __slots__ = ("_function", "_handle", "_io")

    def __init__(self, io: IoLoop, delay_s: float, function: Callable[[], object]) -> None:
        self._io = io
        self._function: Callable[[], object] | None = function
        self._handle: asyncio.TimerHandle | None = None
        io.call_soon(self._start, delay_s)

    def cancel(self) -> None:
        """Prevents the call, unless it has begun; any thread, any number of times."""
        if self._function is not None:
            self._function = None
            self._io.call_soon(self._stop)

    def _start(self, delay_s: float) -> None:
        if self._function is not None:
            self._handle = self._io.loop.call_later(delay_s, self._fire)

    def _stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
