"""All connections of this worker, in both directions: the leases that they renew, and their end.

A lease is the time for which a worker counts as alive for the remote references that it holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.rpc._peers.control import ControlReceiver
from rpcdist.rpc._peers.directory import PeerEvents
from rpcdist.rpc._peers.inbound import Inbound
from rpcdist.rpc._peers.network import PeerSession
from rpcdist.rpc._peers.router import Router
from rpcdist.time_limits import LEASE_IN_PEER_TIMEOUTS

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Connections:
    """One per agent; on the I/O loop."""

    _router: Router
    _inbound: Inbound
    _control: ControlReceiver

    def sessions(self) -> list[PeerSession]:
        return [*self._router.sessions(), *self._inbound.sessions]

    async def flush(self, timeout_s: float, wait_for_others: bool) -> None:
        """Waits until what was queued is written, and perhaps until the others have left, for they wait for it."""
        self._control.acknowledge()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(session.drain(timeout_s) for session in self.sessions()))
                if wait_for_others:
                    await asyncio.gather(*(session.ended(timeout_s) for session in list(self._inbound.sessions)))
        except TimeoutError:
            logger.debug("not everything was written within %s s", timeout_s)

    def close(self, reason: str) -> None:
        """Ends all of them at once."""
        self._router.close(reason)
        self._inbound.close(reason)


class Leases:
    """The last sign of life of every incarnation that has ever been connected.

    Args:
        duration_s: how long a lease lasts after the last sign of life.
        clock: seconds, monotonic.
    """

    def __init__(self, duration_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._duration_s = duration_s
        self._clock = clock
        self._seen: dict[Identity, float] = {}

    def seen(self, identity: Identity, at: float | None = None) -> None:
        """Renews a lease; `at` is the time of the sign of life, by default now."""
        at = self._clock() if at is None else at
        if at > self._seen.get(identity, float("-inf")):
            self._seen[identity] = at

    def take_ended(self) -> list[Identity]:
        """Whose lease is over; each is reported once."""
        limit = self._clock() - self._duration_s
        ended = [identity for identity, at in self._seen.items() if at < limit]
        for identity in ended:
            del self._seen[identity]
        return ended


class LeaseWatch:
    """One per agent; on the I/O loop.

    A worker gets a lease when it is first heard of, or declared lost: also one that was never connected may hold
    references.

    Args:
        peer_timeout_s: silence after which a worker is declared lost; leases are longer.
        sessions: the open ones, in both directions.
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

    def renew(self) -> None:
        """To be called often."""
        sessions = list(self._sessions())
        for session in sessions:
            self._leases.seen(session.peer, session.last_received)
        ended = self._leases.take_ended()
        if ended and own_shortage() is not None:  # a worker that cannot reach this process may live
            for identity in ended:
                self._leases.seen(identity)
            ended = []
        self._over.update(ended)
        for identity in ended:
            logger.info("the lease of worker %s ended", identity.name)
            self._ended.publish(identity)
        # Where this process was held up, the session may go on: nothing else would say that the worker lives.
        for identity in self._over.intersection(session.peer for session in sessions).difference(ended):
            self._over.discard(identity)
            self._found.publish(identity)

    def seen(self, identity: Identity) -> None:
        """Something came from a process that may have no session."""
        self._leases.seen(identity)

    def forget(self, identity: Identity) -> None:
        """Its lease is over, and nobody will ask whether it comes back."""
        self._over.discard(identity)
