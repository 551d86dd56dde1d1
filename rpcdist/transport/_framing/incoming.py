"""Reassembly of large buffers from chunks: pure bookkeeping, no I/O.

Invariants:
    1. A message is delivered once, when every byte of every buffer that it announced has arrived, or was lent.
    2. The chunks of one buffer arrive in order, and none exceeds the announced size; anything else is a violation.
    3. Memory for a buffer is taken when its first bytes arrive, so that an announcement alone costs nothing, and given
       back when its transfer is aborted or the session ends.
    4. What a peer has announced and not sent is bounded, in bytes and in buffers of one message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._framing.frames import Chunk
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import WireMessage

__all__ = ["MAX_BUFFERS", "Delivery", "Incoming", "IncomingBuffer", "heap_buffer"]

MAX_BUFFERS: Final = 1 << 16
"""Large buffers of one message. Senders keep buffers of up to 32 KiB inside the message, so this is 2 GiB or more."""


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


Delivery = tuple[WireMessage, list[IncomingBuffer]]
Borrow = Callable[[WireMessage], Mapping[int, IncomingBuffer]]
"""The buffers of a message that lie in memory which the peer lends, by their index."""


def _nothing_is_lent(message: WireMessage) -> Mapping[int, IncomingBuffer]:
    raise ProtocolViolation("a message refers to lent memory on a channel that cannot lend any")


class _IncomingTransfer:
    """A message whose buffers are arriving; None stands for one of which nothing has come."""

    __slots__ = ("allocate", "buffers", "filled", "message", "missing")

    def __init__(
        self,
        message: WireMessage,
        lent: Mapping[int, IncomingBuffer],
        allocate: Callable[[int], IncomingBuffer],
    ) -> None:
        sizes = message.large
        self.message = message
        self.allocate = allocate
        self.buffers: list[IncomingBuffer | None] = [lent.get(index) for index in range(len(sizes))]
        self.filled = [size if index in lent else 0 for index, size in enumerate(sizes)]
        self.missing = sum(sizes) - sum(self.filled)

    def buffer(self, index: int) -> IncomingBuffer:
        """The memory of a buffer, taken now if it was not before."""
        buffer = self.buffers[index]
        if buffer is None:
            size = self.message.large[index]
            try:
                buffer = self.buffers[index] = self.allocate(size)
            except (MemoryError, RuntimeError, OverflowError) as exc:
                raise ProtocolViolation(f"no memory for {size} announced bytes: {exc}") from exc
        return buffer


class Incoming:
    """The transfers of one session that are under way.

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

    def __repr__(self) -> str:
        return (
            f"<Incoming {len(self._transfers)} transfers, {sum(t.missing for t in self._transfers.values())} B missing>"
        )

    def announce(self, message: WireMessage) -> Delivery | None:
        """Takes a message; returns it with its buffers when nothing is missing.

        Raises:
            ProtocolViolation: the transfer number is in use, more is announced than is taken from this peer, or what is
                said to be lent is not.
        """
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
        transfer = _IncomingTransfer(message, lent, heap_buffer if message.wrapped else self._allocate)
        if not transfer.missing:
            return self._deliver(transfer)
        self._announced.add(transfer.missing)
        self._transfers[number] = transfer
        return None

    def chunk(self, chunk: Chunk) -> Delivery | None:
        """Stores a chunk; returns the message when it was the last one.

        A chunk of an unknown transfer belongs to one that was aborted, and is dropped.
        """
        size = len(chunk.data)
        place = self.place(chunk.transfer, chunk.buffer, chunk.offset, size)
        if place is None:
            return None
        place[:] = chunk.data
        return self.placed(chunk.transfer, chunk.buffer, size)

    def place(self, number: int, buffer: int, offset: int, size: int) -> memoryview | None:
        """Where the bytes of a chunk belong, for who can receive them there; `placed` follows. None: drop them."""
        transfer = self._transfers.get(number)
        if transfer is None:
            return None
        if buffer >= len(transfer.buffers):
            raise ProtocolViolation(f"a chunk for buffer {buffer} of {len(transfer.buffers)}")
        view = transfer.buffer(buffer).view
        at = transfer.filled[buffer]
        if offset != at or at + size > len(view):
            raise ProtocolViolation(
                f"a chunk of {size} bytes at {offset} came, expected at {at} of {len(view)} announced bytes"
            )
        return view[at : at + size]

    def placed(self, number: int, buffer: int, size: int) -> Delivery | None:
        """The bytes of a chunk are where `place` said; returns the message when they were the last ones."""
        transfer = self._transfers.get(number)
        if transfer is None:  # aborted meanwhile
            return None
        transfer.filled[buffer] += size
        transfer.missing -= size
        self._announced.subtract(size)
        if transfer.missing:
            return None
        del self._transfers[number]
        return self._deliver(transfer)

    def abort(self, number: int) -> WireMessage | None:
        """Forgets a transfer; returns its message, which will not be delivered."""
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return None
        self._announced.subtract(transfer.missing)
        return transfer.message

    def close(self) -> None:
        """Gives back the memory of all transfers: a session that has ended may be held for a while by who used it."""
        announced, self._announced = self._announced, AnnouncedBytes()  # what is still read counts for nobody
        announced.subtract(sum(transfer.missing for transfer in self._transfers.values()))
        self._transfers.clear()

    def _deliver(self, transfer: _IncomingTransfer) -> Delivery | None:
        buffers = [transfer.buffer(index) for index in range(len(transfer.buffers))]  # also those of no bytes
        if not transfer.message.wrapped:
            return transfer.message, buffers
        try:
            inner = rpc_pb2.Message.FromString(bytes(buffers[0].view))
        except Exception as exc:
            raise ProtocolViolation("a wrapped message cannot be parsed") from exc
        return self.announce(inner)
