"""Waits that end when the task is cancelled for which their thread works.

[Note: given up] A thread cannot be cancelled, but the waits of its function can. If a task that awaits the function is
cancelled, each wait of the function for other processes ends: with `CancelledError`, which passes all handlers of
errors, so that the function undoes what it has done. Only the first wait raises it, as the waits of the clean-up must
take place.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import time
from collections.abc import Callable
from typing import Final

given_up: Final[contextvars.ContextVar[concurrent.futures.Future[None] | None]] = contextvars.ContextVar(
    "rpcdist_given_up", default=None
)
"""Done when the waits of this thread shall end; None if they do not end early. [Note: given up]"""


def wake_if_given_up(wake: Callable[[], object]) -> None:
    """Has `wake` called when the task for which this thread works is cancelled, or at once if it was."""
    here = given_up.get()
    if here is not None:
        here.add_done_callback(lambda _: wake())


def check_not_given_up() -> None:
    """Raises `CancelledError`, once, if the task for which this thread works was cancelled. [Note: given up]"""
    here = given_up.get()
    if here is not None and here.done():
        given_up.set(None)
        from asyncio import CancelledError  # takes long to import, and most programs with a group need no loop

        raise CancelledError


def pause(pause_s: float) -> None:
    """Sleeps between two attempts; ends with `CancelledError` if the task for which this thread works is cancelled."""
    here = given_up.get()
    if here is None:
        time.sleep(pause_s)
    else:
        concurrent.futures.wait((here,), pause_s)
        check_not_given_up()
