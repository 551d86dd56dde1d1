"""Renews the leases of workers while they are heard of, and says when one ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.rpc._peers.leases import Leases
from rpcdist.rpc._peers.network import PeerSession
from rpcdist.rpc._peers.peer_events import PeerEvents
from rpcdist.time_limits import LEASE_IN_PEER_TIMEOUTS

logger = logging.getLogger(__name__)


class LeaseWatch:
    """One per agent; on the I/O loop.

    A worker gets a lease when it is first heard of, or declared lost: also one that was never connected may hold
    references.

    Args:
        peer_timeout_s: silence after which a worker is declared lost; leases are longer.
        sessions: the open ones, in both directions.
        events: tells of signs of life, and is told when a lease ends.
    """

    def __init__(
        self, peer_timeout_s: float, sessions: Callable[[], Iterable[PeerSession]], events: PeerEvents
    ) -> None:
        self._leases = Leases(LEASE_IN_PEER_TIMEOUTS * peer_timeout_s)
        self._sessions = sessions
        self._ended = events.lease_ended
        self._found = events.found
        self._over: set[Identity] = set()
        events.opened.listen(lambda session: self._leases.seen(session.peer))
        events.broken.listen(lambda session, reason: self._leases.seen(session.peer))
        events.lost.listen(lambda identity, error: self._leases.seen(identity))

    def __repr__(self) -> str:
        return f"<LeaseWatch {self._leases!r}>"

    def renew(self) -> None:
        """To be called often."""
        sessions = list(self._sessions())
        for session in sessions:
            self._leases.seen(session.peer, session.last_received)
        ended = self._leases.take_ended()
        if ended and own_shortage() is not None:  # who cannot reach this process may live all the same
            for identity in ended:
                self._leases.seen(identity)
            ended = []
        for identity in ended:
            logger.info("the lease of worker %s ended", identity.name)
            self._ended.publish(identity)
        # Where this process was held up, the session may go on: nothing else would say that the worker lives.
        for identity in self._over.intersection(session.peer for session in sessions).difference(ended):
            self._found.publish(identity)
        self._over = self._over.difference(session.peer for session in sessions).union(ended)
