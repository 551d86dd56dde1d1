"""What the watch of a group tells before there is an engine: that a rank died while the group was made."""

from __future__ import annotations

import threading

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.failure import FailureKind, GroupFailure
from rpcdist.collectives._group.watch import WatchListener

__all__ = ["SetupWatch"]


class SetupWatch(WatchListener):
    """Keeps what the watch tells until there is an engine, and passes everything on to it from then on.

    Args:
        context: of the group.
    """

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._engine: WatchListener | None = None
        self._failure: GroupFailure | None = None
        self._departures: list[tuple[int, int]] = []

    def check(self) -> None:
        """Raises when the group cannot be made any more."""
        title = f"making group {self._context.name!r}"
        if self._context.check is not None:
            self._context.check()
        if self._failure is not None:
            raise self._failure.error(title)
        if self._departures:
            rank, _ = self._departures[0]
            reason = f"rank {self._context.ranks[rank]} gave up; see what it raised"
            raise GroupFailure(FailureKind.LOST, reason, (rank,)).error(title)

    def end(self, engine: WatchListener) -> None:
        """The group is made."""
        with self._lock:
            self._engine = engine
            failure, departures = self._failure, self._departures
        for departure in departures:
            engine.rank_left(*departure)
        if failure is not None:
            engine.fail(failure)

    # ------------------------------------------------------------ WatchListener

    def fail(self, failure: GroupFailure) -> bool:
        with self._lock:
            if self._engine is None:
                self._failure = self._failure or failure
                return True
        return self._engine.fail(failure)

    def rank_left(self, rank: int, last_sequence: int) -> None:
        with self._lock:
            if self._engine is None:
                self._departures.append((rank, last_sequence))
                return
        self._engine.rank_left(rank, last_sequence)

    def where(self) -> tuple[int, str]:
        return (0, "is making the group") if self._engine is None else self._engine.where()
