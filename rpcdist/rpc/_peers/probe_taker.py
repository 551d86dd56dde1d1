"""The sessions of those who only ask whether this worker lives: that one was made is the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import PeerSession
from rpcdist.rpc._values.buffers import CopiedBuffer, ReceiveBuffer
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import WireMessage

PROBE_ROLE = "probe"


class ProbeTaker:
    """Takes them (`SessionTaker`); one per agent, on the I/O loop.

    Args:
        on_probe: is told who asks.
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
        """Who asks goes at once."""

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """Nothing may be."""
        return AnnouncedBytes(limit_bytes=0)
