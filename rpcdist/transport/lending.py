"""Large buffers between two processes of one host: the sender copies them into shared memory that it lends.

The lender owns a few segments of memory per session and direction. It copies a buffer into a free segment and names the
segment in the message. The borrower maps a segment once, and tensors are made on its memory without a copy. When the
last tensor on it is freed, its *lease* ends, the segment's number goes back with the next message, and the lender uses
the segment again: warm memory, which costs neither a system call nor a page fault.

[Note: offer and use] A message that finds no free segment brings a new one along: the offer, with the descriptor, goes
out before the message that already names the segment. A borrower that cannot map the segment, or does not want to,
refuses the offer and reports the loan as unread. The lender then sends the bytes, which it still has, in chunks
under the number of the message's transfer, and lends nothing more in that session.

[Note: packs] Each segment costs both ends time when it is new, and when its number goes back. So the smaller buffers of
a message of many, such as a state_dict, lie one after the other in a few segments, and both ends compute the same
offsets from their sizes. The lease of a segment ends with the last of its tensors: keeping one of them keeps at most
`PACK_BYTES` alive. Messages of few buffers give each its own segment.

[Note: what is trusted] Segments hold nothing but bytes of tensors and of buffers beside pickles; sizes, shapes and
types travel in the socket, and the size of a segment is sealed and checked before it is mapped. What is parsed (text,
pickles, bodies of values) is copied out first, so it cannot change while it is read. A tensor is not: a peer that
writes to memory that it has lent can change it between two looks of torch, which trusts what it has seen (the mask of
an index is counted, then filled). That is as good as running code here, so those who may not run any have their tensors
copied (`CopiedBuffer`).

[Note: forked children] A child that is forked while it can read a received tensor has the same memory mapped, and keeps
it when its parent frees the tensor. Such a segment must never be written to again: when its lease ends in the parent,
the lender is told so, forgets the segment, and makes another one when it needs one.

[Note: returned together] Telling the lender costs about 50 us at both ends together, as much as copying 256 KiB. So
small segments are returned several at a time, with the next message or by a timer; the lender makes a few more of them,
which all fit into a core's cache. A large one is returned at once: it is worth more warm.

[Note: who frees] Segments have no name in the file system. When a session ends, both sides let go of its segments;
tensors that lie in one keep its memory alive through their lease. The kernel frees the memory with the last map,
however the processes end.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from rpcdist.at_end import AtEnd
from rpcdist.errors import ProtocolViolation
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.mapped_segments import MappedSegment
from rpcdist.transport.outgoing_buffer import OutgoingBuffer
from rpcdist.transport.shared_memory import Segment, SegmentError

logger = logging.getLogger(__name__)

LEND_FROM_BYTES: Final = 64 << 10
"""Smaller buffers travel in the socket: copying 64 KiB through it costs less than keeping account of a segment."""

MAX_LENT_BYTES: Final = 512 << 20
"""Memory in the segments of one direction of a session. What exceeds it travels in the socket."""

RETURN_TOGETHER: Final = 8
RETURN_TOGETHER_BYTES: Final = 128 << 10
"""Segments of up to this size wait until so many can be returned. [Note: returned together]"""

MAX_SEGMENTS: Final = 512
MAX_OPEN_OFFERS: Final = 8
"""A message makes no segment while so many offers of others are unanswered: in a burst, not each message needs one."""

MANY_BUFFERS: Final = 9
PACK_BELOW_BYTES: Final = 2 << 20
PACK_BYTES: Final = 8 << 20
"""A message of many buffers packs those below the one size into segments of up to the other. [Note: packs]"""

_ALIGNMENT: Final = 64

Pack = Sequence[tuple[int, OutgoingBuffer]]
"""Buffers that lie one after the other in a segment, each with its index in the message."""

# One array type for every length: ctypes makes (and keeps) a class per length otherwise.
_Memory: Final = ctypes.c_char * (1 << 62)


def size_class(num_bytes: int) -> int:
    """The size in bytes of the segment for a buffer: four classes per power of two, so at most a quarter is unused."""
    step = max(LEND_FROM_BYTES, 1 << (num_bytes - 1).bit_length()) // 8
    return -(-num_bytes // step) * step


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes in bytes lie in a segment that they share, and how many bytes they take up."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def packs(buffers: Sequence[OutgoingBuffer]) -> Iterator[Pack]:
    """Which buffers of a message share a segment. Those in no pack are too small to be lent. [Note: packs]"""
    if len(buffers) < MANY_BUFFERS:
        yield from ([each] for each in enumerate(buffers) if each[1].size >= LEND_FROM_BYTES)
        return
    pack: list[tuple[int, OutgoingBuffer]] = []
    num_bytes = 0
    for index, buffer in enumerate(buffers):
        if buffer.size >= PACK_BELOW_BYTES:
            yield [(index, buffer)]
            continue
        if num_bytes + buffer.size > PACK_BYTES:
            yield pack
            pack, num_bytes = [], 0
        pack.append((index, buffer))
        num_bytes += buffer.size + _ALIGNMENT
    if num_bytes >= LEND_FROM_BYTES:
        yield pack


class Ended(NamedTuple):
    """The segments whose leases have ended.

    Attributes:
        returned: the lender may use them again.
        kept: a forked child may still read them. [Note: forked children]
    """

    returned: list[int]
    kept: list[int]


class Offer(NamedTuple):
    """A new segment for the borrower.

    Attributes:
        number: number of the segment, in its session and direction.
        segment: to be passed to the borrower. Its descriptor is closed when nobody refers to it any more: it may be
            under way, on another thread, when the session ends.
    """

    number: int
    segment: Segment


class Lender:
    """The segments that this process lends in one session. Any thread may call any of it.

    Args:
        max_bytes: limit of the memory in all segments.

    Attributes:
        withdrawn: numbers of segments of which the peer has not been told yet that they are gone; read it only.

    Invariants:
        1. A segment is offered, free or lent. It is written to once, when it becomes lent, and not before it is
           returned.
        2. The memory of all segments never exceeds `max_bytes`.
        3. The bytes of a lent segment can be sent in chunks until the borrower has accepted it. [Note: offer and use]
    """

    def __init__(self, max_bytes: int = MAX_LENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._numbers = itertools.count(1)
        self._offered: dict[int, MappedSegment] = {}
        self._free: dict[int, list[MappedSegment]] = {}  # by size; the last one, which came back last, is warm
        self._fewest_free: dict[int, int] = {}  # by size, since the last `trim`: so many were never needed
        self._lent: dict[int, MappedSegment] = {}
        self._unanswered: dict[int, Pack] = {}  # lent before the borrower has accepted it, with what lies there
        self._refused: dict[int, Pack] = {}  # refused since
        self._common: dict[int, Callable[[], None]] = {}  # those that other peers may have, too, see `offer_common`
        self.withdrawn: list[int] = []
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        num_free = sum(map(len, self._free.values()))
        return f"<Lender {len(self._lent)} lent, {num_free} free, {self._num_bytes} B>"

    @property
    def usage(self) -> tuple[int, int, int]:
        """The number of segments, how many of them are lent, and the bytes of all."""
        num_lent = len(self._lent)
        return num_lent + len(self._offered) + sum(map(len, list(self._free.values()))), num_lent, self._num_bytes

    @property
    def may_make(self) -> bool:
        """Whether a message that begins now may make new segments."""
        return len(self._offered) + len(self._unanswered) < MAX_OPEN_OFFERS

    def lend(self, pack: Pack, offered: int | None = None) -> int | None:
        """Copies buffers into a segment; returns its number. None if none is free: the buffers travel in the socket.

        Args:
            pack: the buffers, which lie where `offsets` says.
            offered: takes this segment, which the borrower has been offered and nothing uses, in place of a free one.
        """
        starts, num_bytes = offsets(buffer.size for _, buffer in pack)
        mapped = self._take(num_bytes) if offered is None else self._take_offered(offered, pack)
        if mapped is None:
            return None
        try:
            for start, (_, buffer) in zip(starts, pack, strict=True):
                buffer.copy_to(mapped.address + start)
        except BaseException:
            self.take_back([mapped.number])
            raise
        return mapped.number

    def _take(self, num_bytes: int) -> MappedSegment | None:
        with self._lock:
            free = self._free.get(size_class(num_bytes))
            if not free:
                return None
            mapped = free.pop()
            self._lent[mapped.number] = mapped
            if len(free) < self._fewest_free.get(mapped.size_bytes, 0):
                self._fewest_free[mapped.size_bytes] = len(free)
            return mapped

    def _take_offered(self, number: int, pack: Pack) -> MappedSegment | None:
        with self._lock:
            mapped = self._offered.pop(number, None)  # None: the session has ended, or the borrower was quick to answer
            if mapped is not None:
                self._lent[number] = mapped
                self._unanswered[number] = pack
            return mapped

    def offer(self, num_bytes: int) -> Offer | None:
        """A new segment for buffers of this size; None if there may not be another one now."""
        size_bytes = size_class(num_bytes)
        with self._lock:
            if self._closed or not self._make_room(size_bytes):
                return None
            number = next(self._numbers)
            try:
                segment = Segment.create(size_bytes)
                mapped = MappedSegment(number, segment)
            except SegmentError as exc:
                logger.warning("large tensors travel in the socket from now on: %s", exc)
                self._max_bytes = 0
                return None
            self._num_bytes += size_bytes
            self._offered[number] = mapped
        return Offer(number, segment)

    def offer_common(self, mapped: MappedSegment, keep: Callable[[], None]) -> int | None:
        """Offers memory that other peers have, too, for one message; its number, or None if it may not be offered now.

        Args:
            mapped: the memory, with the buffers in it.
            keep: called if the borrower may go on reading the memory. Until it is given back, this refers to the loan.
        """
        with self._lock:
            if self._closed or not self._make_room(mapped.size_bytes):
                return None
            number = next(self._numbers)
            self._num_bytes += mapped.size_bytes
            self._offered[number] = mapped
            self._common[number] = keep
        return number

    def lend_common(self, number: int, pack: Pack) -> bool:
        """Lends memory that was just offered by `offer_common`; whether that was in time."""
        return self._take_offered(number, pack) is not None

    def _free_or_withdraw(self, number: int, mapped: MappedSegment) -> None:
        if self._common.pop(number, None) is None:
            self._free.setdefault(mapped.size_bytes, []).append(mapped)
        else:
            self._num_bytes -= mapped.size_bytes
            self.withdrawn.append(number)

    def _make_room(self, size_bytes: int) -> bool:
        """Withdraws free segments of other sizes until one of this size may be made; False if that is not enough."""
        for size, free in self._free.items():
            while size != size_bytes and free and not self._has_room(size_bytes):
                self._withdraw(free.pop(0))
        return self._has_room(size_bytes)

    def _withdraw(self, mapped: MappedSegment) -> None:
        self._num_bytes -= mapped.size_bytes
        self.withdrawn.append(mapped.number)

    def trim(self) -> None:
        """Withdraws the segments that were free all the time since it was called last."""
        with self._lock:
            for size, free in self._free.items():
                num_unused = min(self._fewest_free.get(size, 0), len(free))
                for mapped in free[:num_unused]:
                    self._withdraw(mapped)
                del free[:num_unused]
                self._fewest_free[size] = len(free)

    def _has_room(self, size_bytes: int) -> bool:
        num_segments = len(self._offered) + len(self._lent) + sum(map(len, self._free.values()))
        return self._num_bytes + size_bytes <= self._max_bytes and num_segments < MAX_SEGMENTS

    @property
    def has_withdrawn(self) -> bool:
        """Whether `take_withdrawn` has something to report."""
        return bool(self.withdrawn)

    def take_withdrawn(self) -> list[int]:
        """The segments that the borrower may forget, each reported once."""
        with self._lock:
            withdrawn, self.withdrawn = self.withdrawn, []
        return withdrawn

    def answered(self, number: int, accepted: bool) -> None:
        """The borrower has mapped an offered segment, or refused it; after a refusal nothing is offered any more."""
        with self._lock:
            mapped = self._offered.pop(number, None)
            pack = self._unanswered.pop(number, None)
            if mapped is None and pack is None:
                raise ProtocolViolation(f"segment {number} was answered, but not offered")
            if not accepted:
                self._max_bytes = 0
            if pack is not None:
                if not accepted:
                    self._refused[number] = pack
            elif mapped is not None:
                if accepted:
                    self._free_or_withdraw(number, mapped)
                else:
                    self._common.pop(number, None)
                    self._num_bytes -= mapped.size_bytes

    def unread(self, number: int) -> dict[int, OutgoingBuffer]:
        """The borrower could not read a segment that it has refused; returns the buffers to send, by their index."""
        with self._lock:
            pack, mapped = self._refused.pop(number, None), self._lent.pop(number, None)
            if pack is None or mapped is None:
                raise ProtocolViolation(f"segment {number} was not read, but not refused either")
            self._num_bytes -= mapped.size_bytes
            if (keep := self._common.pop(number, None)) is not None:
                keep()  # the bytes are sent from there
        view = memoryview(_memory_of(mapped)).cast("B")
        starts, _ = offsets(buffer.size for _, buffer in pack)
        return {
            index: OutgoingBuffer(view[start : start + buffer.size])
            for start, (index, buffer) in zip(starts, pack, strict=True)
        }

    def returned(self, numbers: Iterable[int]) -> None:
        """Leases of the borrower have ended."""
        with self._lock:
            for number in numbers:
                mapped = self._lent.pop(number, None)
                if mapped is None and not self._closed:
                    raise ProtocolViolation(f"segment {number} was returned, but not lent")
                if mapped is not None:
                    self._free_or_withdraw(number, mapped)

    def take_back(self, numbers: Iterable[int]) -> None:
        """The borrower will not be told of these loans. One that it has guessed and returned is free already."""
        with self._lock:
            for number in numbers:
                mapped = self._lent.pop(number, None)
                if mapped is None:
                    continue
                if self._refused.pop(number, None) is not None:
                    self._common.pop(number, None)
                    self._num_bytes -= mapped.size_bytes
                elif self._unanswered.pop(number, None) is not None:
                    self._offered[number] = mapped
                else:
                    self._free_or_withdraw(number, mapped)

    def kept(self, numbers: Iterable[int]) -> None:
        """Leases of the borrower have ended, but others may read the memory: it is used no more."""
        with self._lock:
            for number in numbers:
                mapped = self._lent.pop(number, None)
                if mapped is None and not self._closed:
                    raise ProtocolViolation(f"segment {number} was kept, but not lent")
                if mapped is not None:
                    self._num_bytes -= mapped.size_bytes
                    if (keep := self._common.pop(number, None)) is not None:
                        keep()

    def close(self) -> None:
        """The session has ended; idempotent."""
        with self._lock:
            self._closed = True
            for keep in self._common.values():  # tensors that lie there keep their memory
                keep()
            self._common.clear()
            for table in (self._offered, self._free, self._lent, self._unanswered, self._refused):
                table.clear()
            self._num_bytes = 0


class _Forks:
    """Counts how often this process has forked, or is about to."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def count_one(self) -> None:
        self.count += 1


