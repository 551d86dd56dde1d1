"""Waits of tasks: functions that end a wait from a callback or another thread, and a notice for long waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def wake(waiter: asyncio.Future[None]) -> None:
    """Ends the wait, unless it was already ended or cancelled. On the waiter's loop."""
    if not waiter.done():
        waiter.set_result(None)


def wake_threadsafe(waiter: asyncio.Future[None]) -> None:
    """Ends the wait from any thread."""
    try:
        waiter.get_loop().call_soon_threadsafe(wake, waiter)
    except RuntimeError:
        pass  # the loop was closed, and the wait with it


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
