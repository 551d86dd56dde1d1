"""Matches messages with receives: pure code, no socket, no clock, no thread.

The `Matcher` is told of each receive that is posted and each message that arrives, and returns its partner or keeps it.

 M1  A message from s with tag t matches a receive from s with tag t, or from any source with tag t.
 M2  Messages of one source and tag are matched in the order of arrival.
 M3  Receives that a message could match are matched in the order of posting.
 M4  A receive from any source takes the message that arrived first.
 M5  No message is kept while a receive that it matches is kept.
 M6  A source is read on while a receive that it could match is kept, however much of it is buffered: the message that
     the receive wants may lie behind others. Otherwise it is read only while a send of this rank is stuck (the source
     may be stuck in a send to this rank), and only until the messages that are kept of it, complete or not, exceed
     `limit_bytes`.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

R = TypeVar("R")
M = TypeVar("M")
T = TypeVar("T")

_Source = int | None  # None for any


class _Kept(Generic[T]):
    """What is kept of one kind, by tag and in the order of its coming.

    Attributes:
        weights: the summed weights of what is kept, by source.
    """

    def __init__(self) -> None:
        self._by_tag: dict[int, list[tuple[_Source, T, int]]] = {}
        self.weights: Counter[_Source] = Counter()

    def add(self, source: _Source, tag: int, item: T, weight: int) -> None:
        self.weights[source] += weight  # first: if a signal handler raises in between, its socket is read too often
        self._by_tag.setdefault(tag, []).append((source, item, weight))

    def take(self, source: _Source, tag: int, only: T | None = None) -> T | None:
        """Removes and returns the first item that matches, or this one; None if there is none."""
        kept = self._by_tag.get(tag, ())
        for index, (other, item, weight) in enumerate(kept):
            if (source is None or other is None or source == other) and (only is None or item is only):
                del self._by_tag[tag][index]
                if not kept:
                    del self._by_tag[tag]
                self.weights[other] -= weight
                return item
        return None

    def items(self) -> list[tuple[_Source, T]]:
        return [(source, item) for kept in self._by_tag.values() for source, item, _ in kept]


class Matcher(Generic[R, M]):
    """Keeps receives without a message and messages without a receive.

    Args:
        limit_bytes: limit for each source of the messages that are kept, see M6.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._receives: _Kept[R] = _Kept()
        self._messages: _Kept[M] = _Kept()

    def __repr__(self) -> str:
        return f"<Matcher: {len(self._receives.items())} receives, {self.num_messages} messages>"

    @property
    def num_messages(self) -> int:
        return len(self._messages.items())

    def post(self, source: int | None, tag: int, receive: R) -> M | None:
        """Takes a receive. Returns its message, or None: then the receive is kept."""
        message = self._messages.take(source, tag)
        if message is None:
            self._receives.add(source, tag, receive, 1)
        return message

    def arrive(self, source: int, tag: int) -> R | None:
        """Takes a message that begins. Returns its receive, or None: then call `keep` before anything else."""
        return self._receives.take(source, tag)

    def keep(self, source: int, tag: int, size_bytes: int, message: M) -> None:
        """Keeps the message for which `arrive` had no receive."""
        self._messages.add(source, tag, message, size_bytes)

    def withdraw(self, tag: int, receive: R) -> bool:
        """Forgets a receive. Returns False if it was not kept: it has its message already."""
        return self._receives.take(None, tag, receive) is not None

    def discard(self, tag: int, message: M) -> None:
        """Forgets a message that will never be complete; one that was not kept is no error."""
        self._messages.take(None, tag, message)

    def should_read(self, source: int, a_send_is_stuck: bool) -> bool:
        """Whether the source's socket is to be read now (M6)."""
        wanted = self._receives.weights
        may_fill = a_send_is_stuck and self.buffered_bytes(source) <= self._limit_bytes
        return may_fill or wanted[source] > 0 or wanted[None] > 0

    def buffered_bytes(self, source: int) -> int:
        """The total size of the messages that are kept."""
        return self._messages.weights[source]

    def receives(self, source: int | None) -> list[R]:
        """The receives that are kept and name this source, by tag and in the order of posting."""
        return [receive for named, receive in self._receives.items() if named == source]
