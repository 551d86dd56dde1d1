"""The payload connections of one session: they carry large messages in stripes, and the session's own connection stays
free for everything else.

Each side may use the connections as soon as it has all of them. The side that opened the session also opens these, at
the second large message in either direction: by then the peer has registered the session, and large messages are not a
single event. A connection carries pieces: each has the ordinal number of its announcement, the number of a stripe, a
size, and the bytes.

[Note: turns] Connections may differ in speed: what a connection has carried before decides how fast the kernel sends on
it. So a large message has more stripes than connections, and a connection that has written one takes the next. To far
peers, the kernel accepts little more than it can send now; otherwise a slow connection would accept many stripes.

[Note: far peers] In one round trip, the kernel sends a limited number of bytes on a connection: no more than its
buffers hold, and no more than the congestion window, which a few messages do not open. A long round trip therefore
limits the rate of one connection, and a message of 1 MiB takes two of them. So peers that are far apart have more
connections, and use them for smaller messages.

[Note: unused] Once the connections are open, either side may find that it cannot use them: it stopped waiting for the
last one, or its system allows no more threads. It then closes them. If the other side finds them closed before any
bytes were sent on them in either direction, it continues without them. Otherwise bytes may be lost, and the session
ends.

[Note: the end] The last bytes of a peer arrive on several connections, and its reason for closing, on the session's own
connection, may arrive first. So a session that ends there reads the other connections to their end, for a moment.
Conversely, the end of a payload connection ends the session only after a moment, in which the reason may arrive.

[Note: silence] Heartbeats travel on the session's own connection and do not check the payload connections: a firewall
may have dropped them, or the peer may not read them. So the kernel breaks a payload connection if the peer has not
acknowledged its bytes within the silence limit of the session.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Final

from rpcdist.errors import ConfigError, ProtocolViolation, RpcdistError
from rpcdist.ids import Identity
from rpcdist.time_limits import CLOSE_STEP_LIMIT_S, SIDE_ATTEMPT_LIMIT_S
from rpcdist.transport._channels.stream_sockets import FAR_ROUND_TRIP, break_when_silent, pace_if_far
from rpcdist.transport._framing.incoming import MAX_CONNECTIONS, Delivery, Incoming, StripeCursor, num_stripes, num_used
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, TlsSocket
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.waiters import ends_within

_HEAD: Final = struct.Struct("<QII")

PIECE_BYTES: Final = 1 << 20
"""Bytes written at once; then another transfer has its turn on this connection."""


@dataclass(slots=True, eq=False)
class StripedTransfer:
    """The buffers of one message, on their way out on several connections.

    Attributes:
        ends: the end of each buffer in the sequence of all bytes.
        count: the number of payload connections.
        indices: the numbers of the stripes that no connection has taken.
        owed_bytes: its part of the peer's account, see `Outgoing`.
        num_writers: the number of connections that still write; `Striping` counts them.
        is_aborted: whether the transfer was aborted, so that no more of it is sent.
    """

    number: int
    ordinal: int
    buffers: Sequence[LargeBuffer]
    ends: Sequence[int]
    count: int
    indices: Iterator[int]
    owed_bytes: int
    num_writers: int
    is_aborted: bool = False

    def next_stripe(self) -> StripeCursor | None:
        """Takes a stripe with bytes, if one is left; any thread."""
        stripes = (StripeCursor(self.ends, index, self.count) for index in self.indices)
        return next((stripe for stripe in stripes if stripe.left), None)


Stripe = tuple[StripedTransfer, StripeCursor | None]
"""A transfer that a connection sends, and its stripe; None if it takes one at its turn."""

StripePlace = tuple[int, int]
"""The index of a connection in its session, and the number of connections."""


@dataclass(eq=False, repr=False)
class StripeConnection:
    """One payload connection, with a thread that writes and a thread that reads.

    The threads block, so each piece of a payload takes one system call, without the interpreter's lock. `close` ends
    their waits. The last thread closes the socket, so that the kernel cannot reuse its descriptor while a thread still
    uses it.

    Attributes:
        num_sent, num_received: the bytes of payloads so far.

    Args:
        connection: proven; this object owns it.
        place: its place among the connections.
        incoming: provides the memory for arriving bytes.

    Raises:
        RuntimeError: the system allows no more threads; the connection is closed.
    """

    _socket: socket.socket | TlsSocket
    _place: StripePlace
    _incoming: Incoming
    _owner: Striping
    name: InitVar[str]
    io: InitVar[IoLoop]
    num_sent: int = 0
    num_received: int = 0
    _queue: SimpleQueue[Stripe | None] = field(default_factory=SimpleQueue)
    _is_closed: bool = False
    _num_threads: int = 2
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, name: str, io: IoLoop) -> None:
        self._count = self._place[1]
        if isinstance(self._socket, socket.socket):
            self._socket.setblocking(True)
        for work, kind in ((self._write, "writer"), (self._read, "reader")):
            title = f"rpcdist payload {kind} {self._place[0]} of {name}"
            try:
                io.start_worker(partial(self._run, work), title)
            except RuntimeError:
                self.close()
                self._leave(1 if work == self._read else 2)
                raise

    def put(self, stripe: Stripe) -> None:
        """Queues a stripe for this connection; any thread."""
        self._queue.put(stripe)

    def close(self) -> None:
        """Ends both threads soon; any thread; idempotent."""
        self._is_closed = True
        with self._lock, suppress(OSError):  # locked, because the last thread may be about to close the socket
            self._socket.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)

    def _run(self, work: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as exc:
            error = exc
        self._leave()
        if not self._is_closed:
            self._owner.on_end(error, work == self._read)

    def _leave(self, num_threads: int = 1) -> None:
        """Records that threads have stopped using the socket; the last one closes it."""
        with self._lock:
            self._num_threads -= num_threads
            if not self._num_threads:
                self._socket.close()

    # ------------------------------------------------------------ writing

    def _write(self) -> None:
        while self._write_piece(self._queue.get()):
            pass

    def _write_piece(self, stripe: Stripe | None) -> bool:
        """Writes one piece of a stripe; False if the connection is closed. Keeps no reference to the buffers."""
        if stripe is None or self._is_closed:
            return False
        transfer, cursor = stripe
        cursor = cursor or transfer.next_stripe()
        if cursor is None or transfer.is_aborted:
            self._owner.writer_ended(transfer)
        else:
            self._send(transfer, cursor)
            self._queue.put((transfer, cursor if cursor.left else None))
        return True

    def _send(self, transfer: StripedTransfer, cursor: StripeCursor) -> None:
        buffers = transfer.buffers
        ranges = cursor.take(PIECE_BYTES)
        size = sum(end - start for _, start, end in ranges)
        self.num_sent += size
        head = memoryview(_HEAD.pack(transfer.ordinal, cursor.index, size))
        parts = [head, *(buffers[number].part(start, end) for number, start, end in ranges)]
        while parts:
            try:
                sent = self._socket.sendmsg(parts, (), NO_SIGPIPE)
            except BlockingIOError:  # with TLS
                self._wait(select.POLLOUT)
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    # ------------------------------------------------------------ reading

    def _read(self) -> None:
        head = memoryview(bytearray(_HEAD.size))
        while self._receive(head, may_end=True):
            ordinal, index, size = _HEAD.unpack(head)
            if not 0 < size <= PIECE_BYTES:
                raise ProtocolViolation(f"a piece of {size} bytes was announced; the limit is {PIECE_BYTES}")
            self._read_piece(ordinal, index, size)

    def _read_piece(self, ordinal: int, index: int, size: int) -> None:
        """Receives and delivers one piece; keeps no reference to the buffers."""
        places = self._incoming.stripe(ordinal, index, self._count, size)
        for place in [memoryview(bytearray(size))] if places is None else places:
            self._receive(place)
        self.num_received += size
        self._owner.on_piece(self._incoming.stripe_placed(ordinal, index, size))

    def _receive(self, place: memoryview, may_end: bool = False) -> bool:
        """Fills the place; False if the connection ended before the first byte and `may_end` is True."""
        got = 0
        while got < len(place):
            try:
                if isinstance(self._socket, TlsSocket):
                    more = self._socket.recv_into(place[got:])
                else:
                    more = self._socket.recv_into(place[got:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # with TLS
                self._wait(select.POLLIN)
                continue
            if not more:
                if may_end and not got:
                    return False
                raise OSError("it ended in the middle of a piece")
            got += more
        return True

    def _wait(self, event: int) -> None:
        """Waits until the socket is readable or writable; `close` also ends the wait."""
        poller = select.poll()
        poller.register(self._socket.fileno(), event)
        poller.poll()


logger = logging.getLogger(__name__)

PAYLOAD_CONNECTIONS_VARIABLE: Final = "RPCDIST_PAYLOAD_CONNECTIONS"

MIN_STRIPED_BYTES: Final = 2 << 20
"""For smaller messages, the thread switches cost more than the second connection gains."""

_MIN_FAR_BYTES: Final = 256 << 10
"""`MIN_STRIPED_BYTES` for peers with a long round trip. [Note: far peers]"""

_MAX_UNSENT_BYTES: Final = 256 << 10  # that the kernel accepts beyond those that it sends now

Connections = Sequence[socket.socket | TlsSocket]
OpenConnections = Callable[[int], Coroutine[Any, Any, Connections]]
"""Opens this number of payload connections; raises `OSError` or `TimeoutError` if that fails."""


def num_connections(is_far: bool = False) -> int:
    """The number of payload connections, `RPCDIST_PAYLOAD_CONNECTIONS` or 2, or 16 to a peer that `is_far`; 0 for none.

    Raises:
        ConfigError: the variable is not a number, or too large.
    """
    text = os.environ.get(PAYLOAD_CONNECTIONS_VARIABLE, str(MAX_CONNECTIONS) if is_far else "2")
    if not text.isdecimal() or int(text) > MAX_CONNECTIONS:
        raise ConfigError(f"{PAYLOAD_CONNECTIONS_VARIABLE} must be a number from 0 to {MAX_CONNECTIONS}, not {text!r}")
    return int(text)


@dataclass(eq=False, repr=False)
class Striping:
    """The payload connections of a session over TCP, which carry the large buffers of messages in stripes.

    Args:
        on_piece: called on any thread when a piece has arrived, with the delivery that it completes, or None.
        on_written: called on any thread with the `owed_bytes` of a transfer whose stripes are all written or dropped,
            and whether no other transfer waits.
        open: opens the connections; None at the side that waits for them.
        silence_limit_s: limit for the peer to acknowledge bytes on a connection. [Note: silence]
        round_trip_s: the round trip to the peer; None if it is unknown.
    """

    _io: IoLoop
    _incoming: Incoming
    _name: str
    _on_piece: Callable[[Delivery | None], object]
    _on_written: Callable[[int, bool], object]
    _close: Callable[[str], object]
    open: InitVar[OpenConnections | None]
    _silence_limit_s: float
    round_trip_s: InitVar[float | None] = None
    _num_large: int = 0
    _connections: list[StripeConnection] = field(default_factory=list)
    _transfers: dict[int, StripedTransfer] = field(default_factory=dict)
    # Protects the transfers and the choice of connections.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_used: bool = False  # bytes were sent on the connections, in either direction
    _is_closed: bool = False
    _all_ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when no connection can be read any more
    _num_ended: int = 0

    def __post_init__(self, open: OpenConnections | None, round_trip_s: float | None) -> None:
        self._is_far = is_far = round_trip_s is not None and round_trip_s >= FAR_ROUND_TRIP
        self._num_wanted = num_connections(is_far)
        self._min_bytes = _MIN_FAR_BYTES if is_far else MIN_STRIPED_BYTES
        self._open = open if self._num_wanted else None

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes of payloads sent and received so far."""
        connections = list(self._connections)
        return sum(each.num_sent for each in connections), sum(each.num_received for each in connections)

    # ------------------------------------------------------------ any thread

    def note(self, num_bytes: int) -> None:
        """Notes a message that is sent or announced; the second large one opens the connections."""
        if self._open is None or num_bytes < self._min_bytes:
            return
        self._num_large += 1
        if self._num_large > 1:
            opening, self._open = self._open, None
            with suppress(RpcdistError):  # the loop is closed, and the session with it
                self._io.call_soon(self._begin_opening, opening)

    def take(
        self, number: int, ordinal: int, buffers: Sequence[LargeBuffer], sizes: Sequence[int], owed_bytes: int = 0
    ) -> bool:
        """Sends the buffers of the message whose announcement was the `ordinal`th; False if it does not take them."""
        total = sum(sizes)
        self.note(total)
        if not self._connections or total < self._min_bytes:
            return False
        with self._lock:
            if self._is_closed:
                return True  # the session has ended, so the message is dropped like any other
            if not (connections := self._connections):
                return False
            self._is_used, count = True, len(connections)
            writers = connections[: num_used(total, count)]
            num = num_stripes(total, count)
            ends, numbers = list(accumulate(sizes)), iter(range(num))
            transfer = StripedTransfer(number, ordinal, buffers, ends, count, numbers, owed_bytes, len(writers))
            self._transfers[number] = transfer
        for connection in reversed(writers):  # the last ones carry large messages only, which makes them fast
            connection.put((transfer, transfer.next_stripe() if num == len(writers) else None))
        return True

    def abort(self, number: int) -> bool:
        """Stops a transfer, after the piece that is being written; False if there is no transfer of that number."""
        with self._lock:
            transfer = self._transfers.get(number)
            if transfer is None:
                return False
            transfer.is_aborted = True
            return True

    @property
    def is_busy(self) -> bool:
        """Whether it has bytes left to write."""
        return bool(self._transfers)

    # ------------------------------------------------------------ threads of the connections

    def writer_ended(self, transfer: StripedTransfer) -> None:
        """A connection has no more to write of a transfer; called on its thread."""
        with self._lock:
            transfer.num_writers -= 1
            if transfer.num_writers:
                return
            self._transfers.pop(transfer.number, None)
            is_last = not self._transfers
        self._on_written(transfer.owed_bytes, is_last)

    def on_piece(self, delivery: Delivery | None) -> None:
        """Called when a piece has arrived. An exception raised here ends the session."""
        self._is_used = True
        self._on_piece(delivery)

    def on_end(self, error: Exception | None, is_read: bool) -> None:
        """Called when a thread of a connection has ended: with its error, or with None if the peer closed it."""
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
        """Starts to use the connections, all of which are given; this object owns them."""
        if self._is_closed or self._connections:
            for connection in connections:
                connection.close()
            return
        count = len(connections)
        begun: list[StripeConnection] = []
        unowned = list(connections)
        try:
            for connection in connections:
                break_when_silent(connection, self._silence_limit_s)  # [Note: silence]
                if self._is_far:  # [Note: turns]
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
                pace_if_far(connection)
            while unowned:
                place = len(begun), count
                begun.append(StripeConnection(unowned.pop(0), place, self._incoming, self, self._name, self._io))
        except (OSError, RuntimeError) as exc:  # [Note: unused]
            logger.warning("no payload connections with %s, so one connection carries everything: %s", self._name, exc)
            for stripes in begun:
                stripes.close()
            for connection in unowned:
                connection.close()
            return
        self._connections = begun
        logger.debug("%d payload connections with %s", count, self._name)

    def _ended(self, error: Exception | None, is_read: bool) -> None:
        """Ends the session after a thread of a connection has ended, unless no bytes are lost. [Note: the end]"""
        if self._is_closed or not self._connections or (error is None and self._drop_unused()):
            return
        if isinstance(error, ProtocolViolation):
            self._close(str(error))
            return
        if error is not None and not isinstance(error, OSError):
            logger.error("a piece of a large message from or to %s could not be handled", self._name, exc_info=error)
            self._close(f"a payload could not be handled: {error!r}")
            return
        self._num_ended += is_read
        if self._num_ended >= len(self._connections):
            self._all_ended.set()
        text = "the peer closed it" if error is None else getattr(error, "strerror", None) or error
        reason = f"a payload connection with {self._name} broke: {text}"
        self._io.loop.call_later(CLOSE_STEP_LIMIT_S, self._close, reason)

    def _drop_unused(self) -> bool:
        """Drops the connections after the peer has closed one, if no bytes were sent on any. [Note: unused]"""
        with self._lock:
            if self._is_used:
                return False
            dropped, self._connections = self._connections, []
        for connection in dropped:
            connection.close()
        self._all_ended.set()
        logger.info("%s has closed its payload connections, so one connection carries everything", self._name)
        return True

    async def read_out(self) -> None:
        """Waits, bounded, for the last bytes that the peer wrote before it ended the session. [Note: the end]"""
        self._incoming.end_announcements()
        if self._connections:  # even if no byte is missing: the last message may not be delivered yet
            await ends_within(self._all_ended.wait(), CLOSE_STEP_LIMIT_S)

    def close(self) -> None:
        """Closes all connections, since the session has ended."""
        with self._lock:
            self._is_closed = True
            self._transfers.clear()
        for connection in self._connections:
            connection.close()


