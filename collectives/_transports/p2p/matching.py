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

from collections import deque
from typing import Generic, TypeVar

__all__ = ["Matcher"]

R = TypeVar("R")
M = TypeVar("M")

_Key = tuple[int | None, int]  # source, None for any; tag


class Matcher(Generic[R, M]):
    """Keeps receives without a message and messages without a receive.

    Args:
        limit_bytes: limit for each source of the messages that are kept, see M6.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._receives: dict[_Key, deque[tuple[int, R]]] = {}  # with the number of the call
        self._messages: dict[int, dict[int, deque[tuple[int, int, M]]]] = {}  # tag, source: number, size, message
        self._wanted: dict[int | None, int] = {}  # kept receives by source
        self._buffered_bytes: dict[int, int] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"<Matcher: {sum(self._wanted.values())} receives, {self.num_messages} messages>"

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return bool(self._receives or self._messages)

    @property
    def num_messages(self) -> int:
        return sum(len(kept) for sources in self._messages.values() for kept in sources.values())

    def post(self, source: int | None, tag: int, receive: R) -> M | None:
        """Takes a receive. Returns its message, or None: then the receive is kept."""
        sources = self._messages.get(tag)
        if sources:
            if source is None:
                source = min(sources, key=lambda one: sources[one][0][0])
            if source in sources:
                return self._take(tag, source)
        self._count += 1
        key = (source, tag)
        kept = self._receives.get(key)
        if kept is None:
            kept = self._receives[key] = deque()
        kept.append((self._count, receive))
        self._wanted[source] = self._wanted.get(source, 0) + 1
        return None

    def arrive(self, source: int, tag: int) -> R | None:
        """Takes a message that begins. Returns its receive, or None: then call `keep` before anything else."""
        mine = self._receives.get((source, tag))
        anyones = self._receives.get((None, tag))
        if anyones and (not mine or anyones[0][0] < mine[0][0]):
            return self._pop(None, tag, anyones)
        return self._pop(source, tag, mine) if mine else None

    def keep(self, source: int, tag: int, size_bytes: int, message: M) -> None:
        """Keeps the message for which `arrive` had no receive."""
        self._count += 1
        kept = self._messages.setdefault(tag, {}).setdefault(source, deque())
        kept.append((self._count, size_bytes, message))
        self._buffered_bytes[source] = self._buffered_bytes.get(source, 0) + size_bytes

    def withdraw(self, source: int | None, tag: int, receive: R) -> bool:
        """Forgets a receive. Returns False if it was not kept: it has its message already."""
        kept = self._receives.get((source, tag), ())
        for index, (_, other) in enumerate(kept):
            if other is receive:
                self._drop(source, tag, index)
                return True
        return False

    def discard(self, source: int, tag: int, message: M) -> None:
        """Forgets a message that will never be complete; one that was not kept is no error."""
        sources = self._messages.get(tag, {})
        for index, (_, size_bytes, other) in enumerate(sources.get(source, ())):
            if other is message:
                del sources[source][index]
                self._forget(tag, source, size_bytes)
                return

    def should_read(self, source: int, a_send_is_stuck: bool) -> bool:
        """Whether the source's socket is to be read now (M6)."""
        wanted = self._wanted
        if wanted.get(source) or wanted.get(None):
            return True
        return a_send_is_stuck and self._buffered_bytes.get(source, 0) <= self._limit_bytes

    def buffered_bytes(self, source: int) -> int:
        """The total size of the messages that are kept."""
        return self._buffered_bytes.get(source, 0)

    def receives(self, source: int | None) -> list[R]:
        """The receives that are kept and name this source, by tag and in the order of posting."""
        return [receive for key, kept in self._receives.items() if key[0] == source for _, receive in kept]

    def _pop(self, source: int | None, tag: int, kept: deque[tuple[int, R]]) -> R:
        receive = kept[0][1]
        self._drop(source, tag, 0)
        return receive

    def _drop(self, source: int | None, tag: int, index: int) -> None:
        kept = self._receives[source, tag]
        del kept[index]
        if not kept:
            del self._receives[source, tag]
        self._wanted[source] -= 1

    def _take(self, tag: int, source: int) -> M:
        _, size_bytes, message = self._messages[tag][source].popleft()
        self._forget(tag, source, size_bytes)
        return message

    def _forget(self, tag: int, source: int, size_bytes: int) -> None:
        self._buffered_bytes[source] -= size_bytes
        sources = self._messages[tag]
        if not sources[source]:
            del sources[source]
            if not sources:
                del self._messages[tag]
