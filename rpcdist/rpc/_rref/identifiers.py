"""Names of workers, remote references and forks, as the reference counting knows them."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["ForkId", "Incarnation", "RRefId", "ReferenceShare", "UniqueId", "new_number"]


class UniqueId(NamedTuple):
    """Unique in a job: the worker process that made it, and a number of that process, from `new_number`.

    The incarnation is part of it: another process may join under the id of a dead worker, while references that the
    dead one made are still alive elsewhere.
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


def new_number() -> int:
    """A number that nobody guesses: who names a reference, or a share of one, was told of it. It is not used again."""
    return int.from_bytes(os.urandom(8)) >> 1


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
