"""The queue of messages to write on a session. Bookkeeping only, no I/O.

Small messages are sent first and together. One chunk of a large buffer follows each envelope, and the transfers take
turns, so neither a small message nor a second transfer waits behind the 64 MiB of another.

Messages may therefore overtake one another. Only the parts of one stream keep their order: an item, or the end, is held
back until the last byte of the previous item is written.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rpcdist._proto import rpc_pb2
from rpcdist.transport._framing.frames import (
    CHUNK_BYTES,
    CHUNK_WINDOW_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_FUNCTIONS,
    call_frame,
    chunk_head,
    frame,
    pass_frame,
    reply_frame,
    returned_frame,
    want_value,
    wrapped,
)
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.shared_memory import Segment
from rpcdist.transport.striping import Striping
from rpcdist.transport.wire_messages import (
    UNCOUNTED_BYTES,
    CallMessage,
    CompactPass,
    ReplyMessage,
    WireMessage,
    set_large,
    stream_of,
)

Parts = tuple[bytes, memoryview | None]
"""An envelope: all of its bytes, or its first bytes and a view of the sender's own memory with the rest."""


@dataclass(slots=True, eq=False)
class _OutgoingTransfer:
    """The buffers of one message, which may belong to a stream (0: none). `then` starts when they are written.

    `loans` are the segments that a wrapped message names; the peer can read the names only when all of it has arrived.
    `owed_bytes` is its part of the peer's account, without the part of the transfer that follows.
    """

    number: int
    stream: int
    buffers: Sequence[LargeBuffer]
    sizes: Sequence[int]
    then: _OutgoingTransfer | None = None
    loans: Sequence[int] = ()
    owed_bytes: int = 0
    index: int = 0
    at: int = 0

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes sent and the total, including the transfer that follows."""
        sent, size = sum(self.sizes[: self.index]) + self.at, sum(self.sizes)
        return (sent, size) if self.then is None else (sent, size + self.then.progress[1])

    def next_chunk(self) -> Parts:
        size = self.sizes[self.index]
        start, end = self.at, min(self.at + CHUNK_BYTES, size)
        chunk = self.buffers[self.index].part(start, end)
        head = chunk_head(self.number, self.index, start, end - start)
        self.at = end
        if end == size:
            self._skip_to_next()
        return head, chunk

    @property
    def is_ready(self) -> bool:
        """Whether the next chunk can be read without waiting."""
        return self.buffers[self.index].is_ready(min(self.at + CHUNK_BYTES, self.sizes[self.index]))

    def _skip_to_next(self) -> None:
        self.index += 1
        self.at = 0

    @property
    def finished(self) -> bool:
        while self.index < len(self.sizes) and not self.sizes[self.index]:
            self._skip_to_next()  # empty buffers have no chunks
        return self.index == len(self.sizes)


_Entry = tuple[bytes | bytearray, "_OutgoingTransfer | Segment | None", int, int]
"""A frame, its buffers or the segment that it offers, its stream (0 for none), and its part of the peer's account."""

NUM_UNCOUNTED: Final = 32  # frames in the queue: see `UNCOUNTED_BYTES`

_NO_BUFFER: Final = LargeBuffer(memoryview(b""))


