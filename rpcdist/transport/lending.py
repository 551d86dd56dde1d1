"""Large buffers between two processes of one host: the sender copies them into shared memory that it lends.

The lender owns a few segments of memory per session and direction. It copies a buffer into a free segment and names the
segment in the message. The borrower maps a segment once, and makes tensors on its memory without a copy. When the last
of these tensors is freed, the segment's *lease* ends, its number is returned with the next message, and the lender uses
the segment again. Its memory is warm: using it takes no system call and no page fault.

[Note: offer and use] If no segment is free, a message brings a new one: the offer, with the descriptor, is written
before the message that already names the segment. A borrower that cannot or does not want to map the segment refuses
the offer and reports the loan as unread. The lender then sends the bytes, which it still has, in chunks under the
number of the message's transfer, and lends no more memory in that session.

[Note: packs] A segment costs both ends time when it is new and when it is returned. So the smaller buffers of a message
with many buffers, such as a state_dict, share a few segments, and both ends compute the same offsets from the sizes.
The lease of a segment ends with the last of its tensors: a tensor that is kept keeps at most `PACK_BYTES` alive. In
messages with few buffers, each buffer has its own segment.

[Note: trust] Segments contain only bytes of tensors, and of buffers that belong to pickles. Sizes, shapes and types
travel in the socket, and the size of a segment is sealed and checked before it is mapped. Data that is parsed (text,
pickles, bodies of values) is copied out first, so it cannot change while it is read. A tensor is not copied: a peer
that writes to memory after lending it can change the tensor between two reads by torch, which relies on the first (it
counts the mask of an index, then fills the result). That amounts to running code here, so tensors of peers that may not
run code are copied (`ReceiveBuffer.copied`).

[Note: forked children] A forked child also maps the memory of the received tensors, and keeps it when the parent frees
them. Such a segment must never be written to again: when its lease ends in the parent, the borrower reports it as kept,
and the lender forgets the segment and makes another one when it needs one.

[Note: returned together] A return costs both ends about as much as copying 256 KiB. So small segments are returned
several at a time, with the next message or by a timer; the lender makes a few more of them, and all fit into a core's
cache. A large segment is returned at once, since warm memory is worth more there.

[Note: freeing] Segments have no name in the file system. When a session ends, both sides drop its segments; tensors in
a segment keep its memory alive through their lease. The kernel frees the memory with the last map, even if the
processes are killed.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from rpcdist.at_exit import AtEnd
from rpcdist.errors import ProtocolViolation
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.memory_copies import LargeBuffer, memory_view
from rpcdist.transport.shared_memory import MappedSegment, Segment, SegmentError

logger = logging.getLogger(__name__)

LEND_FROM_BYTES: Final = 64 << 10
"""Smaller buffers travel in the socket: copying 64 KiB through it costs less than the bookkeeping of a segment."""

MAX_LENT_BYTES: Final = 512 << 20
"""Limit of the memory in the segments of one direction of a session. Further buffers travel in the socket."""

RETURN_TOGETHER: Final = 8
RETURN_TOGETHER_BYTES: Final = 128 << 10
"""Segments of up to `RETURN_TOGETHER_BYTES` wait until this many can be returned. [Note: returned together]"""

MAX_SEGMENTS: Final = 512
MAX_FREE_COMMON: Final = 2
"""Segments of common memory that a borrower keeps mapped between messages; see `common_buffers.py`."""

MAX_OPEN_OFFERS: Final = 8
"""A message makes no segment while this many offers are unanswered: in a burst, not every message needs a new one."""

MANY_BUFFERS: Final = 9
PACK_BELOW_BYTES: Final = 2 << 20
PACK_BYTES: Final = 8 << 20
"""A message with `MANY_BUFFERS` packs those below the first size into segments of up to the second. [Note: packs]"""

_ALIGNMENT: Final = 64

Pack = Sequence[tuple[int, LargeBuffer]]
"""Buffers that share a segment, in order, each with its index in the message."""


def size_class(num_bytes: int) -> int:
    """The size in bytes of the segment for a buffer: four classes per power of two, so at most a quarter is unused."""
    step = max(LEND_FROM_BYTES, 1 << (num_bytes - 1).bit_length()) // 8
    return -(-num_bytes // step) * step


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of buffers of these sizes, in bytes, in a segment that they share, and their total size."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def packs(buffers: Sequence[LargeBuffer]) -> Iterator[Pack]:
    """Groups the buffers of a message by segment. Buffers in no pack are too small to be lent. [Note: packs]"""
    if len(buffers) < MANY_BUFFERS:
        yield from ([each] for each in enumerate(buffers) if each[1].size >= LEND_FROM_BYTES)
        return
    pack: list[tuple[int, LargeBuffer]] = []
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


class Lender:
    """The segments that this process lends in one session. Any thread may use it.

    Args:
        max_bytes: limit of the memory in all segments.
        account: also counts the memory, for the peer; None to count it for no peer.

    Attributes:
        withdrawn: numbers of removed segments that were not reported to the peer yet; read-only.

    Invariants:
        1. A segment is offered, free or lent. It is written to once, when it becomes lent, and not again until it is
           returned.
        2. The memory of all segments never exceeds `max_bytes`.
        3. The bytes of a lent segment can be sent in chunks until the borrower has accepted it. [Note: offer and use]
    """

    def __init__(self, max_bytes: int = MAX_LENT_BYTES, account: AnnouncedBytes | None = None) -> None:
        self._max_bytes = max_bytes
        self._account = account
        self._num_bytes = 0
        self._numbers = itertools.count(1)
        self._offered: dict[int, MappedSegment] = {}
        self._free: dict[int, list[MappedSegment]] = {}  # by size; the last one was returned last and is warm
        self._fewest_free: dict[int, int] = {}  # by size: the number never needed since the last `trim`
        self._lent: dict[int, MappedSegment] = {}
        self._unanswered: dict[int, Pack] = {}  # lent before the borrower has accepted it
        self._refused: dict[int, Pack] = {}  # refused, and not reported as unread yet
        self._common: dict[int, Callable[[], None]] = {}  # lent, and shared with other peers, see `offer_common`
        self._free_common: dict[MappedSegment, int] = {}  # mapped and returned by the peer
        self.withdrawn: list[int] = []
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        num_free = sum(map(len, self._free.values()))
        return f"<Lender {len(self._lent)} lent, {num_free} free, {self._num_bytes} B>"

    @property
    def usage(self) -> tuple[int, int, int]:
        """The number of segments, the number of lent ones, and the bytes of all segments."""
        num_unused = len(self._offered) + len(self._free_common) + sum(map(len, list(self._free.values())))
        return num_unused + len(self._lent), len(self._lent), self._num_bytes

    @property
    def may_make(self) -> bool:
        """Whether a message that begins now may make new segments."""
        return len(self._offered) + len(self._unanswered) < MAX_OPEN_OFFERS

    def lend(self, pack: Pack, offered: int | None = None) -> int | None:
        """Copies buffers into a segment; returns its number. None if none is free: the buffers travel in the socket.

        Args:
            pack: the buffers; `offsets` gives their positions.
            offered: the number of an unused offered segment, to use in place of a free one.
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
            mapped = self._offered.pop(number, None)  # None: the session ended, or the borrower has answered
            if mapped is not None:
                self._lent[number] = mapped
                self._unanswered[number] = pack
            return mapped

    def offer(self, num_bytes: int) -> tuple[int, Segment] | None:
        """Makes a segment for buffers of this size; returns its number and it, or None if no more are allowed now.

        Its descriptor is closed with the last reference: another thread may be sending it when the session ends.
        """
        size_bytes = size_class(num_bytes)
        with self._lock:
            if self._closed or not self._make_room(size_bytes):
                return None
            number = next(self._numbers)
            try:
                segment = Segment.create(size_bytes)
                mapped = MappedSegment(number, segment)
            except SegmentError as exc:
                logger.warning(
                    "shared memory cannot be allocated, so large tensors use the socket from now on: %s", exc
                )
                self._max_bytes = 0
                return None
            self._count(size_bytes)
            self._offered[number] = mapped
        return number, segment

    def offer_common(self, mapped: MappedSegment, keep: Callable[[], None]) -> int | None:
        """Offers memory that other peers also map; returns its number, or None if no more is allowed now.

        Args:
            mapped: the memory, with the buffers in it.
            keep: called if the borrower may continue to read the memory; held until the memory is returned.
        """
        with self._lock:
            if self._closed or not self._make_room(mapped.size_bytes):
                return None
            number = next(self._numbers)
            self._count(mapped.size_bytes)
            self._offered[number] = mapped
            self._common[number] = keep
        return number

    def lend_common(self, number: int, pack: Pack) -> bool:
        """Lends memory that `offer_common` has just offered; False if the borrower has already answered."""
        return self._take_offered(number, pack) is not None

    def lend_common_again(self, mapped: MappedSegment, keep: Callable[[], None]) -> int | None:
        """Lends memory that the borrower has mapped for an earlier message; returns its number, or None otherwise.

        Args: see `offer_common`.
        """
        with self._lock:
            number = self._free_common.pop(mapped, None)
            if number is not None:
                self._lent[number], self._common[number] = mapped, keep
            return number

    def _put_back(self, number: int, mapped: MappedSegment) -> None:
        """Frees a segment that the borrower has mapped and no longer reads."""
        if self._common.pop(number, None) is None:
            self._free.setdefault(mapped.size_bytes, []).append(mapped)
        elif mapped in self._free_common or len(self._free_common) == MAX_FREE_COMMON:  # mapped twice, or one of many
            self._withdraw(number, mapped)
        else:
            self._free_common[mapped] = number

    def _make_room(self, size_bytes: int) -> bool:
        """Withdraws free segments of other sizes until one of this size fits; False if it does not fit."""
        for size, free in self._free.items():
            while size != size_bytes and free and not self._has_room(size_bytes):
                mapped = free.pop(0)
                self._withdraw(mapped.number, mapped)
        if not self._has_room(size_bytes):
            self._withdraw_common()
        return self._has_room(size_bytes)

    def _withdraw_common(self) -> None:
        while self._free_common:
            mapped, number = self._free_common.popitem()
            self._withdraw(number, mapped)

    def _withdraw(self, number: int, mapped: MappedSegment) -> None:
        self._count(-mapped.size_bytes)
        self.withdrawn.append(number)

    def trim(self) -> None:
        """Withdraws the segments that have stayed free since the last call, and all free common memory."""
        with self._lock:
            for size, free in self._free.items():
                num_unused = min(self._fewest_free.get(size, 0), len(free))
                for mapped in free[:num_unused]:
                    self._withdraw(mapped.number, mapped)
                del free[:num_unused]
                self._fewest_free[size] = len(free)
            self._withdraw_common()

    def _has_room(self, size_bytes: int) -> bool:
        number = len(self._offered) + len(self._lent) + len(self._free_common) + sum(map(len, self._free.values()))
        fits = self._num_bytes + size_bytes <= self._max_bytes and number < MAX_SEGMENTS
        return fits and (self._account is None or self._account.may_map(size_bytes))

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._account is not None:
            self._account.subtract_mapped(-num_bytes)

    def take_withdrawn(self) -> list[int]:
        """The segments that the borrower may forget, each reported once."""
        with self._lock:
            withdrawn, self.withdrawn = self.withdrawn, []
        return withdrawn

    def answered(self, number: int, accepted: bool) -> None:
        """Records that the borrower has mapped or refused an offered segment; a refusal ends all offers."""
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
                    self._put_back(number, mapped)
                else:
                    self._common.pop(number, None)
                    self._count(-mapped.size_bytes)

    def unread(self, number: int) -> dict[int, LargeBuffer]:
        """The buffers of a refused segment, by index: they are sent, since the borrower could not read them."""
        with self._lock:
            pack, mapped = self._refused.pop(number, None), self._lent.pop(number, None)
            if pack is None or mapped is None:
                raise ProtocolViolation(f"segment {number} was reported as unread, but not refused")
            self._count(-mapped.size_bytes)
            if (keep := self._common.pop(number, None)) is not None:
                keep()  # the bytes are sent from this memory
        view = memory_view(mapped.address, mapped.size_bytes, mapped)
        starts, _ = offsets(buffer.size for _, buffer in pack)
        return {
            index: LargeBuffer(view[start : start + buffer.size])
            for start, (index, buffer) in zip(starts, pack, strict=True)
        }

    def returned(self, numbers: Iterable[int]) -> None:
        """Records that leases of the borrower have ended."""
        with self._lock:
            for number, mapped in self._end_loans(numbers, "returned"):
                self._put_back(number, mapped)

    def _end_loans(self, numbers: Iterable[int], what: str) -> Iterator[tuple[int, MappedSegment]]:
        for number in numbers:
            mapped = self._lent.pop(number, None)
            if mapped is not None:
                yield number, mapped
            elif not self._closed:
                raise ProtocolViolation(f"segment {number} was {what}, but not lent")

    def take_back(self, numbers: Iterable[int]) -> None:
        """Cancels loans of a message that is not sent. A loan that the borrower guessed and returned is free."""
        with self._lock:
            for number in numbers:
                mapped = self._lent.pop(number, None)
                if mapped is None:
                    continue
                if self._refused.pop(number, None) is not None:
                    self._common.pop(number, None)
                    self._count(-mapped.size_bytes)
                elif self._unanswered.pop(number, None) is not None:
                    self._offered[number] = mapped
                else:
                    self._put_back(number, mapped)

    def kept(self, numbers: Iterable[int]) -> None:
        """Records that leases have ended while other processes may read the memory, so that it is not used again."""
        with self._lock:
            for number, mapped in self._end_loans(numbers, "kept"):
                self._count(-mapped.size_bytes)
                if (keep := self._common.pop(number, None)) is not None:
                    keep()

    def close(self) -> None:
        """Drops all segments, since the session has ended; idempotent."""
        with self._lock:
            self._closed = True
            for keep in self._common.values():  # tensors of the borrower may still use the memory
                keep()
            self._common.clear()
            for table in (self._offered, self._free_common, self._free, self._lent, self._unanswered, self._refused):
                table.clear()
            self._count(-self._num_bytes)


