"""The common part of a group's engine and of its device's watchdog: events go to the group's state."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from rpcdist.collectives._group.group_failure import GroupFailure
from rpcdist.collectives._group.state import Action, GroupState


class StateKeeper(ABC):
    """Owns the state of a group; any thread may bring it events (it is a `WatchListener`).

    Attributes:
        state: read by others, changed by the keeper only.
        abort_hooks: called, each once, when the group fails and before its operations do, on any thread.
    """

    def __init__(self, state: GroupState) -> None:
        self.state = state
        self.abort_hooks: dict[int, Callable[[], object]] = {}

    @abstractmethod
    def _handle(self, event: Callable[[], Sequence[Action]]) -> Sequence[Action]:
        """Calls an event of the state, under the lock, and carries out the actions, without it; returns them."""

    def opened(self) -> None:
        """All ranks are connected: acts on what was heard while the group was made."""
        self._handle(self.state.open)

    def fail(self, failure: GroupFailure) -> bool:
        """Ends the group on this rank only: another rank said so. Returns False when it had failed before."""
        return bool(self._handle(partial(self.state.fail, failure, heard=True)))

    def fail_everywhere(self, failure: GroupFailure) -> GroupFailure:
        """Makes it the group's failure, unless there is one, tells the other ranks, and returns the one that counts."""
        self._handle(partial(self.state.fail, failure, heard=False))
        return self.state.failure or failure

    def rank_left(self, rank: int, last_sequence: int) -> None:
        """A rank left the group in order, after taking part in all operations up to `last_sequence`."""
        self._handle(partial(self.state.leave, rank, last_sequence))

    def where(self) -> tuple[int, str]:
        """The newest operation that this rank has called, and what it does now, in words."""
        return self.state.where(time.monotonic())
