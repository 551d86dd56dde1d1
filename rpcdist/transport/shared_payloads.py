"""The shared memory of a session: the buffers of messages that are in it, and the news about segments for the peer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Final

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.time_limits import CONTROL_DELAY_S, SEGMENTS_TRIM_S
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._framing.incoming import IncomingBuffer
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.common_buffers import CommonBuffers, CommonPack
from rpcdist.transport.lending import Borrower, Lender, Pack, offsets, packs
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.shared_memory import unavailable
from rpcdist.transport.wire_messages import Loan, WireMessage, set_large, stream_of

_NOTHING: Final = LargeBuffer(memoryview(b""))
"""Takes the place of a lent buffer in a message's list of buffers: no chunk of it follows."""


@dataclass(eq=False, repr=False)
class SharedPayloads:
    """The large buffers of one session in shared memory, in both directions, on top of `Lender` and `Borrower`.

    `lend`, `take_back`, `is_news_due` and `usage` may be used on any thread; `handle`, `returned` and `borrow` on the
    thread that reads, one at a time; the other methods on the loop.

    Attributes:
        is_used: whether there ever was a large buffer or a segment; before that there is no news.
        num_lent, num_borrowed: the bytes of buffers sent and received through shared memory.
        returned, take_back: see `Lender`.

    Args:
        allowed: whether this process wants to share memory; if not, it refuses the peer's memory.
        counted: counts the bytes that the peer makes this process reserve.
        answers: counts the memory that this process lends for answers; None if it lends for calls.
        channel: receives the descriptors of the peer's segments.
        outgoing: the session's queue; a message follows the offers of its new segments.
        receive: makes a received buffer on memory that the peer lends.
    """

    allowed: InitVar[bool]
    counted: InitVar[AnnouncedBytes]
    answers: InitVar[AnnouncedBytes | None]
    _loop: asyncio.AbstractEventLoop
    _channel: SocketChannel
    _outgoing: Outgoing
    _send: Callable[[rpc_pb2.Message], object]
    _flush: Callable[[], object]
    _receive: Callable[[memoryview], IncomingBuffer]
    is_used: bool = False
    num_lent: int = 0
    num_borrowed: int = 0
    _return_handle: asyncio.TimerHandle | None = None
    _is_return_due: bool = False  # a timer runs, or starts soon
    _is_closed: bool = False

    def __post_init__(self, allowed: bool, counted: AnnouncedBytes, answers: AnnouncedBytes | None) -> None:
        self._allowed = allowed and unavailable() is None
        self._lender = Lender(account=answers)
        self.returned = self._lender.returned
        self.take_back = self._lender.take_back
        self._borrower = Borrower(counted)
        self._trim_due = time.monotonic() + SEGMENTS_TRIM_S

    @property
    def usage(self) -> tuple[int, int, int]:
        """The number of segments that this process lends, the number that the peer uses, and the bytes of all."""
        return self._lender.usage

    @property
    def is_news_due(self) -> bool:
        """Whether the next message should bring news about segments; other news waits for a timer."""
        return bool(self._lender.withdrawn) or (bool(self._borrower.ended) and self._borrower.is_return_due)

    def lend(self, message: WireMessage, buffers: Sequence[LargeBuffer]) -> Sequence[LargeBuffer]:
        """Moves buffers of a message into shared memory; returns the buffers that the socket must carry.

        It also queues news for the peer, which travels in the same envelope, without a wake-up of its own.
        """
        self.is_used = True
        if buffers:
            total = _size_of(buffers)
            buffers = self._put_in(message, buffers)
            self.num_lent += total - _size_of(buffers)
        if self.is_news_due:
            self._queue_news()
        return buffers

    def _put_in(self, message: WireMessage, buffers: Sequence[LargeBuffer]) -> Sequence[LargeBuffer]:
        """Copies buffers of a message, which is sent next, into segments, and names the segments in the message.

        Returns:
            The same number of buffers; lent ones have no bytes.
        """
        if not self._allowed or _would_block(buffers):
            return buffers
        left = list(buffers)
        loans = []
        # The parts of a stream keep their order, so the bytes of each must be there when it is announced: bytes of a
        # refused segment would arrive later.
        uses_new = not stream_of(message)
        may_make = self._lender.may_make
        commons = buffers.packs if isinstance(buffers, CommonBuffers) and uses_new and may_make else {}
        for pack in packs(buffers):
            common = commons.get(pack[0][0])
            number = None if common is None else self._lend_common(pack, common)
            if number is None:
                number = self._lender.lend(pack)
            if number is None and may_make:
                made = self._offer(pack)
                if made is not None and uses_new:
                    number = self._lender.lend(pack, made)
            if number is not None:
                for index, _ in pack:
                    loans.append(Loan(index, number))
                    left[index] = _NOTHING
        if loans:
            loans.sort()
            set_large(message, [buffer.size for buffer in buffers], loans)
        return left

    def _lend_common(self, pack: Pack, common: CommonPack) -> int | None:
        """Lends memory that was filled for other peers, too; None if that is not possible now."""
        memory = common.filled()
        if memory is None:
            return None
        if number := self._lender.lend_common_again(memory.mapped, common.keep):
            return number
        if (number := self._lender.offer_common(memory.mapped, common.keep)) is None:
            return None
        self._queue_news()
        pb = rpc_pb2.SegmentOffer(segment=number, size=memory.segment.size_bytes, is_common=True)
        self._outgoing.add_offer(rpc_pb2.Message(segment_offer=pb), memory.segment)
        return number if self._lender.lend_common(number, pack) else None

    def _offer(self, pack: Pack) -> int | None:
        """Offers the peer a new segment for these buffers; returns its number, or None if no more are allowed."""
        _, num_bytes = offsets(buffer.size for _, buffer in pack)
        made = self._lender.offer(num_bytes)
        if made is None:
            return None
        number, segment = made
        self._queue_news()  # withdrawals that made room for this segment, before the peer counts it
        pb = rpc_pb2.SegmentOffer(segment=number, size=segment.size_bytes)
        self._outgoing.add_offer(rpc_pb2.Message(segment_offer=pb), segment)
        return number

    def handle(self, kind: str, message: rpc_pb2.Message) -> None:
        """Handles a message about segments; `kind` is its field in `body`."""
        self.is_used = True
        if kind == "segment_news":
            news = message.segment_news
            self._lender.kept(news.kept)
            self._borrower.withdrawn(news.withdrawn)
            for loan in news.unread:  # refused before it was read, so the socket carries its buffers
                self._outgoing.add_transfer(loan.transfer, self._lender.unread(loan.segment))
                self._flush()
        elif kind == "segment_answer":
            self._lender.answered(message.segment_answer.segment, message.segment_answer.accepted)
        elif kind == "segment_offer":
            self._send(self._answer_to(message.segment_offer))

    def _answer_to(self, offer: rpc_pb2.SegmentOffer) -> rpc_pb2.Message:
        """Maps memory that the peer offers, or refuses it for lack of a free descriptor; returns the answer."""
        descriptor = self._channel.take_descriptor()
        if descriptor is not None and self._allowed:
            accepted = self._borrower.offered(offer.segment, offer.size, descriptor, offer.is_common)
        else:
            accepted = self._borrower.refuse(offer.segment)
            if descriptor is not None:
                os.close(descriptor)
        return rpc_pb2.Message(segment_answer=rpc_pb2.SegmentAnswer(segment=offer.segment, accepted=accepted))

    def borrow(self, message: WireMessage) -> dict[int, IncomingBuffer]:
        """The buffers of a message that are in the peer's memory, by their index."""
        borrowed, unread = self._take_out(message)
        self.num_borrowed += sum(view.nbytes for view in borrowed.values())
        if unread:
            loans = [rpc_pb2.UnreadLoan(transfer=message.transfer, segment=segment) for segment in unread]
            self._send(rpc_pb2.Message(segment_news=rpc_pb2.SegmentNews(unread=loans)))
        if not self._is_return_due:
            self._is_return_due = True
            self._loop.call_soon_threadsafe(self._schedule_return)
        return {index: self._receive(view) for index, view in borrowed.items()}

    def _take_out(self, message: WireMessage) -> tuple[dict[int, memoryview], list[int]]:
        """The buffers of a message that are in segments of the peer.

        Returns:
            The buffers by their index, and the segments that this side has refused, whose bytes the peer must send.

        Raises:
            ProtocolViolation: a segment is not known, too small, or still used by an earlier message.
        """
        sizes = message.large
        indices: dict[int, list[int]] = {}  # indices of the buffers in each segment
        last = -1
        for buffer, segment in sorted((loan.buffer, loan.segment) for loan in message.loans):
            if buffer >= len(sizes) or buffer == last:
                raise ProtocolViolation(f"a message lends buffer {buffer} of {len(sizes)}, or lends it twice")
            last = buffer
            indices.setdefault(segment, []).append(buffer)
        views: dict[int, memoryview] = {}
        unread = []
        for segment, lent in indices.items():
            if segment in self._borrower.refused:
                unread.append(segment)
                continue
            starts, num_bytes = offsets(sizes[index] for index in lent)
            view = self._borrower.borrow(segment, num_bytes)
            for start, index in zip(starts, lent, strict=True):
                views[index] = view[start : start + sizes[index]]
        return views, unread

    def _schedule_return(self) -> None:
        if not self._is_closed:
            self._return_handle = self._loop.call_later(CONTROL_DELAY_S, self._return)

    def _return(self) -> None:
        """Reports ended leases that no message has reported in time."""
        # Cleared before the leases are read: a message that borrows meanwhile schedules the next return.
        self._is_return_due = False
        self._send_news()
        if self._borrower.has_leases and not self._is_return_due:
            self._is_return_due = True
            self._schedule_return()

    def trim(self, now: float) -> None:
        """Frees memory that was not needed for a while; the session calls it with each heartbeat."""
        if now >= self._trim_due:
            self._trim_due = now + SEGMENTS_TRIM_S
            self._lender.trim()
            self._send_news()

    def _send_news(self) -> None:
        if self._borrower.ended or self._lender.withdrawn:
            self._queue_news()
            self._flush()

    def _queue_news(self) -> None:
        """Queues the news about segments that the peer has not got yet."""
        returned, kept = self._borrower.take_ended()
        if returned:  # frequent, with most large messages, so it has a compact frame
            self._outgoing.add_returned(returned)
        if kept or self._lender.withdrawn:
            news = rpc_pb2.SegmentNews(kept=kept, withdrawn=self._lender.take_withdrawn())
            self._outgoing.add(rpc_pb2.Message(segment_news=news))

    def close(self) -> None:
        """Drops all memory, since the session has ended; tensors in the peer's memory keep it alive."""
        self._is_closed = True
        if self._return_handle is not None:
            self._return_handle.cancel()
        self._lender.close()
        self._borrower.close()


def _would_block(buffers: Sequence[LargeBuffer]) -> bool:
    """Whether an event loop would wait for copies of a device. It writes such buffers in chunks when they are there."""
    if asyncio._get_running_loop() is None:
        return False
    return any([buffer.may_wait and not buffer.is_ready(buffer.size) for buffer in buffers])


def _size_of(buffers: Sequence[LargeBuffer]) -> int:
    return sum(buffer.size for buffer in buffers)
