"""Who takes the sessions that peers open: each connection states a role, and one part of the process serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rpcdist._proto import handshake_pb2
from rpcdist.ids import Identity
from rpcdist.time_limits import ROLE_LIMIT_S
from rpcdist.transport.identities import identity_from_proto
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import SessionHandler

__all__ = ["Refuse", "Roles"]

logger = logging.getLogger(__name__)


Refuse = Callable[[Identity], str | None]
"""Says why a peer may not connect, or None."""


class Roles:
    """The handlers by role. Parts register on any thread; the server asks on the I/O loop."""

    def __init__(self, io: IoLoop) -> None:
        self._io = io
        self._handlers: dict[str, SessionHandler] = {}
        self._refusals: dict[str, Refuse] = {}
        self._expected: dict[str, asyncio.Event] = {}  # set when the handler is there

    def handle(self, role: str, handler: SessionHandler | None, refuse: Refuse | None = None) -> None:
        """See `Node.handle_role`."""
        self._handlers.pop(role, None)
        self._refusals.pop(role, None)
        if handler is not None:
            self._handlers[role] = handler
            if refuse is not None:
                self._refusals[role] = refuse
        waiters = self._expected.pop(role, None)
        if waiters is not None:
            self._io.call_soon(waiters.set)

    def expect(self, role: str) -> None:
        """See `Node.expect_role`."""
        self._expected[role] = asyncio.Event()

    async def handler(self, role: str) -> SessionHandler | None:
        """Who takes the messages of a role; waits, bounded, for one that was announced by `expect`."""
        expected = self._expected.get(role)
        if expected is not None:
            try:
                async with asyncio.timeout(ROLE_LIMIT_S):
                    await expected.wait()
            except TimeoutError:
                logger.warning("a peer waited %s s for the role %r", ROLE_LIMIT_S, role)
        return self._handlers.get(role)

    def refusal(self, hello: handshake_pb2.Hello) -> str | None:
        """Why a proven peer is refused for the role that it asks for, or None."""
        refuse = self._refusals.get(hello.role)
        return refuse(identity_from_proto(hello.identity)) if refuse is not None else None