_forks: Final = _Forks()
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=_forks.count_one)


def _memory_of(mapped: MappedSegment) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a segment; it stays mapped as long as something refers to them, also after the session."""
    memory = _Memory.from_address(mapped.address)
    memory.mapped = mapped  # type: ignore[attr-defined]
    return memory


class _Lease(NamedTuple):
    """A borrowed segment that this process uses, and how often the process had forked when it was borrowed."""

    number: int
    size_bytes: int
    num_forks: int


class Borrower:
    """The segments that the peer lends in one session. On the I/O loop, but for `take_ended` and the end of leases.

    Args:
        counted: what the peer makes this process set aside.
        max_bytes: a peer that offers more than this in total is refused.

    Attributes:
        ended: leases of which the peer has not been told yet, large ones first. Read it only; `take_ended` empties it.
        refused: numbers of segments that were offered and are not mapped here. [Note: offer and use]
    """

    def __init__(self, counted: AnnouncedBytes, max_bytes: int = MAX_LENT_BYTES) -> None:
        self._counted = counted
        self._max_bytes = max_bytes
        self._known: dict[int, MappedSegment] = {}
        self._in_use: set[int] = set()
        self.ended: deque[_Lease] = deque()
        self.refused: set[int] = set()

    def __repr__(self) -> str:
        return f"<Borrower {len(self._in_use)} in use of {len(self._known)}>"

    @property
    def has_leases(self) -> bool:
        """Whether tensors here lie in borrowed memory, as far as is known."""
        return bool(self._in_use)

    def offered(self, number: int, size_bytes: int, descriptor: int, is_common: bool = False) -> bool:
        """The peer offers a segment; whether it was accepted. The descriptor is closed here in any case.

        Args:
            number: of the segment.
            size_bytes: its size.
            descriptor: of the memory.
            is_common: others read it, too: what is written here stays here.
        """
        num_bytes = sum(mapped.size_bytes for mapped in list(self._known.values()))  # a copy: `take_ended` removes
        if (
            number in self._known
            or num_bytes + size_bytes > self._max_bytes
            or len(self._known) >= MAX_SEGMENTS
            or not self._counted.add_mapped(size_bytes)
        ):
            Segment(descriptor, size_bytes).close()
            return self.refuse(number)
        try:
            with Segment.received(descriptor, size_bytes) as segment:
                self._known[number] = MappedSegment(number, segment, is_private=is_common, is_filled=not is_common)
        except SegmentError as exc:
            logger.warning("large tensors of this peer arrive through the socket: %s", exc)
            self._counted.subtract_mapped(size_bytes)
            return self.refuse(number)
        return True

    def refuse(self, number: int) -> bool:
        """Notes that an offered segment is not mapped; returns False, the answer to the offer."""
        if len(self.refused) >= MAX_SEGMENTS:
            raise ProtocolViolation(f"segment {number} was offered after {MAX_SEGMENTS} others had been refused")
        self.refused.add(number)
        return False

    def borrow(self, number: int, num_bytes: int) -> memoryview:
        """The first bytes of a lent segment, writable; the segment is in use until the view and all on it are freed.

        Raises:
            ProtocolViolation: there is no such segment, it is in use already, or it is smaller.
        """
        mapped = self._known.get(number)
        if mapped is None or number in self._in_use or num_bytes > mapped.size_bytes:
            problem = "is not known" if mapped is None else "is in use" if number in self._in_use else "is smaller"
            raise ProtocolViolation(
                f"a buffer of {num_bytes} bytes is said to lie in segment {number}, which {problem}"
            )
        self._in_use.add(number)
        memory = _memory_of(mapped)
        append = self.ended.append if mapped.size_bytes <= RETURN_TOGETHER_BYTES else self.ended.appendleft
        memory.at_end = AtEnd(append, _Lease(number, mapped.size_bytes, _forks.count))  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")[:num_bytes]

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to report."""
        return bool(self.ended)

    @property
    def is_return_due(self) -> bool:
        """Whether the lender should hear of ended leases with the next message. [Note: returned together]"""
        try:
            return len(self.ended) >= RETURN_TOGETHER or self.ended[0].size_bytes > RETURN_TOGETHER_BYTES
        except IndexError:  # none, or another thread has taken them
            return False

    def take_ended(self) -> Ended:
        """The segments whose leases have ended; tell the lender."""
        ended = Ended([], [])
        try:
            while True:  # any thread may do this at the same time, so looking before would not help
                number, _, num_forks = self.ended.popleft()
                may_be_read = _forks.count != num_forks  # by a child; one that was forked after the end counts as well
                if may_be_read:
                    self._forget(number)
                self._in_use.discard(number)
                (ended.kept if may_be_read else ended.returned).append(number)
        except IndexError:
            return ended

    def withdrawn(self, numbers: Iterable[int]) -> None:
        """The peer will not use these segments again."""
        for number in numbers:
            if number in self._in_use or not self._forget(number):
                raise ProtocolViolation(f"segment {number} was withdrawn, which is not known or in use")

    def _forget(self, number: int) -> bool:
        mapped = self._known.pop(number, None)
        if mapped is not None:
            self._counted.subtract_mapped(mapped.size_bytes)
        return mapped is not None

    def close(self) -> None:
        """The session has ended. Memory that tensors use stays until they are freed; idempotent."""
        for number in list(self._known):
            self._forget(number)
        self._in_use.clear()
        self.refused.clear()