class Outgoing:
    """The queue of one session. Any thread may use it; envelopes leave in the order of `next_parts`.

    Attributes:
        striper: may take the buffers of a message; None if the session has only one connection.
        is_overdrawn: whether the session must end, because too many small messages wait for the peer.

    Args:
        account: counts the bytes that wait here until the peer reads them; None if the peer has not asked for them.
    """

    def __init__(self, account: AnnouncedBytes | None = None) -> None:
        self._account = account
        self._owed_bytes = self._owed_small_bytes = 0  # in buffers, and in frames
        self._owing = threading.Lock()  # protects these three
        self.is_overdrawn = False
        self._frames: deque[_Entry] = deque()
        self._transfers: deque[_OutgoingTransfer] = deque()
        self._held: dict[int, deque[_Entry]] = {}  # entries held back, by stream with an unfinished transfer
        self._chunk_is_due = False
        self._waits = False
        self._credit_bytes = CHUNK_WINDOW_BYTES
        self._numbers = itertools.count(1)
        self._functions: dict[str, int] = {}  # numbers by name; the first call with a number also has the name
        self._naming = threading.Lock()
        self._aborted: set[int] = set()
        self.striper: Striping | None = None
        self._num_announced = 0  # messages with large buffers; the peer counts them too
        self._lock = threading.Lock()  # protects everything except appending to `_frames`, which is atomic

    def __repr__(self) -> str:
        num_messages = len(self._frames) + sum(map(len, self._held.values()))
        return f"<Outgoing {num_messages} messages, {len(self._transfers)} transfers>"

    def __bool__(self) -> bool:
        """Whether something can be written now; held entries wait for a transfer."""
        return bool(self._frames or (self._transfers and self._credit_bytes > 0))

    @property
    def waits(self) -> bool:
        """Whether something is left, but nothing could be written now: devices have not copied it yet."""
        return self._waits and not self._frames

    @property
    def num_frames(self) -> int:
        """The number of messages in the queue."""
        return len(self._frames)

    @property
    def num_transfers(self) -> int:
        """The number of messages whose large buffers are being written."""
        return len(self._transfers)

    def add_quickly(self, message: WireMessage) -> bool:
        """`add` in a single step, which no signal can interrupt, for most compact messages without buffers.

        Returns False if the message needs more steps, or may be changed later (`want_value`).
        """
        if type(message) is ReplyMessage:
            if len(self._frames) >= NUM_UNCOUNTED or not message.is_small:
                return False
            self._frames.append((reply_frame(message), None, 0, 0))
            return True
        if type(message) is CompactPass:
            if len(self._frames) >= NUM_UNCOUNTED or len(message.body) > UNCOUNTED_BYTES:
                return False
            self._frames.append((pass_frame(message), None, 0, 0))
            return True
        if type(message) is CallMessage and message.result is None and message.is_compact:
            number = self._functions.get(message.function)
            if number is not None:
                self._frames.append((call_frame(message, number), None, 0, 0))
                return True
        return False

    def _owe(self, num_bytes: int, is_small: bool = False) -> int:
        """Adds bytes to the peer's account, or removes them if negative; returns the number that counts."""
        if self._account is None or not num_bytes:
            return 0
        with self._owing:
            account = self._account
            if account is None:
                return 0
            if is_small:
                self._owed_small_bytes += num_bytes
            else:
                self._owed_bytes += num_bytes
            if not account.owe(num_bytes, is_small):
                self.is_overdrawn = True
        return num_bytes

    def _pay_all(self, transfer: _OutgoingTransfer | None) -> None:
        """Removes a finished transfer, and those that would follow it, from the account."""
        while transfer is not None:
            owed, transfer.owed_bytes = transfer.owed_bytes, 0
            self._owe(-owed)
            transfer = transfer.then

    def paid(self, owed_bytes: int) -> None:
        """Records that the payload connections have written or dropped a transfer, with its part of the account."""
        self._owe(-owed_bytes)

    def close(self) -> None:
        """Removes the waiting bytes from the account, since the session has ended."""
        with self._owing:
            account, self._account = self._account, None
            if account is not None:
                account.owe(-self._owed_bytes, is_small=False)
                account.owe(-self._owed_small_bytes)

    @property
    def is_empty(self) -> bool:
        return not (self._frames or self._transfers or (self.striper is not None and self.striper.is_busy))

    def grant(self, num_bytes: int) -> bool:
        """Records that the peer has read `num_bytes` of envelopes with chunks; True if a transfer waited for that."""
        with self._lock:
            had_none = self._credit_bytes <= 0
            self._credit_bytes += num_bytes
            return had_none and bool(self._transfers)

    def add(self, message: WireMessage, buffers: Sequence[LargeBuffer] = ()) -> int:
        """Queues a message with its large buffers; returns the number of its transfer, 0 if it needs none."""
        stream = stream_of(message)
        number = 0
        transfer = None
        if buffers:
            message.transfer = number = next(self._numbers)
            sizes = [buffer.size for buffer in buffers]
            if not message.large:  # otherwise some buffers were lent and are empty here
                set_large(message, sizes)
            transfer = _OutgoingTransfer(number, stream, buffers, sizes, owed_bytes=self._owe(sum(sizes)))
        if isinstance(message, CallMessage) and message.is_compact:
            self._add_call(message, transfer)
            return number
        data = frame(message)
        if len(data) > MAX_FRAME_BYTES:
            number = number or next(self._numbers)
            data, body = wrapped(data, number)
            size = body.nbytes
            # The inner message may use the same number, which is free again when it is announced.
            loans = [loan.segment for loan in message.loans]
            buffers = [LargeBuffer(body)]
            transfer = _OutgoingTransfer(number, stream, buffers, [size], transfer, loans, self._owe(size))
        counts = len(self._frames) >= NUM_UNCOUNTED or len(data) > UNCOUNTED_BYTES
        self._frames.append((data, transfer, stream, self._owe(len(data), is_small=True) if counts else 0))
        return number

    def _add_call(self, call: CallMessage, transfer: _OutgoingTransfer | None) -> None:
        function = call.function
        number = self._functions.get(function)
        if number is not None or not function:
            self._frames.append((call_frame(call, number or 0), transfer, 0, 0))
            return
        name = function.encode()
        with self._naming:
            number = self._functions.get(function)
            if number is not None:
                self._frames.append((call_frame(call, number), transfer, 0, 0))
            elif len(self._functions) == MAX_FUNCTIONS:
                self._frames.append((call_frame(call, 0, name), transfer, 0, 0))
            else:
                number = len(self._functions) + 1
                self._frames.append((call_frame(call, number, name), transfer, 0, 0))
                self._functions[function] = number  # last: a thread that finds it queues its frame behind this one

    def want_value(self, call: int) -> bool:
        """Makes the reply to a `remote()` include the result, if its message is the last in the queue.

        Args:
            call: its number; it was the last message that this thread sent here.

        Returns:
            Whether the reply will include it.
        """
        with self._lock:  # so that the writer does not take the message meanwhile
            try:
                data = self._frames[-1][0]
            except IndexError:
                return False
            return isinstance(data, bytearray) and want_value(data, call)

    def add_returned(self, segments: Sequence[int]) -> None:
        """Queues the numbers of the peer's segments that are free again."""
        self._frames.append((returned_frame(segments), None, 0, 0))

    def add_offer(self, message: rpc_pb2.Message, segment: Segment) -> None:
        """Queues a message with a descriptor. Messages that are queued later are written after it."""
        self._frames.append((frame(message), segment, 0, 0))

    def add_transfer(self, number: int, buffers: Mapping[int, LargeBuffer]) -> None:
        """Queues buffers, by index, of a message that was sent without them."""
        with self._lock:
            present = [buffers.get(index, _NO_BUFFER) for index in range(max(buffers) + 1)]
            sizes = [buffer.size for buffer in present]
            self._schedule(_OutgoingTransfer(number, 0, present, sizes, owed_bytes=self._owe(sum(sizes))))

    def next_offer(self) -> tuple[bytes, Segment] | None:
        """The bytes and the segment of an offer, if an offer is next in the queue; otherwise None.

        Only the writer of a channel that passes descriptors calls this; `next_parts` stops before an offer.
        """
        with self._lock:
            if self._frames and isinstance(self._frames[0][1], Segment):
                data, segment, *_ = self._frames.popleft()
                assert isinstance(segment, Segment)
                return bytes(data), segment
            return None

    def abort(self, number: int) -> Sequence[int] | None:
        """Stops a transfer.

        Returns:
            None if there is nothing to stop. Otherwise the caller must notify the peer, since the announcement may be
            on its way; the numbers are those of lent segments that the peer will never read, each reported once.
        """
        with self._lock:
            transfer = self._abort(number)
            if transfer is None:
                return () if self.striper is not None and self.striper.abort(number) else None
            loans, transfer.loans = transfer.loans, ()
            return loans

    def progress(self, number: int) -> tuple[int, int] | None:
        """The bytes of a transfer that were sent, and the total; None if none are left to send, or it uses stripes."""
        with self._lock:
            waiting = (entry[1] for entry in list(self._frames))
            for transfer in (*self._transfers, *waiting):
                if isinstance(transfer, _OutgoingTransfer) and transfer.number == number:
                    return transfer.progress
            return None

    def _abort(self, number: int) -> _OutgoingTransfer | None:
        for transfer in self._transfers:
            if transfer.number == number:
                self._transfers.remove(transfer)
                self._pay_all(transfer)
                self._release(transfer.stream)
                return transfer
        for _, queued, *_ in itertools.chain(list(self._frames), *self._held.values()):  # a copy: threads append
            if isinstance(queued, _OutgoingTransfer) and queued.number == number:
                self._aborted.add(number)
                return queued
        return None

    def next_envelope(self) -> bytes | None:
        """The bytes to write next; None if nothing can be written. This makes the sender's only copy of a payload."""
        parts = self.next_parts()
        if parts is None:
            return None
        head, payload = parts
        return head if payload is None else b"".join((head, payload))

    def next_parts(self) -> Parts | None:
        """Like `next_envelope`, without the copy, for a channel that writes from two places at once."""
        with self._lock:
            may_send_chunk = self._transfers and self._credit_bytes > 0
            if self._frames and not (self._chunk_is_due and may_send_chunk):
                self._chunk_is_due = True
                envelope = self._batch()
                if envelope:
                    return envelope, None
            self._chunk_is_due = False
            if not self._transfers or self._credit_bytes <= 0:
                return None
            transfer = self._transfers.popleft()
            self._waits = False
            if transfer.buffers[transfer.index].may_wait and not transfer.is_ready:
                self._transfers.append(transfer)
                ready = next((each for each in self._transfers if each.is_ready), None)
                if ready is None:
                    self._waits = True
                    return None
                self._transfers.remove(ready)
                transfer = ready
            head, payload = transfer.next_chunk()
            self._credit_bytes -= len(head) + (len(payload) if payload is not None else 0)
            self._schedule(transfer)
            return head, payload

    def _batch(self) -> bytes:
        """Joins as many queued messages as fit; empty if they are held back, or an offer is next."""
        frames = self._frames
        parts: list[bytes | bytearray] = []
        size = num_paid = 0
        while frames and size < MAX_ENVELOPE_BYTES and len(parts) < MAX_FRAMES:
            data, transfer, stream, owed = entry = frames.popleft()
            if isinstance(transfer, Segment):
                frames.appendleft(entry)
                break
            if stream and stream in self._held:
                self._held[stream].append(entry)
                continue
            parts.append(data)
            size += len(data)
            num_paid += owed
            if transfer is not None:
                self._num_announced += 1
                if not self._stripe(transfer):
                    self._schedule(transfer)
        if num_paid:
            self._owe(-num_paid, is_small=True)
        return b"".join(parts)

    def _stripe(self, transfer: _OutgoingTransfer) -> bool:
        """Whether the payload connections take it. Parts of a stream stay on one connection, to keep their order."""
        striper, number, owed = self.striper, transfer.number, transfer.owed_bytes
        if striper is None or transfer.stream or transfer.then or transfer.loans or number in self._aborted:
            return False
        return striper.take(number, self._num_announced, transfer.buffers, transfer.sizes, owed)

    def _schedule(self, transfer: _OutgoingTransfer) -> None:
        """Gives a transfer its next turn; if it is finished, releases the entries that it held back."""
        rest: _OutgoingTransfer | None = transfer
        while rest is not None and rest.finished:
            self._owe(-rest.owed_bytes)
            rest = rest.then
        if rest is None or rest.number in self._aborted:
            self._pay_all(rest)
            self._aborted.discard(transfer.number)
            self._release(transfer.stream)
            return
        self._transfers.append(rest)
        if rest.stream:
            self._held.setdefault(rest.stream, deque())

    def _release(self, stream: int) -> None:
        held = self._held.pop(stream, None)
        if held:
            self._frames.extendleft(reversed(held))
