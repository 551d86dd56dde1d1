"""One connection for payloads, and its two threads: one writes, one reads.

They block, and so each piece of a payload costs one system call, without the interpreter's lock. `close` ends what they
wait for; the last of the two closes the socket, so that its number cannot be another file's while one still uses it.

What travels is pieces: the ordinal of the announcement they belong to, their size, and so many bytes.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

from rpcdist.errors import ProtocolViolation
from rpcdist.transport._framing.incoming import Delivery, Incoming
from rpcdist.transport._framing.stripes import StripeCursor
from rpcdist.transport._tls.tls_socket import TlsSocket
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.outgoing_buffer import OutgoingBuffer

_HEAD: Final = struct.Struct("<QI")

PIECE_BYTES: Final = 1 << 20
"""Written at once; then another transfer has its turn on this connection."""


class StripedTransfer:
    """The buffers of one message, on their way out on several connections.

    Attributes:
        is_aborted: nothing more of it is to be sent.
        num_stripes: how many of its stripes are not out yet; their owner counts.
    """

    __slots__ = ("buffers", "is_aborted", "num_stripes", "number", "ordinal", "sizes")

    def __init__(
        self, number: int, ordinal: int, buffers: Sequence[OutgoingBuffer], sizes: Sequence[int], num_stripes: int
    ) -> None:
        self.number = number
        self.ordinal = ordinal
        self.buffers = buffers
        self.sizes = sizes
        self.num_stripes = num_stripes
        self.is_aborted = False


class Stripe(NamedTuple):
    """What one connection carries of a transfer."""

    transfer: StripedTransfer
    cursor: StripeCursor


class StripePlace(NamedTuple):
    """Which of the connections of a session this is."""

    number: int
    total: int


class StripeOwner(Protocol):
    """What a connection tells; on its threads."""

    def stripe_ended(self, transfer: StripedTransfer) -> None:
        """One stripe of it is out, or was dropped."""

    def on_piece(self, delivery: Delivery | None) -> None:
        """A piece has come; perhaps the last one of a message. What it raises ends the session."""

    def on_end(self, error: Exception | None, is_read: bool) -> None:
        """Nothing can be read, or written, any more; None: the peer has closed the connection."""


class StripeConnection:
    """Its threads run from the beginning.

    Attributes:
        num_sent, num_received: the bytes of payloads so far.

    Args:
        connection: proven; owned from now on.
        place: which one it is.
        incoming: knows where bytes that come belong.
        owner: hears what happens.
        name: of the peer.
        io: starts the threads.

    Raises:
        RuntimeError: the system gives no more threads; the connection is closed.
    """

    def __init__(
        self,
        connection: socket.socket | TlsSocket,
        place: StripePlace,
        incoming: Incoming,
        owner: StripeOwner,
        name: str,
        io: IoLoop,
    ) -> None:
        if isinstance(connection, socket.socket):
            connection.setblocking(True)
        self.num_sent = self.num_received = 0
        self._socket = connection
        self._place = place
        self._incoming = incoming
        self._owner = owner
        self._queue: SimpleQueue[Stripe | None] = SimpleQueue()
        self._is_closed = False
        self._num_threads = 2
        self._lock = threading.Lock()
        for work, kind in ((self._write, "writer"), (self._read, "reader")):
            title = f"rpcdist payload {kind} {place.number} of {name}"
            try:
                io.start_worker(partial(self._run, work), title)
            except RuntimeError:
                self.close()
                self._leave(1 if work == self._read else 2)
                raise

    def __repr__(self) -> str:
        return f"<StripeConnection {self._place.number} [{'closed' if self._is_closed else 'open'}]>"

    def put(self, stripe: Stripe) -> None:
        """Queues what this connection is to carry; any thread."""
        self._queue.put(stripe)

    def close(self) -> None:
        """Ends both threads soon; any thread; idempotent."""
        self._is_closed = True
        with self._lock, suppress(OSError):  # the lock: the last thread may be about to close the socket
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
        """So many threads use the socket no more."""
        with self._lock:
            self._num_threads -= num_threads
            if not self._num_threads:
                self._socket.close()

    # ------------------------------------------------------------ writing

    def _write(self) -> None:
        while self._write_piece(self._queue.get()):
            pass

    def _write_piece(self, stripe: Stripe | None) -> bool:
        """One piece of a stripe; False if the connection is closed. Nothing keeps the buffers afterwards."""
        if stripe is None or self._is_closed:
            return False
        if stripe.cursor.left and not stripe.transfer.is_aborted:
            self._send(stripe)
        if stripe.cursor.left and not stripe.transfer.is_aborted:
            self._queue.put(stripe)
        else:
            self._owner.stripe_ended(stripe.transfer)
        return True

    def _send(self, stripe: Stripe) -> None:
        buffers = stripe.transfer.buffers
        ranges = stripe.cursor.take(PIECE_BYTES)
        size = sum(end - start for _, start, end in ranges)
        self.num_sent += size
        head = memoryview(_HEAD.pack(stripe.transfer.ordinal, size))
        parts = [head, *(buffers[number].view[start:end] for number, start, end in ranges)]
        while parts:
            try:
                sent = self._socket.sendmsg(parts)
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
            ordinal, size = _HEAD.unpack(head)
            if not 0 < size <= PIECE_BYTES:
                raise ProtocolViolation(f"a piece of {size} bytes was announced; {PIECE_BYTES} are allowed")
            self._read_piece(ordinal, size)

    def _read_piece(self, ordinal: int, size: int) -> None:
        """Nothing keeps the buffers when they have been delivered."""
        places = self._incoming.stripe(ordinal, *self._place, size)
        for place in [memoryview(bytearray(size))] if places is None else places:
            self._receive(place)
        self.num_received += size
        self._owner.on_piece(self._incoming.stripe_placed(ordinal, size))

    def _receive(self, place: memoryview, may_end: bool = False) -> bool:
        """Fills the place; False if the connection ended before its first byte, where it `may_end`."""
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
                raise OSError("it ended within a piece")
            got += more
        return True

    def _wait(self, event: int) -> None:
        """Until there is something to read, or room to write; `close` ends it, too."""
        poller = select.poll()
        poller.register(self._socket.fileno(), event)
        poller.poll()
