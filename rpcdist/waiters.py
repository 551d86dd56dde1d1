"""Waits of tasks and threads: tasks that wait for a blocking function, wake-ups from other threads, notices of long
waits, and threads that wait for a state that changes often.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from rpcdist.errors import RpcdistError
from rpcdist.giving_up import given_up
from rpcdist.time_limits import CLOSE_STEP_LIMIT_S

T = TypeVar("T")


def running_loop() -> asyncio.AbstractEventLoop:
    """The running loop of asyncio, on which users await. Raises `RpcdistError` in a coroutine of another library."""
    loop = asyncio._get_running_loop()
    if loop is None:
        raise RpcdistError(
            "rpcdist can be awaited only on an event loop of asyncio or uvloop, and none runs in this thread. On "
            "another loop, such as trio's, use the blocking form: `await trio.to_thread.run_sync(future.wait)`"
        )
    return loop


async def run_in_thread(
    function: Callable[[], T], on_cancel: Callable[[], object], name: str, ends_waits: bool = False
) -> T:
    """Calls `function` on a new thread, in a copy of this task's context, and returns its result.

    Args:
        function: may block for any time; the loop continues.
        on_cancel: called on another thread if this task is cancelled, to make `function` end soon. The cancellation
            continues when it returns; `function` is not awaited, and its result is dropped.
        name: the name of the thread. It is a daemon, so it does not delay the end of the loop or the program, unlike
            threads of `asyncio.to_thread`.
        ends_waits: whether a cancellation also ends the waits of `function` for other processes, and then waits until
            its thread has ended, at most `CLOSE_STEP_LIMIT_S`. [Note: given up]
    """
    cancelled: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> T:
        if ends_waits:
            given_up.set(cancelled)
        return function()

    def cancel() -> None:
        cancelled.set_result(None)
        on_cancel()
        if ends_waits:
            thread.join(CLOSE_STEP_LIMIT_S)

    thread, done = _start(run, name)
    try:
        return await done
    except asyncio.CancelledError:
        await asyncio.shield(_start(cancel, f"{name}-cancel")[1])
        raise


def _start(function: Callable[[], T], name: str) -> tuple[threading.Thread, asyncio.Future[T]]:
    """Calls a function on a new thread; returns the thread, and a future of the running loop."""
    loop = running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is a result if there is no error

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as exc:
            error = exc
        with suppress(RuntimeError):  # the loop was closed, and the wait with it
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, done


def wake(waiter: asyncio.Future[None]) -> None:
    """Ends a wait, unless it was already ended or cancelled; on the waiter's loop."""
    if not waiter.done():
        waiter.set_result(None)


def wake_threadsafe(waiter: asyncio.Future[None]) -> None:
    """Ends a wait from any thread."""
    with suppress(RuntimeError):  # the loop was closed, and the wait with it
        waiter.get_loop().call_soon_threadsafe(wake, waiter)


async def ends_within(waiting: Awaitable[object], timeout_s: float) -> bool:
    """Awaits `waiting` for at most `timeout_s` seconds, which may be infinite; False on timeout."""
    try:
        async with asyncio.timeout(None if timeout_s == float("inf") else timeout_s):
            await waiting
    except TimeoutError:
        return False
    return True


class RareWaits:
    """Waits for a state that changes often, while threads rarely wait: a change then costs only a check of `num`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num = 0

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits until `condition()` is true; False on timeout."""
        with self._changed:
            self.num += 1
            try:
                return self._changed.wait_for(condition, timeout_s)
            finally:
                self.num -= 1

    def recheck(self) -> None:
        """Makes the waiting threads test their conditions; call it after each change if `num` is not 0."""
        with self._changed:
            self._changed.notify_all()


async def noticed(waiting: Coroutine[Any, Any, T], after_s: float, notice: Callable[[], Awaitable[object]]) -> T:
    """Awaits `waiting`, and awaits `notice()` once if that takes longer than `after_s` seconds.

    An exception of `notice` ends both. A cancellation cancels both.
    """
    task = asyncio.create_task(waiting, name="rpcdist noticed wait")
    try:
        if not (await asyncio.wait({task}, timeout=after_s))[0]:
            await notice()
        return await task
    finally:
        task.cancel()
