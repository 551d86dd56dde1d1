"""The sessions that other workers open to this one."""

from __future__ import annotations

from collections.abc import Callable

from rpcdist.ids import Identity
from rpcdist.rpc._peers.announcements import Announcements
from rpcdist.rpc._peers.demultiplexer import Demultiplexer
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import PeerSession
from rpcdist.rpc._peers.peer_events import PeerEvents
from rpcdist.rpc._peers.router import REPLACED
from rpcdist.rpc._values.buffers import ReceiveBuffer


class Inbound:
    """Takes them (`SessionTaker`); one per agent, on the I/O loop.

    A worker calls on a session that it has opened itself, and is answered there. So what arrives here are the calls of
    others, and their control messages; what this worker asks and tells goes through the `Router`.

    Args:
        demultiplexer: gets what arrives.
        directory: knows who was replaced.
        events: is told of sessions that open and end.
        shares_payloads: whether large buffers may travel in shared memory.
        borrow: makes a received buffer of memory that a peer lends.
        announcements: count what peers have announced and not sent.

    Attributes:
        sessions: those that are open.
    """

    def __init__(
        self,
        demultiplexer: Demultiplexer,
        directory: Directory,
        events: PeerEvents,
        shares_payloads: bool,
        borrow: Callable[[memoryview], ReceiveBuffer],
        announcements: Announcements,
    ) -> None:
        self.sessions: set[PeerSession] = set()
        self.takes_anywhere = demultiplexer.takes_anywhere
        self.on_messages = demultiplexer.on_messages  # not a method of ours: every message would pass through it
        self.allocate = ReceiveBuffer.allocate
        self.borrow = borrow
        self.shares_payloads = shares_payloads
        self.announced_by = announcements.of
        self._directory = directory
        self._events = events
        events.replaced.listen(self._close_sessions_of)

    def __repr__(self) -> str:
        return f"<Inbound [{len(self.sessions)} sessions]>"

    def refusal(self, identity: Identity) -> str | None:
        """Why a worker may not connect, or None.

        Peers are known by their ranks, and what proves them (the handshake, a certificate of their own) names workers.
        """
        holder = self._directory.holder_of(identity.id)
        if identity.id < 0 or holder not in (None, identity.name):
            return f"{identity.name!r} is not the worker of rank {identity.id} here, which is {holder!r}"
        if not self._directory.was_replaced(identity):
            return None
        return (
            f"worker {identity.name!r} was given up while it did not answer, and {REPLACED}; this one is out of the "
            "job and can only end: rpc.shutdown(graceful=False)"
        )

    def on_opened(self, session: PeerSession) -> None:
        self.sessions.add(session)
        self._events.opened.publish(session)

    def on_closed(self, session: PeerSession, reason: str) -> None:
        """The worker may come back; its lease says until when."""
        self.sessions.discard(session)
        self._events.broken.publish(session, reason)

    def _close_sessions_of(self, identity: Identity) -> None:
        for session in list(self.sessions):
            if session.peer == identity:
                session.close(REPLACED)

    def close(self, reason: str) -> None:
        """Ends all of them at once."""
        for session in list(self.sessions):
            session.close(reason)
