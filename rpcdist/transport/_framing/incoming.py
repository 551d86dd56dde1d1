"""Reassembles large buffers from chunks or stripes. Bookkeeping only, no I/O.

Chunks arrive on the connection that brought the announcement. Stripes arrive on other connections, each read by its own
thread, and possibly before the announcement: a stripe names the announcement by its ordinal number.

Invariants:
    1. A message is delivered once, when every byte of every buffer that it announced has arrived or was lent.
    2. The chunks of one buffer arrive in order, as do the bytes of a stripe, and stay within the announced size;
       anything else is a violation. A transfer uses either chunks or stripes: no byte is counted twice, so no byte is
       missing when all are counted.
    3. The memory of a buffer is allocated when its first bytes arrive, so an announcement alone costs nothing. It is
       freed when the transfer is aborted or the session ends.
    4. The announced bytes that a peer has not sent are bounded, and so is the number of buffers of one message.
    5. A transfer that exceeds that bound, or whose buffers cannot be allocated, fails alone: its bytes are dropped as
       they arrive, and its message is then delivered with buffers that raise the reason. The session continues.
    6. A buffer that the receiver handles while it arrives (`StagedBuffer`) is told of each range once, when its bytes
       are there, and of all ranges before its message is delivered.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate
from typing import Final, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation, SerializationError
from rpcdist.transport._framing.calls_in_protobuf import from_protobuf
from rpcdist.transport._framing.frames import Chunk
from rpcdist.transport._framing.message_parts import parsed_cost
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.wire_messages import WireMessage

MAX_BUFFERS: Final = 1 << 16
"""Large buffers of one message. Senders keep buffers of up to 32 KiB inside the message, so this is 2 GiB or more."""


TRANSFER_BYTES: Final = 1024
BUFFER_BYTES: Final = 64
"""Memory for the record of a transfer, and of each of its buffers; these bytes also count as announced."""


MAX_CONNECTIONS: Final = 16
"""Limit on the payload connections of one session."""

_FEW_CONNECTIONS: Final = 8  # more only if each has 1 MiB: the switches to more threads cost more than they gain
_TURN_BYTES: Final = 16 << 20  # of a large message, one stripe on each connection

MAX_RANGES: Final = 64
"""Limit on the buffer parts in one piece, which one system call sends; systems allow 16 or more, Linux 1024. The
receiver allocates memory for all of them in one turn."""

_ALIGNMENT_BYTES: Final = 64  # each stripe of a tensor begins at an element and at a cache line


class IncomingBuffer(Protocol):
    """Memory into which a large buffer is received."""

    @property
    def view(self) -> memoryview:
        """Writable, one byte per item."""


class StagedBuffer(IncomingBuffer, Protocol):
    """A large buffer whose parts the receiver handles while others arrive. One call at a time."""

    def parts(self, start: int, end: int) -> list[memoryview]:
        """The memory for a range of its bytes, in their order; it may be several pieces. Raises `MemoryError`."""

    def arrived(self, start: int, end: int) -> None:
        """Takes note of a range whose bytes are there."""


def heap_buffer(size_bytes: int) -> IncomingBuffer:
    """The default allocator, for layers above that have no other."""
    return LargeBuffer(memoryview(bytearray(size_bytes)))


class MissingBuffer:
    """Replaces a buffer that was not received: every use raises the reason."""

    __slots__ = ("_reason", "size")

    def __init__(self, size: int, reason: str) -> None:
        self.size = size
        self._reason = reason

    @property
    def view(self) -> memoryview:
        raise SerializationError(self._reason)

    def __len__(self) -> int:
        raise SerializationError(self._reason)

    def __getattr__(self, name: str) -> object:
        raise SerializationError(self._reason)


Delivery = tuple[WireMessage, list[IncomingBuffer]]
Borrow = Callable[[WireMessage], Mapping[int, IncomingBuffer]]
"""Finds the buffers of a message that are in memory lent by the peer, by their index."""

Stage = Callable[[WireMessage], Mapping[int, StagedBuffer]]
"""Makes those buffers of an announced message, by their index, that are handled while they arrive."""


def _nothing_is_lent(message: WireMessage) -> Mapping[int, IncomingBuffer]:
    raise ProtocolViolation("a message refers to lent memory on a channel that cannot lend any")


def nothing_is_staged(message: WireMessage) -> Mapping[int, StagedBuffer]:
    """The default `Stage`."""
    return {}


def num_used(total: int, count: int) -> int:
    """The number of payload connections, of `count`, that carry a message of `total` bytes."""
    return min(count, max(_FEW_CONNECTIONS, total >> 20))


def num_stripes(total: int, count: int) -> int:
    """The number of stripes of a message. A large one has several for each connection. [Note: turns] in `striping`"""
    return max(num_used(total, count), -(-total * count // _TURN_BYTES))


class StripeCursor:
    """The position in one stripe of a message. Pure.

    The buffers form one sequence of bytes. Both ends know the sizes from the announcement, so they know the bytes of
    each stripe, and only the numbers of the message and of the stripe and a number of bytes travel with the bytes.

    Args:
        ends: the end of each buffer in that sequence.
        index: number of the stripe, from 0; a message has `num_stripes`. The last stripes of a small message are empty.
        count: number of payload connections.

    Attributes:
        taken: for a receiver, the ranges of the piece that arrives now.
    """

    __slots__ = ("_at", "_buffer", "_ends", "index", "left", "taken")

    def __init__(self, ends: Sequence[int], index: int, count: int) -> None:
        total = ends[-1]
        width = -(-total // (num_stripes(total, count) * _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        start = min(total, index * width)
        self.index = index
        self.left = min(total, start + width) - start
        self.taken: list[tuple[int, int, int]] = []
        self._ends = ends
        self._at = start
        self._buffer = bisect_right(ends, start)

    def take(self, num_bytes: int, max_ranges: int = MAX_RANGES) -> list[tuple[int, int, int]]:
        """Advances by up to `num_bytes`.

        Args:
            num_bytes: more than 0.
            max_ranges: limit on the returned ranges, even if they have fewer bytes.

        Returns:
            The number of the buffer, start and end of each range passed.
        """
        ranges: list[tuple[int, int, int]] = []
        while num_bytes and self.left and len(ranges) < max_ranges:
            number = self._buffer
            begin = self._ends[number - 1] if number else 0
            size = min(num_bytes, self._ends[number] - self._at, self.left)
            ranges.append((number, self._at - begin, self._at - begin + size))
            num_bytes -= size
            self.left -= size
            self._at += size
            self._buffer = bisect_right(self._ends, self._at, number)
        return ranges

    def take_all(self, num_bytes: int) -> list[tuple[int, int, int]]:
        """Like `take`, for exactly `num_bytes` that arrived.

        Raises:
            ProtocolViolation: the stripe has fewer bytes left, or they belong to more buffers than one piece may have.
        """
        if not 0 < num_bytes <= self.left:
            raise ProtocolViolation(f"{num_bytes} bytes arrived for a stripe with {self.left} bytes left")
        left = self.left - num_bytes
        ranges = self.taken = self.take(num_bytes)
        if self.left != left:
            raise ProtocolViolation(f"a piece of {num_bytes} bytes arrived for more than {MAX_RANGES} buffers")
        return ranges


@dataclass(slots=True, eq=False)
class _IncomingTransfer:
    """A message whose buffers are arriving; a buffer is None until its first bytes arrive.

    `stripes` are the cursors of the stripes that have begun, by number; `is_chunked` is True once a chunk has arrived.
    If `failure` is set, it is the reason why arriving bytes are dropped. `is_counted` says whether the bytes count as
    announced, and `own_bytes` is the memory of this record itself. `staged` are the buffers that are handled while they
    arrive, and `loose` is a chunk that lies in several pieces of one, which are filled when all of it is there.
    """

    message: WireMessage
    lent: InitVar[Mapping[int, IncomingBuffer]]
    allocate: Callable[[int], IncomingBuffer]
    ordinal: int
    staged: Mapping[int, StagedBuffer]
    buffers: list[IncomingBuffer | None] = field(init=False)
    filled: list[int] = field(init=False)
    missing: int = field(init=False)
    own_bytes: int = field(init=False)
    failure: str | None = None
    is_chunked: bool = False
    is_counted: bool = False
    stripes: dict[int, StripeCursor] = field(default_factory=dict)
    loose: tuple[memoryview, list[memoryview]] | None = None
    ends: Sequence[int] = ()  # of the buffers in the sequence of all bytes; computed for stripes

    def __post_init__(self, lent: Mapping[int, IncomingBuffer]) -> None:
        sizes = self.message.large
        given: Mapping[int, IncomingBuffer] = self.staged or lent
        self.buffers = [given.get(index) for index in range(len(sizes))]
        self.filled = [size if index in lent else 0 for index, size in enumerate(sizes)]
        self.missing = sum(sizes) - sum(self.filled)
        self.own_bytes = TRANSFER_BYTES + BUFFER_BYTES * len(sizes)

    def buffer(self, index: int) -> IncomingBuffer:
        """The memory of a buffer, allocated at the first call. Raises `MemoryError`."""
        buffer = self.buffers[index]
        if buffer is None:
            size = self.message.large[index]
            if self.failure is not None:
                return MissingBuffer(size, self.failure)
            try:
                buffer = self.buffers[index] = self.allocate(size)
            except (MemoryError, RuntimeError, OverflowError) as exc:
                raise MemoryError(f"there is no memory for {size} announced bytes: {exc}") from exc
        return buffer

    def fail(self, reason: str) -> None:
        """Frees the received bytes, and drops those that still arrive."""
        self.failure = reason
        self.buffers = [None] * len(self.buffers)
        self.staged, self.loose = {}, None

    def of_stripe(self, index: int, count: int, size: int) -> list[memoryview]:
        """The memory for the next bytes of a stripe; empty if they are dropped. Raises `MemoryError`."""
        if self.is_chunked or self.message.loans:
            raise ProtocolViolation("a message arrived in stripes, and also in chunks or lent memory")
        cursor = self.stripes.get(index)
        if cursor is None:
            self.ends = self.ends or list(accumulate(self.message.large))
            cursor = self.stripes[index] = StripeCursor(self.ends, index, count)
        if cursor.taken:  # only one connection may bring a stripe, whose pieces would be taken for one another
            raise ProtocolViolation(f"two connections bring stripe {index} of a message")
        ranges = cursor.take_all(size)
        if self.failure:
            return []
        return [part for number, start, end in ranges for part in self.parts(number, start, end)]

    def parts(self, index: int, start: int, end: int) -> list[memoryview]:
        """The memory for a range of a buffer. Raises `MemoryError`."""
        staged = self.staged.get(index)
        return [self.buffer(index).view[start:end]] if staged is None else staged.parts(start, end)

    def one_part(self, index: int, start: int, end: int) -> memoryview:
        """`parts` for the next chunk, which a channel receives into one piece of memory."""
        parts = self.parts(index, start, end)
        if len(parts) == 1:
            return parts[0]
        memory = memoryview(bytearray(end - start))
        self.loose = memory, parts
        return memory

    def chunk_arrived(self, index: int, size: int) -> None:
        """Takes note of the bytes of the next chunk."""
        if self.loose is not None:
            (memory, parts), self.loose = self.loose, None
            for part in parts:
                part[:], memory = memory[: len(part)], memory[len(part) :]
        if (staged := self.staged.get(index)) is not None:
            staged.arrived(self.filled[index], self.filled[index] + size)

    def piece_arrived(self, index: int) -> None:
        """Takes note of the bytes of the last piece of a stripe."""
        taken, self.stripes[index].taken = self.stripes[index].taken, []
        for number, start, end in taken:
            if (staged := self.staged.get(number)) is not None:
                staged.arrived(start, end)


@dataclass(eq=False, repr=False)
class Incoming:
    """The unfinished transfers of one session; any thread that reads its connections may use it.

    Args:
        borrow: finds the buffers that the peer lends.
        stage: makes the buffers that are handled while they arrive.
        announced: counts the bytes that the peer has announced on all its sessions and not sent.
    """

    _allocate: Callable[[int], IncomingBuffer] = heap_buffer
    _borrow: Borrow = _nothing_is_lent
    announced: AnnouncedBytes = field(default_factory=AnnouncedBytes)
    _stage: Stage = nothing_is_staged
    _transfers: dict[int, _IncomingTransfer] = field(default_factory=dict)
    _num_announced: int = 0  # messages with large buffers; the peer counts them too
    _by_ordinal: dict[int, _IncomingTransfer] = field(default_factory=dict)
    _has_ended: bool = False  # no further announcement will arrive
    _changed: threading.Condition = field(default_factory=threading.Condition)  # protects all of the above

    def __repr__(self) -> str:
        return f"<Incoming {len(self._transfers)} transfers, {self.missing} B missing>"

    @property
    def missing(self) -> int:
        """The announced bytes that have not arrived."""
        with self._changed:
            return sum(transfer.missing for transfer in self._transfers.values())

    def announce(self, message: WireMessage) -> Delivery | None:
        """Registers a message; returns it with its buffers if nothing is missing.

        Raises:
            ProtocolViolation: the transfer number is in use, the peer has announced too much, or a loan does not exist.
        """
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
            raise ProtocolViolation(f"a message announced {len(sizes)} buffers; the limit is {MAX_BUFFERS}")
        lent = self._borrow(message) if message.loans else {}
        if len(lent) == len(sizes) and not message.wrapped:  # no bytes follow
            return message, [lent[index] for index in range(len(sizes))]
        # A message that does not fit into an envelope is parsed from plain bytes; only payloads become tensors.
        allocate = heap_buffer if message.wrapped else self._allocate
        staged = {} if message.wrapped or lent else self._stage(message)
        transfer = _IncomingTransfer(message, lent, allocate, ordinal, staged)
        if not transfer.missing:
            return self._deliver(transfer)
        if (refusal := self.announced.add(transfer.own_bytes)) is not None:
            raise ProtocolViolation(refusal)
        refusal = self.announced.add(transfer.missing)
        transfer.is_counted = refusal is None
        if refusal is not None:
            transfer.fail(refusal)
        self._transfers[number] = transfer
        self._by_ordinal[transfer.ordinal] = transfer
        return None

    def chunk(self, chunk: Chunk) -> Delivery | None:
        """Stores a chunk; returns the message if this was its last one.

        A chunk of an unknown transfer belongs to one that was aborted, and is dropped.
        """
        size = len(chunk.data)
        place = self.place(chunk.transfer, chunk.buffer, chunk.offset, size)
        if place is not None:
            place[:] = chunk.data
        return self.placed(chunk.transfer, chunk.buffer, size)

    def place(self, number: int, buffer: int, offset: int, size: int) -> memoryview | None:
        """The memory for the bytes of a chunk; the caller fills it and calls `placed`. None to drop the bytes."""
        with self._changed:
            transfer = self._transfers.get(number)
            if transfer is None:
                return None
            if transfer.stripes:
                raise ProtocolViolation("a message arrived in stripes, and also in chunks")
            transfer.is_chunked = True
        if buffer >= len(transfer.buffers):
            raise ProtocolViolation(f"a chunk arrived for buffer {buffer} of {len(transfer.buffers)}")
        at, announced = transfer.filled[buffer], transfer.message.large[buffer]
        if offset != at or at + size > announced:
            raise ProtocolViolation(
                f"a chunk of {size} bytes arrived at offset {offset}; the next of {announced} announced bytes is at "
                f"{at}"
            )
        try:
            if transfer.failure:
                return None
            return transfer.one_part(buffer, at, at + size)
        except MemoryError as exc:
            self._fail(transfer, exc)
            return None

    def placed(self, number: int, buffer: int, size: int) -> Delivery | None:
        """Records that `place` was filled; returns the message if these were its last bytes."""
        with self._changed:
            transfer = self._transfers.get(number)
            if transfer is None:  # aborted meanwhile
                return None
            transfer.chunk_arrived(buffer, size)
            transfer.filled[buffer] += size
            return self._count(transfer, size)

    def stripe(self, ordinal: int, index: int, count: int, size: int) -> list[memoryview] | None:
        """The memory for bytes from a payload connection; the caller fills it and calls `stripe_placed`. None to drop.

        Args:
            ordinal: ordinal number of the announcement. If it has not arrived yet, this waits for it, until
                `end_announcements`.
            index: number of the stripe.
            count: number of payload connections.

        Raises:
            ProtocolViolation: the bytes do not belong to that stripe.
        """
        with self._changed:
            while self._num_announced < ordinal and not self._has_ended:
                self._changed.wait()
            transfer = self._by_ordinal.get(ordinal)
            try:
                return None if transfer is None else transfer.of_stripe(index, count, size) or None
            except MemoryError as exc:
                assert transfer is not None
                self._fail(transfer, exc)
                return None

    def stripe_placed(self, ordinal: int, index: int, size: int) -> Delivery | None:
        """Records that bytes of `stripe` were received or dropped; returns the message if they were the last ones."""
        with self._changed:
            transfer = self._by_ordinal.get(ordinal)
            if transfer is None:
                return None
            transfer.piece_arrived(index)
            return self._count(transfer, size)

    def _count(self, transfer: _IncomingTransfer, size: int) -> Delivery | None:
        """Counts bytes that have arrived; returns the message if they were the last ones."""
        transfer.missing -= size
        if transfer.is_counted:
            self.announced.subtract(size)
        if transfer.missing:
            return None
        self._forget(transfer)
        return self._deliver(transfer)

    def _fail(self, transfer: _IncomingTransfer, exc: MemoryError) -> None:
        with self._changed:
            transfer.fail(str(exc))
            was_aborted = self._transfers.get(transfer.message.transfer) is not transfer
            if transfer.is_counted and not was_aborted:
                transfer.is_counted = False
                self.announced.subtract(transfer.missing)

    def _forget(self, transfer: _IncomingTransfer) -> None:
        del self._transfers[transfer.message.transfer]
        del self._by_ordinal[transfer.ordinal]
        self.announced.subtract(transfer.own_bytes + (transfer.missing if transfer.is_counted else 0))

    def abort(self, number: int) -> None:
        """Forgets a transfer, whose message will not be delivered."""
        with self._changed:
            if (transfer := self._transfers.get(number)) is not None:
                self._forget(transfer)

    def end_announcements(self) -> None:
        """Records that no further announcement will arrive, which ends the waits for one."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Frees the memory of all transfers: users of an ended session may keep a reference to it for a while."""
        with self._changed:
            for transfer in list(self._transfers.values()):
                self._forget(transfer)
            self.announced = AnnouncedBytes()  # bytes that are still read do not count for the peer
        self.end_announcements()

    def _deliver(self, transfer: _IncomingTransfer) -> Delivery | None:
        try:
            buffers = [transfer.buffer(index) for index in range(len(transfer.buffers))]  # including empty ones
        except MemoryError as exc:  # possible even for an empty buffer
            transfer.fail(str(exc))
            buffers = [transfer.buffer(index) for index in range(len(transfer.buffers))]
        if not transfer.message.wrapped:
            return transfer.message, buffers
        if transfer.failure is not None:  # the message inside is not known
            raise ProtocolViolation(transfer.failure)
        view = buffers[0].view
        data = view.obj if isinstance(view.obj, bytearray) else bytes(view)  # lent memory could change meanwhile
        parsed_bytes = parsed_cost(rpc_pb2.Message, data)
        if (refusal := self.announced.add(parsed_bytes)) is not None:
            raise ProtocolViolation(refusal)
        try:
            inner = rpc_pb2.Message.FromString(data)  # type: ignore[arg-type]  # protobuf's stubs know no bytearray
        except Exception as exc:
            raise ProtocolViolation("a wrapped message cannot be parsed") from exc
        finally:
            self.announced.subtract(parsed_bytes)
        return self._announce(from_protobuf(inner, len(data)), transfer.ordinal)
