"""How a thread that waits for several futures makes their results itself, as one that waits for one future does."""

from __future__ import annotations

from typing import Any

__all__ = ["Taker"]


class Taker:
    """An observer of futures, one for all of them, which can also take over results before their futures are done."""

    def note_done(self, future: Any) -> None:
        """A future that is observed is done. Called once, on the completing thread; it must be quick."""
        raise NotImplementedError

    def take_over(self, future: Any) -> bool:
        """The result of a future has arrived and is not decoded yet; called on the thread that has read it.

        Returns:
            Whether a thread that waits will call the future's `_settle`, in any case.
        """
        raise NotImplementedError
