"""Until when a worker counts as alive for the remote references that it holds. Pure, but for the clock it is given."""

from __future__ import annotations

import time
from collections.abc import Callable

from rpcdist.ids import Identity


class Leases:
    """The last sign of life of every incarnation that has ever been connected.

    Args:
        duration_s: how long a lease lasts after the last sign of life.
        clock: seconds, monotonic.
    """

    def __init__(self, duration_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._duration_s = duration_s
        self._clock = clock
        self._seen: dict[Identity, float] = {}

    def __repr__(self) -> str:
        return f"<Leases of {len(self._seen)} workers, {self._duration_s} s>"

    def seen(self, identity: Identity, at: float | None = None) -> None:
        """Renews a lease; `at` is the time of the sign of life, by default now."""
        at = self._clock() if at is None else at
        if at > self._seen.get(identity, float("-inf")):
            self._seen[identity] = at

    def take_ended(self) -> list[Identity]:
        """Whose lease is over; each is reported once."""
        limit = self._clock() - self._duration_s
        ended = [identity for identity, at in self._seen.items() if at < limit]
        for identity in ended:
            del self._seen[identity]
        return ended
