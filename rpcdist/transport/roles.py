"""Who takes the connections that peers open: each states a role, and one part of the process serves it.

One role, `SOCKET_ROLE`, is for raw sockets, which are given away after the handshake. It may have any number of takers
in a process, each with a name; the connection's purpose begins with the name of the one that is meant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from rpcdist._proto import handshake_pb2
from rpcdist.ids import Identity
from rpcdist.time_limits import ROLE_LIMIT_S
from rpcdist.transport._framing.incoming import IncomingBuffer
from rpcdist.transport.identities import identity_from_proto
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import HeapPayloads, Session, SessionHandler
from rpcdist.transport.wire_messages import WireMessage

logger = logging.getLogger(__name__)


SOCKET_ROLE: Final = "socket"

Refuse = Callable[[Identity], str | None]
"""Says why a peer may not connect, or None."""


class SocketTaker(Protocol):
    """Takes raw sockets. Called on the I/O loop."""

    def refusal(self, purpose: str, peer: Identity) -> str:
        """Why no connection of `peer`, which is proven, for `purpose` can be taken now, or nothing."""

    def put(self, purpose: str, connection: Any) -> bool:
        """Takes a connection, a socket or a `TlsSocket`, not blocking; False if it came too late: then it is closed."""


def socket_purpose(taker: str, purpose: str) -> str:
    """What the hello of a raw socket says, for the taker of that name."""
    return f"{taker}/{purpose}"


class _EndedRole(HeapPayloads):
    """Takes the sessions of peers that come after the end of a role, and tells those that send why that is in vain.

    They are not refused: connections that end when a worker leaves are opened once more by those that leave a moment
    later, and that is no reason for a warning.
    """

    def on_opened(self, session: Session) -> None:
        logger.debug("%s opened a session for %s, which has ended", session.peer.name, session.role)

    def on_messages(self, session: Session, messages: list[tuple[WireMessage, list[IncomingBuffer]]]) -> None:
        session.close(f"the part of that process which served {session.role!r} has been shut down")

    def on_closed(self, session: Session, reason: str) -> None:
        logger.debug("the session with %s ended: %s", session.peer.name, reason)


class Roles:
    """The handlers by role. Parts register on any thread; the listeners ask on the I/O loop."""

    def __init__(self, io: IoLoop) -> None:
        self._io = io
        self._handlers: dict[str, SessionHandler] = {}
        self._refusals: dict[str, Refuse] = {}
        self._expected: dict[str, asyncio.Event] = {}  # set when the handler is there
        self._ended: set[str] = set()
        self._socket_takers: dict[str, SocketTaker] = {}

    def handle(self, role: str, handler: SessionHandler | None, refuse: Refuse | None = None) -> None:
        """See `Node.handle_role`."""
        self._handlers.pop(role, None)
        self._refusals.pop(role, None)
        if handler is None:
            self._ended.add(role)
        else:
            self._ended.discard(role)
            self._handlers[role] = handler
            if refuse is not None:
                self._refusals[role] = refuse
        waiters = self._expected.pop(role, None)
        if waiters is not None:
            self._io.call_soon(waiters.set)

    def expect(self, role: str) -> None:
        """See `Node.expect_role`."""
        self._ended.discard(role)
        self._expected[role] = asyncio.Event()

    async def handler(self, role: str) -> SessionHandler | None:
        """Who takes the messages of a role; waits, bounded, for one that was announced by `expect`.

        None for a role that was never announced: such connections make unary calls only.
        """
        expected = self._expected.get(role)
        if expected is not None:
            try:
                async with asyncio.timeout(ROLE_LIMIT_S):
                    await expected.wait()
            except TimeoutError:
                logger.warning("a peer waited %s s for the role %r", ROLE_LIMIT_S, role)
        return self._handlers.get(role) or (_EndedRole() if role in self._ended else None)

    def take_sockets(self, name: str, taker: SocketTaker | None) -> None:
        """Says who takes the raw sockets for `name`; None ends that."""
        if taker is None:
            self._socket_takers.pop(name, None)
        else:
            self._socket_takers[name] = taker

    def refusal(self, hello: handshake_pb2.Hello) -> str | None:
        """Why a proven peer is refused for the role that it asks for, or None."""
        if hello.role == SOCKET_ROLE:
            name, _, purpose = hello.purpose.partition("/")
            taker = self._socket_takers.get(name)
            if taker is None:
                return "nobody takes such sockets here; has it been closed?"
            return taker.refusal(purpose, identity_from_proto(hello.identity)) or None
        refuse = self._refusals.get(hello.role)
        return refuse(identity_from_proto(hello.identity)) if refuse is not None else None

    def hand_over(self, purpose: str, connection: Any) -> bool:
        """Gives a raw socket to its taker; False if that is gone, and then the caller closes it."""
        name, _, rest = purpose.partition("/")
        taker = self._socket_takers.get(name)
        return taker is not None and taker.put(rest, connection)
