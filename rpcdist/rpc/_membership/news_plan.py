"""Which members the coordinator has to tell of changes, and from which version on. Pure; the list itself is in
`membership_table.py`, and `membership_news.py` sends.

 1. A member knows a version: that of the answer to its joining, or the one that it has confirmed. Nothing else counts.
 2. One difference is under way to a member at a time, from the version that it knows. Changes that come meanwhile go
    with the next one, merged.
 3. A member that joins gets its list with the answer, and no difference before.
 4. A confirmation says what the member knows, even if that is less than was thought: then the next difference begins
    there. So every member ends with the list of now, once the changes end and its messages arrive.
"""

from __future__ import annotations

from rpcdist.ids import Identity
from rpcdist.rpc._membership.membership_table import MembershipTable


class NewsPlan:
    """One per coordinator.

    Args:
        table: the list of workers.
    """

    def __init__(self, table: MembershipTable) -> None:
        self._table = table
        self._known: dict[Identity, int] = {}
        self._under_way: dict[Identity, int] = {}  # up to which version
        self._joining: set[Identity] = set()

    def __repr__(self) -> str:
        return f"<NewsPlan of {len(self._known)} members, {len(self._under_way)} messages under way>"

    def joins(self, identity: Identity) -> None:
        """A worker has asked to be taken in, and waits for the answer (rule 3)."""
        self._joining.add(identity)

    def has_joined(self, identity: Identity) -> None:
        """It has been answered."""
        self._joining.discard(identity)

    def heard(self, identity: Identity, version: int) -> bool:
        """A member knows a version (rule 4). False if it is no member, or claims one that there has not been."""
        if identity not in self._table or version > self._table.version:
            return False
        self._known[identity] = version
        self._under_way.pop(identity, None)
        return True

    def is_gone(self, identity: Identity) -> None:
        """A worker is not in the list any more."""
        self._known.pop(identity, None)
        self._under_way.pop(identity, None)

    def unaware_of(self, version: int) -> set[Identity]:
        """Members that have been answered, and do not know this version yet."""
        return {identity for identity, known in self._known.items() if known < version} - self._joining

    def due(self) -> list[tuple[Identity, int]]:
        """The members to tell of changes now, and from which version on; they count as told."""
        version, found = self._table.version, []
        for member in self._table.members:
            identity = member.identity
            known = self._known.get(identity, 0)
            if known < version and identity not in self._joining and identity not in self._under_way:
                self._under_way[identity] = version
                found.append((identity, known))
        return found
