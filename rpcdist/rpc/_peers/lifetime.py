"""Whether an agent is still in business: one flag that all of its parts read."""

from __future__ import annotations


class Lifetime:
    """Set once, by the agent; read by any thread.

    Attributes:
        is_closed: nothing is sent and nothing that arrives is handled any more.
    """

    __slots__ = ("is_closed",)

    def __init__(self) -> None:
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<Lifetime {'over' if self.is_closed else 'open'}>"
