"""The sessions that other workers open to this one, and those of callers that only probe whether it lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpcdist.ids import Identity
from rpcdist.rpc._peers.demultiplexer import Demultiplexer
from rpcdist.rpc._peers.directory import Directory, PeerEvents
from rpcdist.rpc._peers.network import Announcements, PeerSession
from rpcdist.rpc._peers.router import REPLACED
from rpcdist.rpc._values.buffers import CopiedBuffer, ReceiveBuffer
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import WireMessage


class Inbound:
    """Takes them (`SessionTaker`); one per agent, on the I/O loop.

    A worker calls on a session that it has opened itself, and is answered there. So what arrives here are the calls of
    others, and their control messages; this worker's own go through the `Router`.

    Args:
        shares_payloads: whether large buffers may travel in shared memory.
        borrow: makes a received buffer of memory that a peer lends.

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


PROBE_ROLE = "probe"


class ProbeTaker:
    """Takes them (`SessionTaker`); one per agent, on the I/O loop.

    Args:
        on_probe: gets the identity of the process that asks.
    """

    shares_payloads = False
    allocate = staticmethod(ReceiveBuffer.allocate)
    borrow = staticmethod(CopiedBuffer)

    def __init__(self, on_probe: Callable[[Identity], object]) -> None:
        self._on_probe = on_probe

    def on_opened(self, session: PeerSession) -> None:
        self._on_probe(session.peer)

    def on_messages(self, session: PeerSession, messages: list[tuple[Any, list[Any]]]) -> None:
        session.close(f"unexpected message from {session.peer.name}")

    def takes_anywhere(self, message: WireMessage) -> bool:
        return False

    def on_closed(self, session: PeerSession, reason: str) -> None:
        """The caller of a probe closes at once."""

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """A probe announces nothing."""
        return AnnouncedBytes(limit_bytes=0)
