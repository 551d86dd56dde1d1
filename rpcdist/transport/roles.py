"""The parts of a process that serve the connections of peers: each connection names a role, which one part serves.

The role `SOCKET_ROLE` is for raw sockets, which are handed over after the handshake. A process may have any number of
takers of raw sockets, each with a name; the purpose of the connection begins with the taker's name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from rpcdist._proto import handshake_pb2
from rpcdist.ids import Identity
from rpcdist.time_limits import ROLE_LIMIT_S
from rpcdist.transport.identities import identity_from_proto
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import NullHandler, SessionHandler
from rpcdist.waiters import ends_within

logger = logging.getLogger(__name__)


SOCKET_ROLE: Final = "socket"

Refuse = Callable[[Identity], str | None]
"""Returns the reason why a peer may not connect; None to let it."""


class SocketTaker(Protocol):
    """Takes raw sockets. Called on the I/O loop."""

    def refusal(self, purpose: str, peer: Identity) -> str:
        """The reason why a connection of the proven `peer` for `purpose` is refused now; empty to accept it."""

    def put(self, purpose: str, connection: Any) -> bool:
        """Takes a non-blocking `StreamSocket`; returns False if it arrived too late, and the caller then closes it."""


def socket_purpose(taker: str, purpose: str) -> str:
    """The purpose in the hello of a raw socket for the taker of that name."""
    return f"{taker}/{purpose}"


class Roles:
    """The handlers by role. Parts register on any thread; the listeners read on the I/O loop."""

    def __init__(self, io: IoLoop) -> None:
        self._io = io
        self._served: dict[str, tuple[SessionHandler, Refuse | None]] = {}
        self._expected: dict[str, asyncio.Event] = {}  # set when the handler is registered
        self._socket_takers: dict[str, SocketTaker] = {}

    def handle(self, role: str, handler: SessionHandler | None, refuse: Refuse | None = None) -> None:
        """Sets the handler of sessions that peers open for `role`; None removes it.

        Args:
            refuse: returns the reason why a peer may not connect, or None; called on the I/O loop.
        """
        if handler is None:
            # Not refused: a worker that leaves may connect once more to one that has just left, which deserves no
            # warning.
            handler, refuse = NullHandler(f"the process no longer serves {role!r}"), None
        self._served[role] = handler, refuse
        waiters = self._expected.pop(role, None)
        if waiters is not None:
            self._io.call_soon(waiters.set)

    def expect(self, role: str) -> None:
        """Announces a later `handle`: until then, peers that connect wait and are not refused."""
        self._served.pop(role, None)
        self._expected[role] = asyncio.Event()

    async def handler(self, role: str) -> SessionHandler | None:
        """The handler of a role; waits, bounded, for a handler that `expect` announced.

        None for a role that was never announced: such connections make only unary calls.
        """
        expected = self._expected.get(role)
        if expected is not None and not await ends_within(expected.wait(), ROLE_LIMIT_S):
            logger.warning("a peer waited %s s for the role %r, which is not served here", ROLE_LIMIT_S, role)
        return self._served.get(role, (None, None))[0]

    def take_sockets(self, name: str, taker: SocketTaker | None) -> None:
        """Sets the taker of raw sockets under `name`; None removes it."""
        if taker is None:
            self._socket_takers.pop(name, None)
        else:
            self._socket_takers[name] = taker

    def refusal(self, hello: handshake_pb2.Hello) -> str | None:
        """The reason to refuse a proven peer for its role, or None."""
        if hello.role == SOCKET_ROLE:
            name, _, purpose = hello.purpose.partition("/")
            taker = self._socket_takers.get(name)
            if taker is None:
                return "this process does not accept such sockets; their hub is closed, or was never opened"
            return taker.refusal(purpose, identity_from_proto(hello.identity)) or None
        _, refuse = self._served.get(hello.role, (None, None))
        return refuse(identity_from_proto(hello.identity)) if refuse is not None else None

    def hand_over(self, purpose: str, connection: Any) -> bool:
        """Gives a raw socket to its taker; False if the taker is gone, and the caller then closes the socket."""
        name, _, rest = purpose.partition("/")
        taker = self._socket_takers.get(name)
        return taker is not None and taker.put(rest, connection)
