"""A point in time until which an operation may run.

Deadlines travel with calls (as the time that is left), and nested calls inherit the earlier one.
"""

from __future__ import annotations

import math
import time
from contextvars import ContextVar
from typing import Final

__all__ = ["NEVER", "Deadline", "current_deadline"]


class Deadline:
    """A point on this process's monotonic clock; `at` is in seconds, infinity for none."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """`timeout_s` from now; None or infinity means no limit."""
        if timeout_s is None or timeout_s == math.inf:
            return NEVER
        return cls(time.monotonic() + timeout_s)

    @property
    def is_finite(self) -> bool:
        return self.at != math.inf

    def remaining_s(self) -> float:
        """Seconds left: infinity without a limit, never below 0."""
        return self.at if self.at == math.inf else max(0.0, self.at - time.monotonic())

    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def earlier(self, other: Deadline) -> Deadline:
        return self if self.at <= other.at else other

    def wait_s(self) -> float | None:
        """`remaining_s` in the form that `threading` and `asyncio` take: None without a limit."""
        return None if self.at == math.inf else self.remaining_s()

    def __repr__(self) -> str:
        return "Deadline(never)" if self.at == math.inf else f"Deadline({self.remaining_s():.3f} s left)"


NEVER: Final = Deadline(math.inf)

current_deadline: ContextVar[Deadline] = ContextVar("rpcdist_deadline", default=NEVER)
"""The deadline of the call that is being handled; `NEVER` outside of handlers."""
