"""What each worker has announced to this one and not sent yet."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpcdist.ids import Identity
from rpcdist.transport.announced_bytes import AnnouncedBytes


class Announcements:
    """One per agent; any thread may use it.

    The sessions of one worker share a limit, whichever side opened them. Who has the token may call itself anything, so
    those that are no members (or not yet) share one limit, too, and it is no use to invent names.

    Args:
        limit_bytes: for each; None for the memory of this machine.
        holder_of: the name of the worker that lives at a rank, or None.
    """

    def __init__(self, limit_bytes: int | None, holder_of: Callable[[int], str | None]) -> None:
        self._limit_bytes = limit_bytes
        self._holder_of = holder_of
        self._lock = threading.Lock()
        self._by_name: dict[str | None, AnnouncedBytes] = {}  # one entry for each member that ever was

    def __repr__(self) -> str:
        return f"<Announcements {self._by_name!r}>"

    def of(self, peer: Identity) -> AnnouncedBytes:
        name = peer.name if self._holder_of(peer.id) == peer.name else None
        with self._lock:
            return self._by_name.setdefault(name, AnnouncedBytes(self._limit_bytes))
