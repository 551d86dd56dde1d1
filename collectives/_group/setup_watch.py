"""`SetupWatch`: notices that a rank died or gave up while the group is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rpcdist.collectives._group.group_failure import GroupFailure
from rpcdist.collectives._group.reporting import WatchListener
from rpcdist.collectives._group.state import FailureHeard, GroupState, RankLeft


class OpenGroup(WatchListener, Protocol):
    """The engine or watchdog of a group that is made."""

    def opened(self) -> None:
        """All ranks are connected: acts on what was heard while the group was made."""


class SetupWatch(WatchListener):
    """Keeps in the group's state what the watch hears, until there is an engine to act on it.

    Args:
        state: the state of the new group, which its engine goes on with.
        check: raises when a member of the group cannot come any more; None where nobody would know.
    """

    def __init__(self, state: GroupState, check: Callable[[], None] | None) -> None:
        self._state = state
        self._check = check
        self._lock = threading.Lock()
        self._group: OpenGroup | None = None

    def check(self) -> None:
        """Raises when the group cannot be made any more."""
        if self._check is not None:
            self._check()
        failure = self._state.setup_failure()
        if failure is not None:
            raise failure.error(f"making group {self._state.group!r}")

    def end(self, group: OpenGroup) -> None:
        """The group is made: passes on what is heard from now on, and lets the group act on what was heard so far."""
        with self._lock:
            self._group = group
        group.opened()

    # ------------------------------------------------------------ WatchListener

    def fail(self, failure: GroupFailure) -> None:
        with self._lock:  # so that nothing is written to the state here once the group has it
            if self._group is None:
                self._state.handle(FailureHeard(failure))
                return
        self._group.fail(failure)

    def rank_left(self, rank: int, last_sequence: int) -> None:
        with self._lock:
            if self._group is None:
                self._state.handle(RankLeft(rank, last_sequence))
                return
        self._group.rank_left(rank, last_sequence)

    def where(self) -> tuple[int, str]:
        return self._state.where(0.0) if self._group is None else self._group.where()
