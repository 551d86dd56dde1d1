"""The large buffers of one session's messages that lie in shared memory, in both directions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._framing.outgoing import Outgoing, stream_of
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.common_buffers import CommonBuffers, CommonPack
from rpcdist.transport.lending import Borrower, Lender, Pack, offsets, packs
from rpcdist.transport.outgoing_buffer import OutgoingBuffer
from rpcdist.transport.shared_memory import unavailable
from rpcdist.transport.wire_messages import Loan, WireMessage

_NOTHING: Final = OutgoingBuffer(memoryview(b""))
"""Stands in a message's list of buffers for one that was lent: no chunk of it follows."""


class LentBuffers:
    """What a session does about shared memory; `Lender` and `Borrower` keep the accounts.

    `put_in`, `tell` and the properties may be used on any thread; the rest by whoever reads, one thread at a time, or
    on the I/O loop.

    Args:
        allowed: whether this process wants to share memory; it refuses the peer's otherwise.
        counted: what the peer makes this process set aside.
    """

    def __init__(self, allowed: bool, counted: AnnouncedBytes) -> None:
        self._allowed = allowed and unavailable() is None
        self._lender = Lender()
        self._borrower = Borrower(counted)

    def __repr__(self) -> str:
        return f"<LentBuffers {self._lender!r}, {self._borrower!r}>"

    def put_in(
        self, message: WireMessage, buffers: Sequence[OutgoingBuffer], outgoing: Outgoing
    ) -> Sequence[OutgoingBuffer]:
        """Copies buffers of a message into segments, and says so in the message.

        Args:
            message: about to be sent.
            buffers: the large buffers of it.
            outgoing: takes the offers of new segments; the message follows them.

        Returns:
            As many buffers; those that were lent have no bytes.
        """
        if not self._allowed:
            return buffers
        left = list(buffers)
        loans = []
        # The parts of a stream keep their order, so each has to be there when it is announced: bytes of a refused
        # segment would come later.
        uses_new = not stream_of(message)
        may_make = self._lender.may_make
        commons = buffers.packs if isinstance(buffers, CommonBuffers) and uses_new and may_make else {}
        for pack in packs(buffers):
            common = commons.get(pack[0][0])
            number = None if common is None else self._lend_common(pack, common, outgoing)
            if number is None:
                number = self._lender.lend(pack)
            if number is None and may_make:
                made = self._offer(pack, outgoing)
                if made is not None and uses_new:
                    number = self._lender.lend(pack, made)
            if number is not None:
                for index, _ in pack:
                    loans.append(Loan(index, number))
                    left[index] = _NOTHING
        if loans:
            loans.sort()
            sizes = [buffer.size for buffer in buffers]
            if isinstance(message, rpc_pb2.Message):
                message.large.extend(sizes)
                message.loans.extend(rpc_pb2.Loan(buffer=loan.buffer, segment=loan.segment) for loan in loans)
            else:
                message.large, message.loans = sizes, loans
        return left

    def _lend_common(self, pack: Pack, common: CommonPack, outgoing: Outgoing) -> int | None:
        """Lends memory that has the buffers already, for other peers; None if that is not possible now."""
        memory = common.filled()
        number = None if memory is None else self._lender.offer_common(memory.mapped, common.keep)
        if memory is None or number is None:
            return None
        self.tell(outgoing)
        pb = rpc_pb2.SegmentOffer(segment=number, size=memory.segment.size_bytes, is_common=True)
        outgoing.add_offer(rpc_pb2.Message(segment_offer=pb), memory.segment)
        return number if self._lender.lend_common(number, pack) else None

    def _offer(self, pack: Pack, outgoing: Outgoing) -> int | None:
        """Offers the peer a new segment for these buffers; returns its number, None if there may be no more."""
        _, num_bytes = offsets(buffer.size for _, buffer in pack)
        made = self._lender.offer(num_bytes)
        if made is None:
            return None
        self.tell(outgoing)  # of segments that made room for this one, before the peer counts it
        pb = rpc_pb2.SegmentOffer(segment=made.number, size=made.segment.size_bytes)
        outgoing.add_offer(rpc_pb2.Message(segment_offer=pb), made.segment)
        return made.number

    def take_out(self, message: WireMessage) -> tuple[dict[int, memoryview], list[int]]:
        """The buffers of a message that lie in segments of the peer.

        Returns:
            The buffers by their index, and the segments that this side has refused: their bytes have to be sent.

        Raises:
            ProtocolViolation: a segment is not known, too small, or used by a message before.
        """
        sizes = message.large
        indices: dict[int, list[int]] = {}  # of the buffers in each segment
        last = -1
        for buffer, segment in sorted((loan.buffer, loan.segment) for loan in message.loans):
            if buffer >= len(sizes) or buffer == last:
                raise ProtocolViolation(f"a loan for buffer {buffer} of {len(sizes)}")
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

    def unread(self, segment: int) -> dict[int, OutgoingBuffer]:
        """The peer has refused a segment before it read what this side had put there: what to send, by its index."""
        return self._lender.unread(segment)

    @property
    def usage(self) -> tuple[int, int, int]:
        """The segments that this process lends, how many of them the peer uses, and the bytes of all."""
        return self._lender.usage

    @property
    def has_news(self) -> bool:
        """Whether the peer should be told of segments that are free, or gone."""
        return self._borrower.has_ended or self._lender.has_withdrawn

    @property
    def is_news_due(self) -> bool:
        """Whether the peer should be told with the next message, and not only when a timer says so."""
        return bool(self._lender.withdrawn) or (bool(self._borrower.ended) and self._borrower.is_return_due)

    @property
    def has_leases(self) -> bool:
        """Whether tensors here lie in memory of the peer, as far as is known."""
        return self._borrower.has_leases

    def tell(self, outgoing: Outgoing) -> None:
        """Queues what the peer should be told; it is told once."""
        ended = self._borrower.take_ended()
        if ended.returned:  # with most messages that have large buffers, so it has a form of its own
            outgoing.add_returned(ended.returned)
        if ended.kept or self._lender.has_withdrawn:
            news = rpc_pb2.SegmentNews(kept=ended.kept, withdrawn=self._lender.take_withdrawn())
            outgoing.add(rpc_pb2.Message(segment_news=news))

    def returned(self, numbers: Sequence[int]) -> None:
        """The peer does not use these segments any more."""
        self._lender.returned(numbers)

    def take_back(self, numbers: Sequence[int]) -> None:
        """The peer will not receive the message whose buffers lie in these segments."""
        self._lender.take_back(numbers)

    def take_news(self, news: rpc_pb2.SegmentNews) -> None:
        """The peer tells us."""
        self._lender.kept(news.kept)
        self._borrower.withdrawn(news.withdrawn)

    def answer_to(self, offer: rpc_pb2.SegmentOffer, descriptor: int | None) -> rpc_pb2.Message:
        """Maps memory that the peer offers; returns the answer.

        Args:
            offer: from the peer.
            descriptor: came with the offer; None if this process has no room for another one.
        """
        if descriptor is not None and self._allowed:
            accepted = self._borrower.offered(offer.segment, offer.size, descriptor, offer.is_common)
        else:
            accepted = self._borrower.refuse(offer.segment)
            if descriptor is not None:
                os.close(descriptor)
        return rpc_pb2.Message(segment_answer=rpc_pb2.SegmentAnswer(segment=offer.segment, accepted=accepted))

    def answered(self, answer: rpc_pb2.SegmentAnswer) -> None:
        """The peer has mapped memory that was offered, or does not want it."""
        self._lender.answered(answer.segment, answer.accepted)

    def trim(self) -> None:
        """Gives memory back that no message has needed since the last call."""
        self._lender.trim()

    def close(self) -> None:
        """The session has ended; tensors that lie in memory of the peer keep it."""
        self._lender.close()
        self._borrower.close()
