"""Stores that were dropped without `close`.

A finalizer may run on any thread, in the middle of anything, so it only puts the clean-up into a queue; the next store
that is made, or the end of the process, carries it out.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from rpcdist.at_exit import register_at_exit

logger = logging.getLogger(__name__)


class DroppedStores:
    """The clean-ups that are due. Any thread may use it."""

    def __init__(self) -> None:
        self._closers: deque[tuple[int, Callable[[], None]]] = deque()
        self._exiting = False

    def add(self, pid: int, close: Callable[[], None]) -> None:
        """Has `close` called later, in process `pid` only (not in a child forked from it); safe in a finalizer."""
        self._closers.append((pid, close))
        if self._exiting:  # a finalizer that runs at exit may come after `at_exit`, when nothing can be interrupted
            self.close_all()

    def close_all(self) -> None:
        """Closes what was dropped. An error is logged: nobody is there who could handle it."""
        while self._closers:
            try:
                pid, close = self._closers.popleft()
            except IndexError:  # another thread was faster
                return
            if pid == os.getpid():
                try:
                    close()
                except Exception:
                    logger.warning("a store that was dropped without close() could not be closed", exc_info=True)

    def at_exit(self) -> None:
        self._exiting = True
        self.close_all()


DROPPED_STORES: Final = DroppedStores()
"""Those of this process; finalizers have nobody else to turn to."""

register_at_exit(DROPPED_STORES.at_exit)
