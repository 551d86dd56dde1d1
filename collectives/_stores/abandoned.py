"""Stores that were dropped without `close`.

A finalizer may run on any thread, in the middle of anything, so it only puts the clean-up into a queue; the next store
that is made, or the end of the process, carries it out.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable

__all__ = ["abandon", "clean_up"]

logger = logging.getLogger(__name__)

_abandoned: deque[tuple[int, Callable[[], None]]] = deque()
_exiting = False


def abandon(pid: int, close: Callable[[], None]) -> None:
    """Has `close` called later, in process `pid` only (not in a child forked from it); safe in a finalizer."""
    _abandoned.append((pid, close))
    if _exiting:  # finalizers that run at exit may come after `_at_exit`, and then nothing can be interrupted any more
        clean_up()


def clean_up() -> None:
    """Closes what was abandoned. An error is logged: nobody is there who could handle it."""
    while _abandoned:
        try:
            pid, close = _abandoned.popleft()
        except IndexError:  # another thread was faster
            return
        if pid == os.getpid():
            try:
                close()
            except Exception:
                logger.warning("a store that was dropped without close() could not be closed", exc_info=True)


def _at_exit() -> None:
    global _exiting
    _exiting = True
    clean_up()


atexit.register(_at_exit)
