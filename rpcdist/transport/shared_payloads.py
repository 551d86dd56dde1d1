"""When a session lends memory, asks for it back and gives it back; what it lends is the business of `LentBuffers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from rpcdist._proto import rpc_pb2
from rpcdist.time_limits import SEGMENTS_RETURN_S, SEGMENTS_TRIM_S
from rpcdist.transport._channels.channel import DirectChannel
from rpcdist.transport._framing.incoming import IncomingBuffer
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.lent_buffers import LentBuffers
from rpcdist.transport.outgoing_buffer import OutgoingBuffer
from rpcdist.transport.wire_messages import WireMessage


class SharedPayloads:
    """The shared memory of one session on a channel that can pass segments.

    `lend` may be called on any thread; `handle` and `borrow` by whoever reads, one thread at a time; the rest on the
    loop.

    Attributes:
        lent: what is lent, in both directions.
        is_used: whether there ever was a large buffer or a segment; before that there is nothing to tell the peer.
        num_lent, num_borrowed: the bytes of buffers that went through shared memory, to the peer and from it.

    Args:
        allowed: whether this process wants to share memory.
        counted: what the peer makes this process set aside.
        loop: the I/O loop, for timers.
        channel: brings the descriptors of the peer's segments.
        outgoing: the session's queue.
        send: sends a message of its own accord.
        flush: has written what is queued.
        receive: makes a received buffer of memory that the peer lends.
    """

    def __init__(
        self,
        allowed: bool,
        counted: AnnouncedBytes,
        loop: asyncio.AbstractEventLoop,
        channel: DirectChannel,
        outgoing: Outgoing,
        send: Callable[[rpc_pb2.Message], object],
        flush: Callable[[], object],
        receive: Callable[[memoryview], IncomingBuffer],
    ) -> None:
        self.lent = LentBuffers(allowed, counted)
        self.is_used = False
        self.num_lent = self.num_borrowed = 0
        self._loop = loop
        self._channel = channel
        self._outgoing = outgoing
        self._send = send
        self._flush = flush
        self._receive = receive
        self._trim_due = time.monotonic() + SEGMENTS_TRIM_S
        self._return_handle: asyncio.TimerHandle | None = None
        self._is_return_due = False  # a timer runs, or will soon
        self._is_closed = False

    def __repr__(self) -> str:
        return repr(self.lent)

    def lend(self, message: WireMessage, buffers: Sequence[OutgoingBuffer]) -> Sequence[OutgoingBuffer]:
        """Moves buffers of a message into shared memory; returns what the socket has to carry instead.

        News for the peer go along: they travel in the same envelope, and cost no wake-up of their own.
        """
        self.is_used = True
        if buffers:
            total = _size_of(buffers)
            buffers = self.lent.put_in(message, buffers, self._outgoing)
            self.num_lent += total - _size_of(buffers)
        if self.lent.is_news_due:
            self.lent.tell(self._outgoing)
        return buffers

    def handle(self, kind: str, message: rpc_pb2.Message) -> None:
        """Takes a message about segments; `kind` is its field in `body`."""
        self.is_used = True
        if kind == "segment_news":
            self.lent.take_news(message.segment_news)
            for loan in message.segment_news.unread:
                self._outgoing.add_transfer(loan.transfer, self.lent.unread(loan.segment))
                self._flush()
        elif kind == "segment_answer":
            self.lent.answered(message.segment_answer)
        elif kind == "segment_offer":
            self._send(self.lent.answer_to(message.segment_offer, self._channel.take_descriptor()))

    def borrow(self, message: WireMessage) -> dict[int, IncomingBuffer]:
        """The buffers of a message that lie in the peer's memory, by their index."""
        borrowed, unread = self.lent.take_out(message)
        self.num_borrowed += sum(view.nbytes for view in borrowed.values())
        if unread:
            loans = [rpc_pb2.UnreadLoan(transfer=message.transfer, segment=segment) for segment in unread]
            self._send(rpc_pb2.Message(segment_news=rpc_pb2.SegmentNews(unread=loans)))
        if not self._is_return_due:
            self._is_return_due = True
            self._loop.call_soon_threadsafe(self._schedule_return)
        return {index: self._receive(view) for index, view in borrowed.items()}

    def _schedule_return(self) -> None:
        if not self._is_closed:
            self._return_handle = self._loop.call_later(SEGMENTS_RETURN_S, self._return)

    def _return(self) -> None:
        """Returns segments that no message has taken back in time."""
        # Cleared before the look at the leases: a message that borrows meanwhile schedules the next return.
        self._is_return_due = False
        self._tell_news()
        if self.lent.has_leases and not self._is_return_due:
            self._is_return_due = True
            self._schedule_return()

    def trim(self, now: float) -> None:
        """Gives memory back that was not needed for a while; the session calls it with each heartbeat."""
        if now >= self._trim_due:
            self._trim_due = now + SEGMENTS_TRIM_S
            self.lent.trim()
            self._tell_news()

    def _tell_news(self) -> None:
        if self.lent.has_news:
            self.lent.tell(self._outgoing)
            self._flush()

    def close(self) -> None:
        """The session has ended; tensors that lie in the peer's memory keep it."""
        self._is_closed = True
        if self._return_handle is not None:
            self._return_handle.cancel()
        self.lent.close()


def _size_of(buffers: Sequence[OutgoingBuffer]) -> int:
    return sum(buffer.size for buffer in buffers)
