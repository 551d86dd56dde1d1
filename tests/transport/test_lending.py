"""Lending memory to a process of the same host: the holder of each segment, limits, violations, and freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.errors import ProtocolViolation
from rpcdist.transport import lending
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.common_buffers import CommonMemory
from rpcdist.transport.lending import (
    LEND_FROM_BYTES,
    MAX_FREE_COMMON,
    RETURN_TOGETHER,
    RETURN_TOGETHER_BYTES,
    Borrower,
    Lender,
    offsets,
    packs,
    size_class,
)
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.shared_memory import MappedSegment, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"memory cannot be shared here: {unavailable()}")

SIZE = LEND_FROM_BYTES


class Pair:
    """A lender and a borrower, with what goes between them done by hand."""

    def __init__(self, max_bytes: int = 1 << 24) -> None:
        self.lender = Lender(max_bytes)
        self.borrower = Borrower(AnnouncedBytes())
        self.kept: list[None] = []

    def lend(self, data: memoryview) -> int | None:
        """Lends a copy of the data."""
        return self.lender.lend([(0, LargeBuffer(data))])

    def offer(self, size: int = SIZE) -> int | None:
        made = self.lender.offer(size)
        if made is None:
            return None
        accepted = self.borrower.offered(made[0], made[1].size_bytes, os.dup(made[1].fileno()))
        self.lender.answered(made[0], accepted)
        return made[0]

    def lend_common(self, memory: CommonMemory) -> int:
        """Lends memory that others read too, and offers it if the borrower has not mapped it."""
        number = self.lender.lend_common_again(memory.mapped, lambda: self.kept.append(None))
        if number is None:
            number = self.lender.offer_common(memory.mapped, lambda: self.kept.append(None))
            assert number is not None and self.lender.lend_common(number, [])
            descriptor = os.dup(memory.segment.fileno())
            accepted = self.borrower.offered(number, memory.segment.size_bytes, descriptor, is_common=True)
            self.lender.answered(number, accepted)
        return number

    def pass_back(self) -> None:
        ended = self.borrower.take_ended()
        self.lender.returned(ended[0])
        self.lender.kept(ended[1])
        self.borrower.withdrawn(self.lender.take_withdrawn())


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.lender.close()
    pair.borrower.close()


@given(st.integers(LEND_FROM_BYTES, 1 << 40))
def test_at_most_a_quarter_of_a_segment_is_unused(size: int) -> None:
    assert size <= size_class(size) <= 1.25 * size + 1
    assert size_class(size_class(size)) == size_class(size)


def test_the_bytes_are_there_without_a_copy_and_the_segment_comes_back(pair: Pair) -> None:
    assert pair.lend(memoryview(bytearray(SIZE))) is None  # no segment yet
    assert pair.offer() == 1
    data = os.urandom(SIZE)
    assert pair.lend(memoryview(data)) == 1
    view = pair.borrower.borrow(1, SIZE)
    assert view == data and not view.readonly
    part = view[10:20]
    del view
    assert pair.borrower.take_ended() == ([], [])  # a slice keeps it
    assert pair.lend(memoryview(data)) is None
    assert part == data[10:20]
    del part
    pair.pass_back()
    assert pair.lend(memoryview(bytearray(data))) == 1
    assert pair.borrower.borrow(1, SIZE) == data


def test_the_last_one_that_came_back_is_used_first(pair: Pair) -> None:
    numbers = [pair.offer(), pair.offer()]
    assert numbers == [1, 2]
    assert [pair.lend(memoryview(bytearray(SIZE))) for _ in range(3)] == [2, 1, None]
    pair.lender.returned([2])
    pair.lender.returned([1])
    assert pair.lend(memoryview(bytearray(SIZE))) == 1


def test_common_memory_stays_mapped_without_what_the_borrower_changed(pair: Pair) -> None:
    memory = CommonMemory(SIZE, frozenset())
    for value in (b"1", b"2", b"3"):
        ctypes.memset(memory.mapped.address, ord(value), SIZE)
        assert pair.lend_common(memory) == 1
        view = pair.borrower.borrow(1, SIZE)
        assert view == value * SIZE
        view[:10] = bytes(10)
        assert ctypes.string_at(memory.mapped.address, 10) == value * 10
        del view
        pair.pass_back()
    assert pair.lender.usage == (1, 0, SIZE)
    pair.lender.trim()
    assert pair.lender.usage == (0, 0, 0)
    assert not pair.kept


def test_few_free_segments_of_common_memory_stay(pair: Pair) -> None:
    memories = [CommonMemory(SIZE, frozenset()) for _ in range(MAX_FREE_COMMON + 1)]
    for number, memory in enumerate(memories, start=1):
        assert pair.lend_common(memory) == number
        pair.borrower.borrow(number, SIZE)
        pair.pass_back()
    assert pair.lender.usage[0] == MAX_FREE_COMMON
    assert pair.lend_common(memories[0]) == 1
    twice = pair.lend_common(memories[0])  # two messages at once
    assert twice == len(memories) + 1
    for number in (1, twice):
        pair.borrower.borrow(number, SIZE)
    pair.pass_back()
    assert pair.lender.usage == (MAX_FREE_COMMON, 0, MAX_FREE_COMMON * SIZE)
    assert pair.lend_common(memories[-1]) == twice + 1  # withdrawn, so it is offered again
    assert not pair.kept


def test_free_common_memory_makes_room_for_other_segments() -> None:
    pair = Pair(max_bytes=2 * SIZE)
    assert pair.lend_common(CommonMemory(SIZE, frozenset())) == 1
    pair.borrower.borrow(1, SIZE)
    pair.pass_back()
    assert pair.offer() == 2
    assert pair.offer() == 3
    pair.pass_back()
    assert pair.lender.usage == (2, 0, 2 * SIZE)


def test_common_memory_whose_changes_stay_is_not_used_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CommonMemory(SIZE, frozenset())
    assert pair.lend_common(memory) == 1
    monkeypatch.setattr(MappedSegment, "forget_changes", lambda mapped: False)  # as with locked memory
    pair.borrower.borrow(1, SIZE)
    pair.pass_back()
    assert pair.kept == [None]
    assert pair.lend_common(memory) == 2


def test_small_buffers_are_not_lent(pair: Pair) -> None:
    pair.offer()
    small, large = (LargeBuffer(memoryview(bytearray(size))) for size in (SIZE - 1, SIZE))
    assert list(packs([small])) == []
    assert list(packs([small, large, small])) == [[(1, large)]]
    assert pair.lender.offer(SIZE) is not None


def test_many_buffers_share_segments_and_large_ones_do_not() -> None:
    mib = 1 << 20
    sizes = [mib] * 10 + [3 * mib] + [40_000] * 3 + [mib]
    found = list(packs([LargeBuffer(memoryview(bytearray(size))) for size in sizes]))
    assert sorted(index for pack in found for index, _ in pack) == list(range(len(sizes)))
    assert [[index for index, _ in pack] for pack in found] == [list(range(7)), [10], [7, 8, 9, 11, 12, 13, 14]]
    assert offsets([1, 64, 65, 0, 3]) == ([0, 64, 128, 256, 256], 259)


def test_many_buffers_too_small_for_a_segment_together_are_not_lent() -> None:
    assert list(packs([LargeBuffer(memoryview(bytearray(100))) for _ in range(20)])) == []


def test_nothing_is_lent_beyond_the_limit() -> None:
    pair = Pair(max_bytes=2 * SIZE)
    assert [pair.offer(), pair.offer(), pair.offer()] == [1, 2, None]
    pair.lender.close()


def test_free_segments_of_other_sizes_make_room() -> None:
    pair = Pair(max_bytes=4 * SIZE)
    assert [pair.offer() for _ in range(4)] == [1, 2, 3, 4]
    assert pair.lend(memoryview(bytearray(SIZE))) == 4
    assert pair.offer(2 * SIZE) == 5
    pair.pass_back()
    with pytest.raises(ProtocolViolation, match=r"segment 1 for a buffer of \d+ bytes, but this segment is not known"):
        pair.borrower.borrow(1, SIZE)
    assert pair.offer(4 * SIZE) is None  # one is lent
    pair.lender.close()


def test_what_was_not_needed_for_a_while_is_given_back(pair: Pair) -> None:
    for _ in range(3):
        pair.offer()
    pair.lender.trim()  # nothing was free all the time until now
    pair.pass_back()
    pair.lender.returned([n for n in [pair.lend(memoryview(bytearray(SIZE)))] if n])
    pair.lender.trim()
    assert sorted(pair.lender.take_withdrawn()) == [1, 2]
    assert pair.lend(memoryview(bytearray(SIZE))) == 3


def test_a_message_makes_no_segment_while_others_have_many_without_an_answer(pair: Pair) -> None:
    data = [(0, LargeBuffer(memoryview(bytearray(SIZE))))]
    for _ in range(lending.MAX_OPEN_OFFERS):
        assert pair.lender.may_make
        made = pair.lender.offer(SIZE)
        assert made is not None and pair.lender.lend(data, made[0]) == made[0]
    assert not pair.lender.may_make
    pair.lender.answered(1, True)
    assert pair.lender.may_make


def test_what_lies_in_a_segment_that_was_refused_can_still_be_sent(pair: Pair) -> None:
    made = pair.lender.offer(2 * SIZE)
    assert made is not None
    pack = [(3, LargeBuffer(memoryview(b"a" * SIZE))), (5, LargeBuffer(memoryview(b"b" * 100)))]
    assert pair.lender.lend(pack, made[0]) == made[0]
    with pytest.raises(ProtocolViolation, match="not refused"):
        pair.lender.unread(made[0])
    pair.lender.close()  # the memory outlives the session as long as it is sent


def test_a_refused_segment_is_read_once_more_and_then_gone(pair: Pair) -> None:
    made = pair.lender.offer(2 * SIZE)
    assert made is not None
    pack = [(3, LargeBuffer(memoryview(b"a" * SIZE))), (5, LargeBuffer(memoryview(b"b" * 100)))]
    assert pair.lender.lend(pack, made[0]) == made[0]
    pair.lender.answered(made[0], False)
    unread = pair.lender.unread(made[0])
    assert {index: bytes(buffer.view) for index, buffer in unread.items()} == {3: b"a" * SIZE, 5: b"b" * 100}
    assert repr(pair.lender) == "<Lender 0 lent, 0 free, 0 B>"
    with pytest.raises(ProtocolViolation, match="not refused"):
        pair.lender.unread(made[0])
    assert pair.lender.offer(SIZE) is None
    pair.lender.close()
    assert bytes(unread[5].view) == b"b" * 100


def test_a_loan_that_is_given_up_before_its_segment_is_answered_waits_for_the_answer(pair: Pair) -> None:
    data = [(0, LargeBuffer(memoryview(bytearray(SIZE))))]
    for accepted, left in ((True, f"<Lender 0 lent, 1 free, {SIZE} B>"), (False, f"<Lender 0 lent, 1 free, {SIZE} B>")):
        made = pair.lender.offer(SIZE)
        assert made is not None and pair.lender.lend(data, made[0]) == made[0]
        pair.lender.take_back([made[0]])
        pair.lender.answered(made[0], accepted)
        assert repr(pair.lender) == left


def test_a_refused_loan_that_is_given_up_is_gone(pair: Pair) -> None:
    made = pair.lender.offer(SIZE)
    assert made is not None
    assert pair.lender.lend([(0, LargeBuffer(memoryview(bytearray(SIZE))))], made[0]) == made[0]
    pair.lender.answered(made[0], False)
    pair.lender.take_back([made[0]])
    assert repr(pair.lender) == "<Lender 0 lent, 0 free, 0 B>"


def test_a_peer_that_refuses_cannot_be_offered_segments_for_ever() -> None:
    borrower = Borrower(AnnouncedBytes())
    for number in range(lending.MAX_SEGMENTS):
        assert not borrower.refuse(number)
    with pytest.raises(ProtocolViolation, match="refused"):
        borrower.refuse(lending.MAX_SEGMENTS)


def test_after_a_refusal_nothing_is_offered(pair: Pair) -> None:
    made = pair.lender.offer(SIZE)
    assert made is not None
    pair.lender.answered(made[0], False)
    assert pair.lender.offer(SIZE) is None
    assert pair.lend(memoryview(bytearray(SIZE))) is None


def test_a_borrower_refuses_what_is_not_as_announced(pair: Pair) -> None:
    made = pair.lender.offer(SIZE)
    assert made is not None
    assert not pair.borrower.offered(1, 2 * SIZE, os.dup(made[1].fileno()))
    reading, writing = os.pipe()
    os.close(writing)
    assert not pair.borrower.offered(2, SIZE, reading)
    unsealed = os.memfd_create("not sealed")
    os.truncate(unsealed, SIZE)
    assert not pair.borrower.offered(3, SIZE, unsealed)
    assert not Borrower(AnnouncedBytes(), max_bytes=SIZE - 1).offered(4, SIZE, os.dup(made[1].fileno()))
    for closed in (reading, unsealed):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)


def test_what_all_sessions_of_a_peer_lend_counts_together() -> None:
    """An offer of 40 bytes had 512 MiB mapped and filled, in each session."""
    counted, pairs = AnnouncedBytes(3 * SIZE), [Pair(), Pair()]
    for each in pairs:
        each.borrower = Borrower(counted)
    counted.add(SIZE)
    first, second = pairs
    assert first.offer() == second.offer() == 1 and not first.borrower.refused and not second.borrower.refused
    assert second.offer() == 2 and second.borrower.refused == {2}  # not mapped, so the bytes go another way
    assert first.lend(memoryview(bytes(SIZE))) == 1
    counted.add(2 * SIZE)  # what is mapped does not count against what is announced
    counted.subtract(3 * SIZE)
    first.borrower.close()
    assert counted.add_mapped(2 * SIZE) and not counted.add_mapped(SIZE)


def test_what_a_peer_may_not_say(pair: Pair) -> None:
    pair.offer()
    view = pair.borrower.borrow(1, SIZE)
    with pytest.raises(ProtocolViolation, match="is in use"):
        pair.borrower.borrow(1, SIZE)
    with pytest.raises(ProtocolViolation, match="withdrawn"):
        pair.borrower.withdrawn([1])
    with pytest.raises(ProtocolViolation, match="withdrawn"):
        pair.borrower.withdrawn([7])
    with pytest.raises(ProtocolViolation, match="not lent"):
        pair.lender.returned([1])
    with pytest.raises(ProtocolViolation, match="not offered"):
        pair.lender.answered(1, True)
    del view
    pair.borrower.take_ended()
    with pytest.raises(ProtocolViolation, match="is too small"):
        pair.borrower.borrow(1, SIZE + 1)


def test_segments_belong_to_one_session(pair: Pair) -> None:
    """A peer's messages on another session, with guessed numbers, affect that session's own segments."""
    number = pair.offer()
    lent = pair.lend(memoryview(bytearray(SIZE)))
    assert number is not None and lent == number
    other = Pair()
    with pytest.raises(ProtocolViolation, match="is not known"):
        other.borrower.borrow(number, SIZE)
    with pytest.raises(ProtocolViolation, match="withdrawn"):
        other.borrower.withdrawn([number])
    with pytest.raises(ProtocolViolation, match="not lent"):
        other.lender.returned([number])
    with pytest.raises(ProtocolViolation, match="not lent"):
        other.lender.kept([number])
    with pytest.raises(ProtocolViolation, match="not offered"):
        other.lender.answered(number, False)
    with pytest.raises(ProtocolViolation, match="not refused"):
        other.lender.unread(number)
    assert len(pair.borrower.borrow(number, SIZE)) == SIZE
    pair.pass_back()
    assert pair.lend(memoryview(bytearray(SIZE))) == number
    pair.borrower.borrow(number, SIZE)
    pair.pass_back()
    other.lender.close()
    other.borrower.close()


def test_a_loan_that_is_given_up_may_have_been_returned_already() -> None:
    """By a peer that guesses numbers: the sender's own error stays, and its message is given up as any other."""
    lender = Lender()
    offer = lender.offer(LEND_FROM_BYTES)
    assert offer is not None
    number = offer[0]
    lender.answered(number, accepted=True)

    class Failing(LargeBuffer):
        def copy_to(self, address: int) -> None:
            lender.returned([number])
            raise BufferError("cannot be copied")

    data = memoryview(bytearray(LEND_FROM_BYTES))
    with pytest.raises(BufferError, match="cannot be copied"):
        lender.lend([(0, Failing(data))])
    assert lender.lend([(0, LargeBuffer(data))]) == offer[0]
    lender.returned([offer[0]])
    lender.take_back([offer[0]])
    assert repr(lender) == f"<Lender 0 lent, 1 free, {LEND_FROM_BYTES} B>"


