"""Which workers a coordinator that took the place of another one still waits for. Pure; the rules of the list itself
are in `membership_table.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rpcdist.ids import Identity
from rpcdist.rpc._peers.directory import COORDINATOR

__all__ = ["Recovery"]


class Recovery:
    """From the first worker that was in the list of the coordinator before, until all have come or had their time."""

    def __init__(self) -> None:
        self._expected: set[Identity] = set()

    def __repr__(self) -> str:
        return f"<Recovery of {len(self._expected)} workers>"

    def expect(self, known: Iterable[Identity]) -> None:
        """A worker that has come says who was in the list with it."""
        self._expected.update(identity for identity in known if identity.id != COORDINATOR)

    def forget(self, identity: Identity) -> bool:
        """A worker belongs to another job; whether nobody else is known of the world before."""
        self._expected.discard(identity)
        return not self._expected

    def missing(self, present: Iterable[Identity]) -> list[Identity]:
        """Those that have not come, and whose place nobody else has taken, by rank."""
        taken = {identity.id for identity in present}
        return sorted((identity for identity in self._expected if identity.id not in taken), key=lambda one: one.id)

    def is_complete(self, present: Iterable[Identity]) -> bool:
        """Whether everybody is there, the coordinator included."""
        present = list(present)
        return not self.missing(present) and any(identity.id == COORDINATOR for identity in present)

    def departures(self, present: Iterable[Identity]) -> Mapping[Identity, str]:
        """Who has not come back, and why it is lost, for those that have."""
        there = set(present)
        reason = "the coordinator was lost, and this worker did not announce itself to the next one"
        return {identity: reason for identity in self._expected if identity not in there}