# ---------------------------------------------------------------- the side that waits for the connections

PAYLOAD_TAKER: Final = "payloads"
"""The name of `StripeTaker` among the takers of raw sockets."""

_Arrived = dict[StripePlace, socket.socket | TlsSocket]


def payload_purpose(session_id: bytes, place: StripePlace) -> str:
    """The purpose in the hello of a payload connection, after the name of the taker."""
    return f"{session_id.hex()}/{place[0]}/{place[1]}"


def _parse(purpose: str) -> tuple[str, StripePlace] | None:
    session, *numbers = purpose.split("/")
    if len(numbers) != 2 or not all(number.isdecimal() and len(number) < 3 for number in numbers):
        return None
    number, total = map(int, numbers)
    return (session, (number, total)) if number < total <= MAX_CONNECTIONS else None


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
            return f"{PAYLOAD_CONNECTIONS_VARIABLE} is 0 in this process"
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
        if place in arrived or any(place[1] != other[1] for other in arrived):  # two arrived at the same time
            return False
        if not arrived:
            asyncio.get_running_loop().call_later(SIDE_ATTEMPT_LIMIT_S, _close_all, arrived)
        arrived[place] = connection
        if len(arrived) == place[1]:
            striping.begin([arrived[index, place[1]] for index in range(place[1])])
            arrived.clear()
        return True


def _close_all(arrived: _Arrived) -> None:
    """Closes the connections of an incomplete set: the peer has stopped opening them, or the session has ended."""
    for connection in arrived.values():
        connection.close()
    arrived.clear()