def test_memory_in_use_outlives_the_session_and_nothing_else_does() -> None:
    gc.collect()
    before, descriptors = _maps(), len(os.listdir("/proc/self/fd"))
    pair = Pair()
    pair.offer()
    assert pair.lend(memoryview(b"\7" * SIZE)) == 1
    view = pair.borrower.borrow(1, SIZE)
    pair.lender.close()
    pair.borrower.close()
    pair.lender.returned([1])  # late news are no violation
    assert view[SIZE - 1] == 7
    assert len(_maps() - before) == 1
    del view
    assert not _maps() - before  # an earlier test's may have gone meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_memory_that_a_forked_child_may_read_is_not_used_again(pair: Pair) -> None:
    pair.offer()
    pair.offer()
    assert {pair.lend(memoryview(b"\1" * SIZE)) for _ in range(2)} == {1, 2}
    view = pair.borrower.borrow(1, SIZE)
    fork_and_end()
    later = pair.borrower.borrow(2, SIZE)
    del view, later
    pair.pass_back()
    assert pair.lend(memoryview(b"\2" * SIZE)) == 2
    assert pair.lend(memoryview(b"\3" * SIZE)) is None
    assert repr(pair.lender) == f"<Lender 1 lent, 0 free, {SIZE} B>"
    assert repr(pair.borrower) == "<Borrower 0 in use of 1>"
    with pytest.raises(ProtocolViolation, match="was kept, but not lent"):
        pair.lender.kept([1])


