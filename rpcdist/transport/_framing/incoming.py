"""Reassembly of large buffers from chunks, or from stripes: bookkeeping, no I/O.

Chunks come on the connection that brought the announcement. Stripes come on others, each read by a thread of its own,
and perhaps before the announcement: they name it by its place in the order of all announcements.

Invariants:
    1. A message is delivered once, when every byte of every buffer that it announced has arrived, or was lent.
    2. The chunks of one buffer arrive in order, the bytes of a stripe, too, and none exceeds the announced size;
       anything else is a violation. A transfer comes in chunks or in stripes, not in both: no byte is counted twice,
       so none is missing when all have been counted.
    3. Memory for a buffer is taken when its first bytes arrive, so that an announcement alone costs nothing, and given
       back when its transfer is aborted or the session ends.
    4. What a peer has announced and not sent is bounded, in bytes and in buffers of one message.
    5. A transfer that is beyond that bound, or that there is no memory for, fails alone: its bytes are dropped as they
       come, and then its message is delivered with buffers that raise the reason. The session goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation, SerializationError
from rpcdist.transport._framing.frames import Chunk
from rpcdist.transport._framing.message_parts import parsed_cost
from rpcdist.transport._framing.stripes import StripeCursor
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import WireMessage

MAX_BUFFERS: Final = 1 << 16
"""Large buffers of one message. Senders keep buffers of up to 32 KiB inside the message, so this is 2 GiB or more."""


TRANSFER_BYTES: Final = 1024
BUFFER_BYTES: Final = 64
"""What the account of a transfer, and of each of its buffers, takes while it lasts: that counts as announced, too."""


class IncomingBuffer(Protocol):
    """Memory that a large buffer is received into."""

    @property
    def view(self) -> memoryview:
        """Writable, one byte per item."""


class _HeapBuffer:
    __slots__ = ("view",)

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))


def heap_buffer(size_bytes: int) -> IncomingBuffer:
    """The allocator that is used where the layers above bring none."""
    return _HeapBuffer(size_bytes)


class _MissingBuffer:
    """Stands for a buffer that was not received: whatever is asked of it raises the reason."""

    __slots__ = ("_reason", "size")

    def __init__(self, size: int, reason: str) -> None:
        self.size = size
        self._reason = reason

    @property
    def view(self) -> memoryview:
        raise SerializationError(self._reason)

    def __getattr__(self, name: str) -> object:
        raise SerializationError(self._reason)


Delivery = tuple[WireMessage, list[IncomingBuffer]]
Borrow = Callable[[WireMessage], Mapping[int, IncomingBuffer]]
"""The buffers of a message that lie in memory which the peer lends, by their index."""


def _nothing_is_lent(message: WireMessage) -> Mapping[int, IncomingBuffer]:
    raise ProtocolViolation("a message refers to lent memory on a channel that cannot lend any")


class _NoMemory(Exception):
    """For a buffer of one transfer."""


class _IncomingTransfer:
    """A message whose buffers are arriving; None stands for one of which nothing has come.

    `stripes` are the cursors by the number of the stripe, once one has begun, and `is_chunked` says that a chunk has.
    `failure` says why its bytes are dropped, if they are, `is_counted` whether they count as announced, and `own_bytes`
    what the account of them takes.
    """

    __slots__ = (
        "allocate", "buffers", "failure", "filled", "is_chunked", "is_counted", "message", "missing", "ordinal",
        "own_bytes", "stripes",
    )  # fmt: skip

    def __init__(
        self,
        message: WireMessage,
        lent: Mapping[int, IncomingBuffer],
        allocate: Callable[[int], IncomingBuffer],
        ordinal: int,
    ) -> None:
        sizes = message.large
        self.ordinal = ordinal
        self.failure: str | None = None
        self.is_chunked = False
        self.is_counted = False
        self.stripes: dict[int, StripeCursor] = {}
        self.message = message
        self.allocate = allocate
        self.buffers: list[IncomingBuffer | None] = [lent.get(index) for index in range(len(sizes))]
        self.filled = [size if index in lent else 0 for index, size in enumerate(sizes)]
        self.missing = sum(sizes) - sum(self.filled)
        self.own_bytes = TRANSFER_BYTES + BUFFER_BYTES * len(sizes)

    def buffer(self, index: int) -> IncomingBuffer:
        """The memory of a buffer, taken now if it was not before. Raises `_NoMemory`."""
        buffer = self.buffers[index]
        if buffer is None:
            size = self.message.large[index]
            if self.failure is not None:
                return _MissingBuffer(size, self.failure)
            try:
                buffer = self.buffers[index] = self.allocate(size)
            except (MemoryError, RuntimeError, OverflowError) as exc:
                raise _NoMemory(f"there is no memory for {size} announced bytes: {exc}") from exc
        return buffer

    def fail(self, reason: str) -> None:
        """What has come of it is given back, and what comes will be dropped."""
        self.failure = reason
        self.buffers = [None] * len(self.buffers)

    def of_stripe(self, index: int, count: int, size: int) -> list[memoryview]:
        """Where the next bytes of a stripe belong; nowhere if they are dropped. Raises `_NoMemory`."""
        if self.is_chunked or self.message.loans:
            raise ProtocolViolation("a message came in chunks or lent memory, and in stripes")
        cursor = self.stripes.get(index)
        if cursor is None:
            cursor = self.stripes[index] = StripeCursor(self.message.large, index, count)
        pieces = cursor.take_all(size)
        return [] if self.failure else [self.buffer(number).view[start:end] for number, start, end in pieces]


class Incoming:
    """The transfers of one session that are under way. Threads that read stripes may use it beside the one that reads.

    Args:
        allocate: takes memory for a buffer.
        borrow: finds the buffers that the peer lends.
        announced: counts what the peer has announced, on all its sessions, and not sent.
    """

    def __init__(
        self,
        allocate: Callable[[int], IncomingBuffer] = heap_buffer,
        borrow: Borrow = _nothing_is_lent,
        announced: AnnouncedBytes | None = None,
    ) -> None:
        self._allocate = allocate
        self._borrow = borrow
        self._announced = AnnouncedBytes() if announced is None else announced
        self._transfers: dict[int, _IncomingTransfer] = {}
        self._num_announced = 0  # messages with large buffers, as the peer counts them, too
        self._by_ordinal: dict[int, _IncomingTransfer] = {}
        self._has_ended = False  # no announcement follows
        self._changed = threading.Condition()  # around all of it

    def __repr__(self) -> str:
        return f"<Incoming {len(self._transfers)} transfers, {self.missing} B missing>"

    @property
    def missing(self) -> int:
        """Bytes that were announced and have not come."""
        with self._changed:
            return sum(transfer.missing for transfer in self._transfers.values())

    def announce(self, message: WireMessage) -> Delivery | None:
        """Takes a message; returns it with its buffers when nothing is missing.

        Raises:
            ProtocolViolation: the transfer number is in use, more is announced than is taken from this peer, or what is
                said to be lent is not.
        """
        if not message.large:
            return message, []
        with self._changed:
            self._num_announced += 1
            try:
                return self._announce(message, self._num_announced)
            finally:
                self._changed.notify_all()

    def _announce(self, message: WireMessage, ordinal: int) -> Delivery | None:
        sizes = message.large
        if not sizes:
            return message, []
        number = message.transfer
        if number in self._transfers or number == 0:
            raise ProtocolViolation(f"transfer {number} was announced twice")
        if len(sizes) > MAX_BUFFERS:
            raise ProtocolViolation(f"a message announced {len(sizes)} buffers; {MAX_BUFFERS} are allowed")
        lent = self._borrow(message) if message.loans else {}
        if len(lent) == len(sizes) and not message.wrapped:  # nothing follows
            return message, [lent[index] for index in range(len(sizes))]
        # A message that does not fit into an envelope is parsed from plain bytes; only payloads become tensors.
        allocate = heap_buffer if message.wrapped else self._allocate
        transfer = _IncomingTransfer(message, lent, allocate, ordinal)
        if not transfer.missing:
            return self._deliver(transfer)
        if (refusal := self._announced.add(transfer.own_bytes)) is not None:
            raise ProtocolViolation(refusal)
        refusal = self._announced.add(transfer.missing)
        transfer.is_counted = refusal is None
        if refusal is not None:
            transfer.fail(refusal)
        self._transfers[number] = transfer
        self._by_ordinal[transfer.ordinal] = transfer
        return None

    def chunk(self, chunk: Chunk) -> Delivery | None:
        """Stores a chunk; returns the message when it was the last one.

        A chunk of an unknown transfer belongs to one that was aborted, and is dropped.
        """
        size = len(chunk.data)
        place = self.place(chunk.transfer, chunk.buffer, chunk.offset, size)
        if place is not None:
            place[:] = chunk.data
        return self.placed(chunk.transfer, chunk.buffer, size)

    def place(self, number: int, buffer: int, offset: int, size: int) -> memoryview | None:
        """Where the bytes of a chunk belong, for who can put them there; `placed` follows. None: `chunk` drops them."""
        with self._changed:
            transfer = self._transfers.get(number)
            if transfer is None:
                return None
            if transfer.stripes:
                raise ProtocolViolation("a message came in stripes, and in chunks")
            transfer.is_chunked = True
        if buffer >= len(transfer.buffers):
            raise ProtocolViolation(f"a chunk for buffer {buffer} of {len(transfer.buffers)}")
        at, announced = transfer.filled[buffer], transfer.message.large[buffer]
        if offset != at or at + size > announced:
            raise ProtocolViolation(
                f"a chunk of {size} bytes at {offset} came, expected at {at} of {announced} announced bytes"
            )
        try:
            return None if transfer.failure else transfer.buffer(buffer).view[at : at + size]
        except _NoMemory as exc:
            self._fail(transfer, exc)
            return None

    def placed(self, number: int, buffer: int, size: int) -> Delivery | None:
        """The bytes of a chunk are where `place` said; returns the message when they were the last ones."""
        with self._changed:
            transfer = self._transfers.get(number)
            if transfer is None:  # aborted meanwhile
                return None
            transfer.filled[buffer] += size
            return self._count(transfer, size)

    def stripe(self, ordinal: int, index: int, count: int, size: int) -> list[memoryview] | None:
        """Where bytes that came on another connection belong; `stripe_placed` follows. None: drop them.

        Args:
            ordinal: the announcement that they belong to, the how-manieth it was. It is waited for, if it has not come,
                until `end_announcements`.
            index: which stripe.
            count: how many there are; always the same.
            size: number of bytes.

        Raises:
            ProtocolViolation: they do not belong to that stripe.
        """
        with self._changed:
            while self._num_announced < ordinal and not self._has_ended:
                self._changed.wait()
            transfer = self._by_ordinal.get(ordinal)
            try:
                return None if transfer is None else transfer.of_stripe(index, count, size) or None
            except _NoMemory as exc:
                assert transfer is not None
                self._fail(transfer, exc)
                return None

    def stripe_placed(self, ordinal: int, size: int) -> Delivery | None:
        """The bytes are where `stripe` said, or dropped; returns the message when they were the last ones."""
        with self._changed:
            transfer = self._by_ordinal.get(ordinal)
            return None if transfer is None else self._count(transfer, size)

    def _count(self, transfer: _IncomingTransfer, size: int) -> Delivery | None:
        """So many bytes of it have come."""
        transfer.missing -= size
        if transfer.is_counted:
            self._announced.subtract(size)
        if transfer.missing:
            return None
        self._forget(transfer)
        return self._deliver(transfer)

    def _fail(self, transfer: _IncomingTransfer, exc: _NoMemory) -> None:
        with self._changed:
            transfer.fail(str(exc))
            was_aborted = self._transfers.get(transfer.message.transfer) is not transfer
            if transfer.is_counted and not was_aborted:
                transfer.is_counted = False
                self._announced.subtract(transfer.missing)

    def _forget(self, transfer: _IncomingTransfer) -> None:
        del self._transfers[transfer.message.transfer]
        del self._by_ordinal[transfer.ordinal]
        self._announced.subtract(transfer.own_bytes + (transfer.missing if transfer.is_counted else 0))

    def abort(self, number: int) -> WireMessage | None:
        """Forgets a transfer; returns its message, which will not be delivered."""
        with self._changed:
            transfer = self._transfers.get(number)
            if transfer is None:
                return None
            self._forget(transfer)
            return transfer.message

    def end_announcements(self) -> None:
        """None will come any more: threads need not wait for one."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Gives back the memory of all transfers: a session that has ended may be held for a while by who used it."""
        with self._changed:
            for transfer in list(self._transfers.values()):
                self._forget(transfer)
            self._announced = AnnouncedBytes()  # what is still read counts for nobody
        self.end_announcements()

    def _deliver(self, transfer: _IncomingTransfer) -> Delivery | None:
        try:
            buffers = [transfer.buffer(index) for index in range(len(transfer.buffers))]  # also those of no bytes
        except _NoMemory as exc:  # not even for one of no bytes
            transfer.fail(str(exc))
            buffers = [transfer.buffer(index) for index in range(len(transfer.buffers))]
        if not transfer.message.wrapped:
            return transfer.message, buffers
        if transfer.failure is not None:  # nobody knows what that was
            raise ProtocolViolation(transfer.failure)
        view = buffers[0].view
        data = view.obj if isinstance(view.obj, bytearray) else bytes(view)  # lent memory could change meanwhile
        parsed_bytes = parsed_cost(rpc_pb2.Message, data)
        if (refusal := self._announced.add(parsed_bytes)) is not None:
            raise ProtocolViolation(refusal)
        try:
            inner = rpc_pb2.Message.FromString(data)  # type: ignore[arg-type]  # protobuf's stubs know no bytearray
        except Exception as exc:
            raise ProtocolViolation("a wrapped message cannot be parsed") from exc
        finally:
            self._announced.subtract(parsed_bytes)
        return self._announce(inner, transfer.ordinal)
