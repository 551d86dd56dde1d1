"""Jobs of a worker pool that wait for a thread on behalf of one owner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Job = tuple[Callable[..., object], tuple[object, ...], float]
"""The function, its arguments, and the time of its submission (monotonic seconds)."""


class JobLine(deque[Job]):
    """In their order. It can be a key: a line is equal to itself alone, whatever is in it."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]  # of C, as is `__eq__`: no other thread comes in between
    __eq__ = object.__eq__

    @property
    def oldest_at(self) -> float | None:
        """When the first job was submitted; None if there is none."""
        try:
            return self[0][2]
        except IndexError:
            return None
