"""Ends the wait of a task for something that happens on another thread or in a callback."""

from __future__ import annotations

import asyncio

__all__ = ["wake", "wake_threadsafe"]


def wake(waiter: asyncio.Future[None]) -> None:
    """Ends the wait, unless it has ended already: woken before, or cancelled. On the waiter's loop."""
    if not waiter.done():
        waiter.set_result(None)


def wake_threadsafe(waiter: asyncio.Future[None]) -> None:
    """The same from any thread."""
    try:
        waiter.get_loop().call_soon_threadsafe(wake, waiter)
    except RuntimeError:
        pass  # the loop was closed, so nobody waits any more
