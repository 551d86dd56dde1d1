"""What waits to be written on a session: pure bookkeeping, no I/O.

Small messages go first and together; one piece of a large buffer goes between two envelopes, and the transfers take
turns, so neither a no-op nor a second transfer waits behind 64 MiB of somebody else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.transport._frames import MAX_ENVELOPE_BYTES, MAX_FRAME_BYTES, PIECE_BYTES, frame, piece_envelope

__all__ = ["LargeBuffer", "Outgoing"]


class LargeBuffer(Protocol):
    """Memory to be sent; the object keeps it alive."""

    @property
    def view(self) -> memoryview:
        """C-contiguous, one byte per item. It is read while pieces are written, not when the message is queued."""


class _Transfer:
    """The buffers of one message. `then` starts when all of this is written."""

    __slots__ = ("at", "buffers", "index", "number", "then")

    def __init__(self, number: int, buffers: list[memoryview], then: _Transfer | None = None) -> None:
        self.number = number
        self.buffers = buffers
        self.index = 0
        self.at = 0
        self.then = then

    def next_piece(self) -> bytes:
        view = self.buffers[self.index]
        end = min(self.at + PIECE_BYTES, len(view))
        data = piece_envelope(self.number, self.index, self.at, view[self.at : end])
        self.at = end
        if end == len(view):
            self._skip_to_next()
        return data

    def _skip_to_next(self) -> None:
        self.index += 1
        self.at = 0

    @property
    def finished(self) -> bool:
        while self.index < len(self.buffers) and not len(self.buffers[self.index]):
            self._skip_to_next()  # an empty buffer has no pieces
        return self.index == len(self.buffers)


class Outgoing:
    """The queue of one session. `add` may be called on any thread, the rest on the writer's."""

    def __init__(self) -> None:
        self._frames: deque[tuple[bytes, _Transfer | None]] = deque()
        self._transfers: deque[_Transfer] = deque()
        self._piece_is_due = False
        self._numbers = itertools.count(1)
        self._aborted: set[int] = set()

    def __repr__(self) -> str:
        return f"<Outgoing {len(self._frames)} messages, {len(self._transfers)} transfers>"

    def __bool__(self) -> bool:
        return bool(self._frames or self._transfers)

    def add(self, message: rpc_pb2.Message, buffers: Sequence[LargeBuffer] = (), number: int = 0) -> None:
        """Queues a message with its large buffers; `number` is the transfer's, from `next_number`."""
        transfer = None
        if buffers:
            message.transfer = number
            views = [buffer.view for buffer in buffers]
            message.large.extend(map(len, views))
            transfer = _Transfer(number, views)
        data = frame(message)
        if len(data) > MAX_FRAME_BYTES:
            data, transfer = self._wrap(message, number or self.next_number(), transfer)
        self._frames.append((data, transfer))

    def _wrap(self, message: rpc_pb2.Message, number: int, inner: _Transfer | None) -> tuple[bytes, _Transfer]:
        body = memoryview(message.SerializeToString())
        # The same number is free again when the inner message is announced.
        return frame(rpc_pb2.Message(transfer=number, large=[len(body)], wrapped=True)), _Transfer(
            number, [body], inner
        )

    def next_number(self) -> int:
        """A transfer number that this session has not used; any thread may ask."""
        return next(self._numbers)

    def abort(self, number: int) -> bool:
        """Stops a transfer; returns whether the peer must be told (its announcement may be on the way)."""
        for transfer in self._transfers:
            if transfer.number == number:
                self._transfers.remove(transfer)
                return True
        for _, queued in self._frames:
            if queued is not None and queued.number == number:
                self._aborted.add(number)
                return True
        return False

    def next_envelope(self) -> bytes | None:
        """The bytes to write next; None when nothing waits."""
        if self._frames and not (self._piece_is_due and self._transfers):
            self._piece_is_due = True
            return self._batch()
        self._piece_is_due = False
        if not self._transfers:
            return None
        transfer = self._transfers.popleft()
        data = transfer.next_piece()
        self._schedule(transfer)
        return data

    def _batch(self) -> bytes:
        frames = self._frames
        data, transfer = frames.popleft()
        self._schedule(transfer)
        if not frames:
            return data
        parts = [data]
        size = len(data)
        while frames and size < MAX_ENVELOPE_BYTES:
            data, transfer = frames.popleft()
            parts.append(data)
            size += len(data)
            self._schedule(transfer)
        return b"".join(parts)

    def _schedule(self, transfer: _Transfer | None) -> None:
        while transfer is not None and transfer.finished:
            transfer = transfer.then
        if transfer is None:
            return
        if transfer.number in self._aborted:
            self._aborted.discard(transfer.number)
            return
        self._transfers.append(transfer)
