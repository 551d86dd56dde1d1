"""Reassembly of large buffers from chunks: pure bookkeeping, no I/O.

Invariants:
    1. A message is delivered once, when every byte of every buffer that it announced has arrived, or was lent.
    2. The chunks of one buffer arrive in order, and none exceeds the announced size; anything else is a violation.
    3. Memory is taken when a message is announced, and given back when its transfer is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._framing.frames import Chunk

__all__ = ["Delivery", "Incoming", "IncomingBuffer", "heap_buffer"]


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


Delivery = tuple[rpc_pb2.Message, list[IncomingBuffer]]
Borrow = Callable[[rpc_pb2.Message], Mapping[int, IncomingBuffer]]
"""The buffers of a message that lie in memory which the peer lends, by their index."""


def _nothing_is_lent(message: rpc_pb2.Message) -> Mapping[int, IncomingBuffer]:
    raise ProtocolViolation("a message refers to lent memory on a channel that cannot lend any")


class _IncomingTransfer:
    __slots__ = ("buffers", "filled", "message", "missing")

    def __init__(self, message: rpc_pb2.Message, buffers: list[IncomingBuffer], lent: Container[int]) -> None:
        self.message = message
        self.buffers = buffers
        sizes = message.large
        self.filled = [size if index in lent else 0 for index, size in enumerate(sizes)]
        self.missing = sum(sizes) - sum(self.filled)


class Incoming:
    """The transfers of one session that are under way."""

    def __init__(
        self, allocate: Callable[[int], IncomingBuffer] = heap_buffer, borrow: Borrow = _nothing_is_lent
    ) -> None:
        self._allocate = allocate
        self._borrow = borrow
        self._transfers: dict[int, _IncomingTransfer] = {}

    def __repr__(self) -> str:
        return (
            f"<Incoming {len(self._transfers)} transfers, {sum(t.missing for t in self._transfers.values())} B missing>"
        )

    def announce(self, message: rpc_pb2.Message) -> Delivery | None:
        """Takes a message; returns it with its buffers when nothing is missing.

        Raises:
            ProtocolViolation: the transfer number is in use, no memory can be had for what is announced, or what is
                said to be lent is not.
        """
        sizes = message.large
        if not sizes:
            return message, []
        number = message.transfer
        if number in self._transfers or number == 0:
            raise ProtocolViolation(f"transfer {number} was announced twice")
        lent = self._borrow(message) if message.loans else {}
        try:
            # A message that does not fit into an envelope is parsed from plain bytes; only payloads become tensors.
            allocate = heap_buffer if message.wrapped else self._allocate
            buffers = [lent[index] if index in lent else allocate(size) for index, size in enumerate(sizes)]
        except (MemoryError, RuntimeError, OverflowError) as exc:
            raise ProtocolViolation(f"no memory for {sum(sizes)} announced bytes: {exc}") from exc
        transfer = _IncomingTransfer(message, buffers, lent)
        if transfer.missing:
            self._transfers[number] = transfer
            return None
        return self._deliver(transfer)

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
        view = transfer.buffers[buffer].view
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
        if transfer.missing:
            return None
        del self._transfers[number]
        return self._deliver(transfer)

    def abort(self, number: int) -> rpc_pb2.Message | None:
        """Forgets a transfer; returns its message, which will not be delivered."""
        transfer = self._transfers.pop(number, None)
        return transfer.message if transfer is not None else None

    def _deliver(self, transfer: _IncomingTransfer) -> Delivery | None:
        if not transfer.message.wrapped:
            return transfer.message, transfer.buffers
        try:
            inner = rpc_pb2.Message.FromString(bytes(transfer.buffers[0].view))
        except Exception as exc:
            raise ProtocolViolation("a wrapped message cannot be parsed") from exc
        return self.announce(inner)
