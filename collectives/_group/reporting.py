"""The two interfaces between the engine (or watchdog) of a group and the group's watch."""

from __future__ import annotations

from typing import Protocol

from rpcdist.collectives._group.group_failure import GroupFailure


class Reporter:
    """Tells the other ranks what this one found out. The base class, for groups of one rank, tells nobody."""

    def report(self, failure: GroupFailure) -> None:
        """The group failed here. Any thread; does not wait."""

    def report_timeout(self, title: str, sequence: int) -> bool:
        """An operation ran out of time here; returns whether a verdict on who is missing will come."""
        return False

    def explains_losses(self) -> bool:
        """Whether a verdict will come on the state of a rank whose connection broke."""
        return False


class WatchListener(Protocol):
    """Acts on what the watch hears from other ranks. Called on the I/O loop; must not block."""

    def fail(self, failure: GroupFailure) -> object:
        """The group failed on another rank."""

    def rank_left(self, rank: int, last_sequence: int) -> None:
        """A rank left the group in order, after taking part in all operations up to `last_sequence`."""

    def where(self) -> tuple[int, str]:
        """The newest operation that this rank has called, and what it does now, in words."""
