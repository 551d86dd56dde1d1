"""All connections of this worker, in both directions: sessions that peers open, their leases, and their end.

A lease is the time for which a worker counts as alive for the remote references that it holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field

from rpcdist.deadline import Deadline
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.rpc._peers.control import ControlReceiver
from rpcdist.rpc._peers.directory import Directory, PeerEvents
from rpcdist.rpc._peers.network import Demultiplexer
from rpcdist.rpc._peers.router import REPLACED, Router
from rpcdist.time_limits import HEARTBEATS_PER_PEER_TIMEOUT, LEASE_IN_PEER_TIMEOUTS
from rpcdist.transport.session import Session
from rpcdist.transport.wire_messages import WireMessage

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Connections:
    """The connections of one agent, on the I/O loop. It handles the sessions that other workers open to this one.

    A worker sends calls on a session that it has opened itself, and gets the replies there. So the sessions here bring
    the calls and control messages of others; this worker's own go through the `Router`.

    Attributes:
        taken: the open sessions that others have opened.
    """

    demultiplexer: InitVar[Demultiplexer]
    _directory: Directory
    _events: PeerEvents
    _router: Router
    _control: ControlReceiver
    taken: set[Session] = field(default_factory=set)

    def __post_init__(self, demultiplexer: Demultiplexer) -> None:
        self.on_messages = demultiplexer.on_messages  # not through a method here: every message would pass through it
        self.allocate = demultiplexer.allocate
        self.borrow = demultiplexer.borrow
        self.stage = demultiplexer.stage
        self.shares_payloads = demultiplexer.shares_payloads
        self.announced_by = demultiplexer.announced_by
        self._events.replaced.listen(self._close_sessions_of)

    def refusal(self, identity: Identity) -> str | None:
        """The reason to refuse a worker, or None.

        Peers are identified by their ranks, but their proofs (the handshake, a certificate) name workers.
        """
        holder = self._directory.holder_of(identity.id)
        if identity.id < 0 or holder not in (None, identity.name):
            return f"{identity.name!r} is not the worker of rank {identity.id} here, which is {holder!r}"
        if not self._directory.was_replaced(identity):
            return None
        return (
            f"worker {identity.name!r} was declared lost while it did not answer, and {REPLACED}; this process is no "
            "longer in the job. End it with rpc.shutdown(graceful=False)"
        )

    def on_opened(self, session: Session) -> None:
        self.taken.add(session)
        self._events.opened.publish(session)

    def on_closed(self, session: Session, reason: str) -> None:
        """Publishes the end of a session. The worker may come back; its lease decides until when."""
        self.taken.discard(session)
        self._events.broken.publish(session, reason)

    def _close_sessions_of(self, identity: Identity) -> None:
        for session in list(self.taken):
            if session.peer == identity:
                session.close(REPLACED)

    def sessions(self) -> list[Session]:
        return [*self._router.sessions(), *self.taken]

    async def flush(self, timeout_s: float, wait_for_others: bool) -> None:
        """Waits until queued messages are written, and, with `wait_for_others`, until the others have left."""
        self._control.acknowledge()
        deadline = Deadline.after(timeout_s)
        await asyncio.gather(*(session.drain(timeout_s) for session in self.sessions()))
        if wait_for_others:
            await asyncio.gather(*(session.ended(deadline.remaining_s()) for session in list(self.taken)))

    async def send_last(self, message: WireMessage, timeout_s: float) -> None:
        """Sends a message to the workers that are connected to this one, unless others wait there, and waits until it
        is written."""
        sessions = [session for session in self.taken if not session.num_queued]
        for session in sessions:
            session.send(message)
        await asyncio.gather(*(session.drain(timeout_s) for session in sessions))

    def close(self, reason: str) -> None:
        self._router.close(reason)
        for session in list(self.taken):
            session.close(reason)


PROBE_ROLE = "probe"
"""The role of processes that only ask whether this worker lives."""


class LeaseWatch:
    """Records the last sign of life of every process that was ever connected; one per agent, on the I/O loop.

    A worker gets a lease when it is first heard from, or declared lost, since a worker that was never connected may
    hold references, too.

    Args:
        peer_timeout_s: silence after which a worker is declared lost; leases are longer.
        sessions: the open sessions, in both directions.
    """

    def __init__(self, peer_timeout_s: float, sessions: Callable[[], Iterable[Session]], events: PeerEvents) -> None:
        self._duration_s = LEASE_IN_PEER_TIMEOUTS * peer_timeout_s
        self._seen: dict[Identity, float] = {}
        self._sessions = sessions
        self._ended = events.lease_ended
        self._found = events.found
        self._over: set[Identity] = set()
        self._pause_s = peer_timeout_s / HEARTBEATS_PER_PEER_TIMEOUT
        self._next_check = 0.0
        events.opened.listen(lambda session: self.seen(session.peer))
        events.broken.listen(lambda session, reason: self.seen(session.peer))
        events.lost.listen(lambda identity, error: self.seen(identity))

    def check(self, now: float) -> None:
        """Call this often; `now` is in monotonic seconds. It renews leases as often as idle peers send heartbeats."""
        if now >= self._next_check:
            self._next_check = now + self._pause_s
            self.renew(now)

    def renew(self, now: float) -> None:
        """Renews the leases of connected workers, and ends expired ones. Its cost grows with the connections."""
        sessions = list(self._sessions())
        for session in sessions:
            self.seen(session.peer, session.last_received)
        ended = [identity for identity, at in self._seen.items() if at < now - self._duration_s]
        for identity in ended:
            del self._seen[identity]
        if ended and own_shortage() is not None:  # a worker that cannot reach this process may live
            for identity in ended:
                self.seen(identity)
            ended = []
        self._over.update(ended)
        for identity in ended:
            logger.info("the lease of worker %s ended", identity.name)
            self._ended.publish(identity)
        # After a delay of this process, the session may still be open, and nothing else shows that the worker lives.
        for identity in self._over.intersection(session.peer for session in sessions).difference(ended):
            self._over.discard(identity)
            self._found.publish(identity)

    def seen(self, identity: Identity, at: float | None = None) -> None:
        """Renews the lease of a process that may have no session; `at` is the time of its sign of life."""
        at = time.monotonic() if at is None else at
        if at > self._seen.get(identity, float("-inf")):
            self._seen[identity] = at

    def forget(self, identity: Identity) -> None:
        """Forgets a process whose lease has expired and whose return would have no effect."""
        self._over.discard(identity)
