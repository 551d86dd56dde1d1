"""Takes the payload connections that peers open, and gives them to their sessions."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from rpcdist.ids import Identity
from rpcdist.time_limits import SIDE_ATTEMPT_LIMIT_S
from rpcdist.transport._framing.stripes import MAX_STRIPES
from rpcdist.transport._striping.striping import PAYLOAD_CONNECTIONS_VARIABLE, StripePlace, Striping, num_connections
from rpcdist.transport._tls.tls_socket import TlsSocket

logger = logging.getLogger(__name__)

PAYLOAD_TAKER: Final = "payloads"
"""The name of this taker among the takers of raw sockets."""

_Arrived = dict[StripePlace, socket.socket | TlsSocket]


def payload_purpose(session_id: bytes, place: StripePlace) -> str:
    """The purpose in the hello of a payload connection, after the name of the taker."""
    return f"{session_id.hex()}/{place[0]}/{place[1]}"


def _parse(purpose: str) -> tuple[str, StripePlace] | None:
    session, *numbers = purpose.split("/")
    if len(numbers) != 2 or not all(number.isdecimal() and len(number) < 3 for number in numbers):
        return None
    number, total = map(int, numbers)
    return (session, (number, total)) if number < total <= MAX_STRIPES else None


class StripeTaker:
    """A `SocketTaker`; lives on the I/O loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[Identity, Striping, _Arrived]] = {}

    def expect(self, session_id: bytes, peer: Identity, striping: Striping) -> None:
        """Lets `peer` open payload connections for this session."""
        self._sessions[session_id.hex()] = peer, striping, {}

    def forget(self, session_id: bytes) -> None:
        """Forgets a session that has ended."""
        expected = self._sessions.pop(session_id.hex(), None)
        if expected is not None:
            _close_all(expected[2])

    def refusal(self, purpose: str, peer: Identity) -> str:
        """See `SocketTaker`."""
        parsed = _parse(purpose)
        if parsed is None:
            return "the purpose does not name a payload connection"
        session, place = parsed
        expected = self._sessions.get(session)
        if expected is None or expected[0] != peer:
            return f"{peer.name} has no such session in this process"
        if not num_connections():
            return f"{PAYLOAD_CONNECTIONS_VARIABLE} is 0 there"
        if place in expected[2] or any(place[1] != other[1] for other in expected[2]):
            return "this payload connection is already open"
        return ""

    def put(self, purpose: str, connection: socket.socket | TlsSocket) -> bool:
        """See `SocketTaker`."""
        parsed = _parse(purpose)
        expected = None if parsed is None else self._sessions.get(parsed[0])
        if parsed is None or expected is None:
            return False
        place = parsed[1]
        _, striping, arrived = expected
        if place in arrived or any(place[1] != other[1] for other in arrived):  # two came at the same time
            return False
        if not arrived:
            asyncio.get_running_loop().call_later(SIDE_ATTEMPT_LIMIT_S, _close_all, arrived)
        arrived[place] = connection
        if len(arrived) == place[1]:
            striping.begin([arrived[index, place[1]] for index in range(place[1])])
            arrived.clear()
        return True


def _close_all(arrived: _Arrived) -> None:
    """Closes the connections of an incomplete set: the peer has given up by now, or the session has ended."""
    for connection in arrived.values():
        connection.close()
    arrived.clear()
