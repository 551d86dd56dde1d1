"""Names of workers, remote references and forks, as the reference counting knows them."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Final, NamedTuple, TypeVar

_COUNT_BITS: Final = 24
_MAX_COUNT: Final = (1 << _COUNT_BITS) - 1


class UniqueId(NamedTuple):
    """Unique in a job: the worker process that made it, and a number of that process, from `new_number`.

    The incarnation is part of it: another process may join under the id of a dead worker, while references that the
    dead one made are still alive elsewhere.
    """

    created_on: int
    local_id: int
    incarnation: int

    def __str__(self) -> str:
        """Numbered as by torch: 0, 1, 2 of each worker. The secret part of the number stays out of it."""
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id & _MAX_COUNT})"

    def __repr__(self) -> str:
        return f"{self.created_on}.{self.local_id & _MAX_COUNT}"

    @property
    def creator(self) -> Incarnation:
        return Incarnation(self.created_on, self.incarnation)


def new_number(count: int) -> int:
    """A number that cannot be guessed: a worker that names a reference, or a share, was told of it. It is never reused.

    Args:
        count: how many the process has made before; texts show it.
    """
    return int.from_bytes(os.urandom(5)) >> 1 << _COUNT_BITS | count & _MAX_COUNT


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


T = TypeVar("T", bound=Hashable)


def remember(members: dict[T, None], member: T, limit: int = 4096) -> None:
    """Adds one to a bounded set, which forgets its oldest member."""
    members[member] = None
    if len(members) > limit:
        del members[next(iter(members))]
