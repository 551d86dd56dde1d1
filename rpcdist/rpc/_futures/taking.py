"""How a thread that waits for several futures makes their results itself, as one that waits for one future does."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TakingObserver"]


class TakingObserver:
    """An observer of one future, which can also take over its result before the future is done.

    Args:
        done: called once when the future is done, on the completing thread.
        take: called when the result has arrived and is not decoded yet, on the thread that has read it; whether a
            thread that waits will call the future's `_settle`, in any case. It must be quick.
    """

    __slots__ = ("_done", "take")

    def __init__(self, done: Callable[[], object], take: Callable[[], bool]) -> None:
        self._done = done
        self.take = take

    def __call__(self) -> None:
        self._done()