_num_forks = 0  # in this process; each is counted just before it happens


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(before=_count_fork)


_Lease = tuple[int, int, int]
"""Number and size of a borrowed segment that this process uses, and the number of forks when it was borrowed."""


class Borrower:
    """The segments that the peer lends in one session. Used on the I/O loop; leases end on any thread.

    Args:
        counted: counts the bytes that the peer makes this process reserve.
        max_bytes: limit of all segments together; further offers are refused.

    Attributes:
        ended: ended leases that were not reported to the peer yet, large ones first; `take_ended` empties it.
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
        """Whether tensors here use borrowed memory; a lease that has just ended may still count."""
        return bool(self._in_use)

    def offered(self, number: int, size_bytes: int, descriptor: int, is_common: bool = False) -> bool:
        """Maps a segment that the peer offers; returns False if it refuses the offer. Always closes the descriptor.

        Args:
            is_common: other processes also read the memory, so writes stay private here.
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
            logger.warning("a segment cannot be mapped, so large tensors of this peer arrive over the socket: %s", exc)
            self._counted.subtract_mapped(size_bytes)
            return self.refuse(number)
        return True

    def refuse(self, number: int) -> bool:
        """Records that an offered segment is not mapped; returns False, the answer to the offer."""
        if len(self.refused) >= MAX_SEGMENTS:
            raise ProtocolViolation(f"segment {number} was offered after {MAX_SEGMENTS} others had been refused")
        self.refused.add(number)
        return False

    def borrow(self, number: int, num_bytes: int) -> memoryview:
        """The first bytes of a lent segment, writable; it is in use until the view and all objects on it are freed.

        Raises:
            ProtocolViolation: the segment is not known, already in use, or too small.
        """
        mapped = self._known.get(number)
        if mapped is None or number in self._in_use or num_bytes > mapped.size_bytes:
            problem = "is not known" if mapped is None else "is in use" if number in self._in_use else "is too small"
            text = f"a message names segment {number} for a buffer of {num_bytes} bytes, but this segment {problem}"
            raise ProtocolViolation(text)
        self._in_use.add(number)
        append = self.ended.append if mapped.size_bytes <= RETURN_TOGETHER_BYTES else self.ended.appendleft
        at_end = AtEnd(append, (number, mapped.size_bytes, _num_forks))
        return memory_view(mapped.address, num_bytes, (mapped, at_end))

    @property
    def is_return_due(self) -> bool:
        """Whether the next message should report ended leases to the lender. [Note: returned together]"""
        try:
            return len(self.ended) >= RETURN_TOGETHER or self.ended[0][1] > RETURN_TOGETHER_BYTES
        except IndexError:  # none, or another thread has taken them
            return False

    def take_ended(self) -> tuple[list[int], list[int]]:
        """Takes the segments whose leases have ended; the caller reports them to the lender.

        Returns:
            Those that the lender may use again, and those that a forked child may still read. [Note: forked children]
        """
        returned: list[int] = []
        kept: list[int] = []
        try:
            while True:  # other threads may do this at the same time, so checking the length first would not help
                number, _, num_forks = self.ended.popleft()
                mapped = self._known.get(number)
                # A child may read it, even one that was forked after the lease ended; or it has private pages here.
                may_be_read = _num_forks != num_forks or not (mapped is None or mapped.forget_changes())
                if may_be_read:
                    self._forget(number)
                self._in_use.discard(number)
                (kept if may_be_read else returned).append(number)
        except IndexError:
            return returned, kept

    def withdrawn(self, numbers: Iterable[int]) -> None:
        """Forgets segments that the peer will not use again."""
        for number in numbers:
            if number in self._in_use or not self._forget(number):
                raise ProtocolViolation(f"segment {number} was withdrawn, but it is not known, or still in use")

    def _forget(self, number: int) -> bool:
        mapped = self._known.pop(number, None)
        if mapped is not None:
            self._counted.subtract_mapped(mapped.size_bytes)
        return mapped is not None

    def close(self) -> None:
        """Drops all segments, since the session has ended; tensors in them keep their memory. Idempotent."""
        for number in list(self._known):
            self._forget(number)
        self._in_use.clear()
        self.refused.clear()
