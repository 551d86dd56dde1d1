"""Names of workers, remote references and forks, as the reference counting knows them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ForkId", "Incarnation", "RRefId", "ReferenceShare", "UniqueId"]


class UniqueId(NamedTuple):
    """Unique in a job: the worker process that made it, and a number that this process uses once.

    The incarnation is part of it: a replacement that joins under the id of a dead worker counts from 0 again, while
    references that the dead one made may still be alive elsewhere.
    """

    created_on: int
    local_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"

    def __repr__(self) -> str:
        return f"{self.created_on}.{self.local_id}"

    @property
    def creator(self) -> Incarnation:
        return Incarnation(self.created_on, self.incarnation)


class Incarnation(NamedTuple):
    """A worker process. A replacement under the same id is another node."""

    worker: int
    incarnation: int

    def __repr__(self) -> str:
        return f"w{self.worker}"


RRefId = UniqueId  # the referenced value
ForkId = UniqueId  # one holder's share of it


class ReferenceShare(NamedTuple):
    """A reference, and one holder's share of it."""

    rref: RRefId
    fork: ForkId