def fork_and_end() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def _maps() -> set[str]:
    """Segments that are mapped, each with its address and inode."""
    with open("/proc/self/maps") as lines:
        return {line for line in lines if "memfd:rpcdist" in line}


def lend_and_free(pair: Pair, size: int) -> None:
    """A tensor of that size arrives and is freed; its segment was made for it."""
    pair.offer(size)
    number = pair.lend(memoryview(bytearray(size)))
    assert number is not None
    pair.borrower.borrow(number, size)


def test_small_segments_are_returned_together(pair: Pair) -> None:
    assert not pair.borrower.is_return_due
    for _ in range(RETURN_TOGETHER - 1):
        lend_and_free(pair, SIZE)
        assert pair.borrower.ended and not pair.borrower.is_return_due  # the timer tells of them
    lend_and_free(pair, SIZE)
    assert pair.borrower.is_return_due
    pair.pass_back()
    assert not pair.borrower.is_return_due and not pair.borrower.ended


def test_a_large_segment_is_returned_at_once(pair: Pair) -> None:
    lend_and_free(pair, SIZE)
    lend_and_free(pair, RETURN_TOGETHER_BYTES + 1)
    lend_and_free(pair, SIZE)
    assert pair.borrower.is_return_due
    pair.pass_back()
    assert not pair.borrower.is_return_due
