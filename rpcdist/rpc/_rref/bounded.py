"""A set that forgets its oldest members."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class BoundedSet(Generic[T]):
    """At most `limit` members; adding one more forgets the oldest."""

    __slots__ = ("_limit", "_members")

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._members: dict[T, None] = {}

    def add(self, member: T) -> None:
        self._members[member] = None
        if len(self._members) > self._limit:
            del self._members[next(iter(self._members))]

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"BoundedSet({list(self._members)!r})"
