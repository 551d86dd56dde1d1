"""The payload connections of one session: large messages leave in stripes, one on each, and the session's own
connection stays free for everything else.

Each side may use them as soon as it has all of them. The side that opened the session opens these, too, with the second
large message that goes or comes: by then the peer has the session, and large messages are not a single event.

[Note: far peers] The kernel sends so many bytes in a round trip on a connection: no more than its buffers hold, and no
more than it has learned that the path carries, which a few messages do not teach it. Where a round trip takes long,
that bounds the rate of one connection, and has a message of 1 MiB take two of them. So there are more connections
between peers that are far apart, and smaller messages use them.

[Note: unused] Either side may find, once the connections stand, that it cannot have them: it gave up waiting for the
last one, or its system gives no more threads. It closes them, then; and whoever finds them closed, and nothing has gone
on them in either direction, does without them, too. Anything that has gone may be lost, and so the session ends.

[Note: the end] What a peer wrote before it closed arrives on several connections, and the one that says why it closed
may be first. So a session that ends there reads the others to their end, for a moment. The other way round, the end of
a payload connection ends the session, but only after a moment, in which the reason may come.

[Note: silence] Heartbeats travel on the session's own connection, and say nothing of these: a firewall may have
forgotten them, or the peer not read them. So the kernel breaks one whose bytes the peer has not taken for as long as a
peer may be silent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from rpcdist.errors import ConfigError, ProtocolViolation, RpcdistError
from rpcdist.time_limits import PAYLOADS_END_LIMIT_S
from rpcdist.transport._channels.stream_sockets import break_when_silent
from rpcdist.transport._framing.incoming import Delivery, Incoming
from rpcdist.transport._framing.stripes import MAX_STRIPES, StripeCursor
from rpcdist.transport._striping.stripe_connection import Stripe, StripeConnection, StripedTransfer, StripePlace
from rpcdist.transport._tls.tls_socket import TlsSocket
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.outgoing_buffer import OutgoingBuffer

logger = logging.getLogger(__name__)

PAYLOAD_CONNECTIONS_VARIABLE: Final = "RPCDIST_PAYLOAD_CONNECTIONS"

MIN_STRIPED_BYTES: Final = 2 << 20
"""Smaller messages cost more by the changes of thread than the second connection brings."""

_MIN_FAR_BYTES: Final = 256 << 10
"""The same where a round trip takes long. [Note: far peers]"""

_FAR_S: Final = 2e-3  # a round trip; within a data centre it is shorter

Connections = Sequence[socket.socket | TlsSocket]
OpenConnections = Callable[[int], Coroutine[Any, Any, Connections]]
"""Opens so many; raises `OSError` or `TimeoutError` where that is not possible."""


def num_connections(is_far: bool = False) -> int:
    """What `RPCDIST_PAYLOAD_CONNECTIONS` says, by default 2, or 8 to a peer that `is_far`; 0 for none.

    Raises:
        ConfigError: the variable is not a number, or too large a one.
    """
    text = os.environ.get(PAYLOAD_CONNECTIONS_VARIABLE, str(MAX_STRIPES) if is_far else "2")
    if not text.isdecimal() or int(text) > MAX_STRIPES:
        raise ConfigError(f"{PAYLOAD_CONNECTIONS_VARIABLE} is a number from 0 to {MAX_STRIPES}, not {text!r}")
    return int(text)


class StripedSession(Protocol):
    """A session, as far as it matters here."""

    def on_striped(self, delivery: Delivery | None) -> None:
        """A piece came on a payload connection, perhaps the last one of a message; on any thread."""

    def on_all_written(self) -> None:
        """All that was taken is out; on any thread."""

    def close(self, reason: str) -> None:
        """Ends the session; any thread."""


class Striping:
    """One per session over TCP.

    Args:
        io: the I/O loop.
        session: whose payloads they are.
        incoming: its transfers.
        name: of the peer.
        open: opens the connections; None at the side that waits for them.
        silence_limit_s: how long the peer may take nothing of what was sent on one of them. [Note: silence]
        round_trip_s: to the peer; None: unknown.
    """

    def __init__(
        self,
        io: IoLoop,
        session: StripedSession,
        incoming: Incoming,
        name: str,
        *,
        open: OpenConnections | None,
        silence_limit_s: float,
        round_trip_s: float | None = None,
    ) -> None:
        is_far = round_trip_s is not None and round_trip_s >= _FAR_S
        self._num_wanted = num_connections(is_far)
        self._min_bytes = _MIN_FAR_BYTES if is_far else MIN_STRIPED_BYTES
        self._io = io
        self._session = session
        self._incoming = incoming
        self._name = name
        self._open = open if self._num_wanted else None
        self._silence_limit_s = silence_limit_s
        self._num_large = 0
        self._connections: list[StripeConnection] = []
        self._transfers: dict[int, StripedTransfer] = {}
        self._lock = threading.Lock()  # around the transfers, and what is to be sent on which connections
        self._is_used = False  # something has gone on the connections, one way or the other
        self._is_closed = False
        self._all_ended = asyncio.Event()  # nothing more can be read from any of them
        self._num_ended = 0

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes of payloads sent and received so far."""
        connections = list(self._connections)
        return sum(each.num_sent for each in connections), sum(each.num_received for each in connections)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._connections)} connections"
        return f"<Striping with {self._name} [{state}], {len(self._transfers)} transfers>"

    # ------------------------------------------------------------ any thread

    def note(self, num_bytes: int) -> None:
        """A message with so many bytes of buffers goes, or has been announced."""
        if self._open is None or num_bytes < self._min_bytes:
            return
        self._num_large += 1
        if self._num_large > 1:
            opening, self._open = self._open, None
            with suppress(RpcdistError):  # the loop is closed, and the session with it
                self._io.call_soon(self._begin_opening, opening)

    def take(self, number: int, ordinal: int, buffers: Sequence[OutgoingBuffer], sizes: Sequence[int]) -> bool:
        """See `Striper`."""
        total = sum(sizes)
        self.note(total)
        if not self._connections or total < self._min_bytes:
            return False
        with self._lock:
            if self._is_closed:
                return True  # as with any other message of a session that has ended
            connections = self._connections
            count = len(connections)
            if not count:
                return False
            self._is_used = True
            transfer = self._transfers[number] = StripedTransfer(number, ordinal, buffers, sizes, count)
        for index, connection in enumerate(connections):
            connection.put(Stripe(transfer, StripeCursor(sizes, index, count)))
        return True

    def abort(self, number: int) -> bool:
        """See `Striper`; a piece that is being written is written to its end."""
        with self._lock:
            transfer = self._transfers.get(number)
            if transfer is None:
                return False
            transfer.is_aborted = True
            return True

    @property
    def is_busy(self) -> bool:
        """See `Striper`."""
        return bool(self._transfers)

    # ------------------------------------------------------------ threads of the connections

    def stripe_ended(self, transfer: StripedTransfer) -> None:
        """See `StripeOwner`."""
        with self._lock:
            transfer.num_stripes -= 1
            if transfer.num_stripes:
                return
            self._transfers.pop(transfer.number, None)
            is_last = not self._transfers
        if is_last:
            self._session.on_all_written()

    def on_piece(self, delivery: Delivery | None) -> None:
        """See `StripeOwner`."""
        self._is_used = True
        self._session.on_striped(delivery)

    def on_end(self, error: Exception | None, is_read: bool) -> None:
        """See `StripeOwner`."""
        with suppress(RpcdistError):  # the loop is closed, and the session with it
            self._io.call_soon(self._ended, error, is_read)

    # ------------------------------------------------------------ I/O loop

    def _begin_opening(self, open: OpenConnections) -> None:
        if not self._is_closed:
            self._io.spawn(self._open_all(open), f"rpcdist payload connections to {self._name}")

    async def _open_all(self, open: OpenConnections) -> None:
        try:
            connections = await open(self._num_wanted)
        except (OSError, TimeoutError) as exc:
            reason = str(exc) or "no answer in time"
            logger.info("no payload connections to %s, so one connection carries everything: %s", self._name, reason)
            return
        self.begin(connections)

    def begin(self, connections: Connections) -> None:
        """All of them are there; it owns them from now on."""
        if self._is_closed or self._connections:
            for connection in connections:
                connection.close()
            return
        count = len(connections)
        begun: list[StripeConnection] = []
        try:
            for index, connection in enumerate(connections):
                break_when_silent(connection, self._silence_limit_s)  # [Note: silence]
                place = StripePlace(index, count)
                begun.append(StripeConnection(connection, place, self._incoming, self, self._name, self._io))
        except RuntimeError as exc:  # [Note: unused]
            logger.warning("no payload connections with %s, so one connection carries everything: %s", self._name, exc)
            for stripes in begun:
                stripes.close()
            for connection in connections[len(begun) + 1 :]:
                connection.close()
            return
        self._connections = begun
        logger.debug("%d payload connections with %s", count, self._name)

    def _ended(self, error: Exception | None, is_read: bool) -> None:
        """A thread has ended by itself: the session cannot go on, unless nothing is lost. [Note: the end]"""
        if self._is_closed or not self._connections or (error is None and self._drop_unused()):
            return
        if isinstance(error, ProtocolViolation):
            self._session.close(str(error))
            return
        if error is not None and not isinstance(error, OSError):
            logger.error("payloads of, or for, %s could not be handled", self._name, exc_info=error)
            self._session.close(f"a payload could not be handled: {error!r}")
            return
        self._num_ended += is_read
        if self._num_ended >= len(self._connections):
            self._all_ended.set()
        text = "it was closed there" if error is None else getattr(error, "strerror", None) or error
        reason = f"a payload connection with {self._name} broke: {text}"
        self._io.loop.call_later(PAYLOADS_END_LIMIT_S, self._session.close, reason)

    def _drop_unused(self) -> bool:
        """The peer has closed one of them: does without them, if nothing has gone on them. [Note: unused]"""
        with self._lock:
            if self._is_used:
                return False
            dropped, self._connections = self._connections, []
        for connection in dropped:
            connection.close()
        self._all_ended.set()
        logger.info("%s has no payload connections any more, so one connection carries everything", self._name)
        return True

    async def read_out(self) -> None:
        """Waits, bounded, for what the peer wrote before it ended the session. [Note: the end]"""
        self._incoming.end_announcements()
        if self._connections:  # also if no byte is missing: the last ones may not have been handed on yet
            with suppress(TimeoutError):
                async with asyncio.timeout(PAYLOADS_END_LIMIT_S):
                    await self._all_ended.wait()

    def close(self) -> None:
        """The session has ended."""
        with self._lock:
            self._is_closed = True
            self._transfers.clear()
        for connection in self._connections:
            connection.close()
