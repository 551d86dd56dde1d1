"""How messages are cut into stripes and put together again: pure bookkeeping."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import accumulate
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_pairs import announced, call
from transport_nodes import Memory

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._framing.frames import Chunk, parse
from rpcdist.transport._framing.incoming import (
    MAX_BUFFERS,
    MAX_CONNECTIONS,
    MAX_RANGES,
    Delivery,
    Incoming,
    IncomingBuffer,
    StripeCursor,
    heap_buffer,
    num_stripes,
    num_used,
)
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.striping import Striping
from rpcdist.transport.wire_messages import CallMessage

LIMIT_S = 20.0


def cursor_of(sizes: list[int], index: int, count: int) -> StripeCursor:
    return StripeCursor(list(accumulate(sizes)), index, count)


sizes_of_buffers = st.lists(st.integers(0, 300), min_size=1, max_size=8)


@given(sizes_of_buffers, st.integers(1, MAX_CONNECTIONS), st.integers(1, 200), st.integers(1, 4))
def test_every_byte_is_in_one_stripe(sizes: list[int], count: int, step: int, max_ranges: int) -> None:
    covered = [bytearray(size) for size in sizes]
    for index in range(num_stripes(sum(sizes), count)):
        cursor = cursor_of(sizes, index, count)
        before = (-1, -1)
        while cursor.left:
            left = cursor.left
            ranges = cursor.take(step, max_ranges)
            assert 0 < len(ranges) <= max_ranges
            assert left - cursor.left == sum(end - start for _, start, end in ranges) <= step
            for buffer, start, end in ranges:
                assert (buffer, start) > before and start < end
                before = (buffer, start)
                for at in range(start, end):
                    covered[buffer][at] += 1
        assert cursor.take(step) == []
    assert covered == [bytearray(b"\1" * size) for size in sizes]


def test_both_halves_of_a_tensor_begin_at_a_line_of_the_cache() -> None:
    (_, start, end), *_ = cursor_of([1000], 1, 2).take(1000)
    assert start % 64 == 0 and end == 1000


@pytest.mark.parametrize(
    ("mib", "count", "used", "stripes"),
    [(0.25, 16, 8, 8), (1, 16, 8, 8), (8, 16, 8, 8), (12, 16, 12, 12), (64, 16, 16, 64), (4, 2, 2, 2), (64, 2, 2, 8)],
)
def test_a_large_message_has_several_stripes_for_each_connection(
    mib: float, count: int, used: int, stripes: int
) -> None:
    """1 MiB in 16 stripes took 1.7 times as long as in 8."""
    total = int(mib * 2**20)
    assert num_used(total, count) == used and num_stripes(total, count) == stripes
    assert all(cursor_of([total], index, count).left for index in range(stripes))
    assert not cursor_of([total], stripes, count).left


def test_a_slow_connection_carries_few_stripes_of_a_large_message() -> None:
    with closing(IoLoop()) as io, ExitStack() as stack:
        io.start_thread()
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = [socket.create_connection(server.getsockname()) for _ in range(2)]
        _, fast = (stack.enter_context(server.accept()[0]) for _ in ours)  # nobody reads the other one
        ignore: Callable[..., None] = lambda *_: None  # noqa: E731
        striping = Striping(io, Incoming(), "peer", ignore, ignore, ignore, None, LIMIT_S)
        stack.callback(striping.close)
        striping.begin(ours)
        assert striping.take(1, 1, [Memory(bytes(64 << 20))], [64 << 20])
        fast.settimeout(LIMIT_S)
        reader = stack.enter_context(fast.makefile("rb"))
        head, received = struct.Struct("<QII"), Counter[int]()
        while sum(num_bytes == 8 << 20 for num_bytes in received.values()) < 7:
            _, index, num_bytes = head.unpack(reader.read(head.size))
            received[index] += len(reader.read(num_bytes))


def pieces_of(sizes: list[int], data: list[bytes], count: int, step: int) -> list[list[tuple[int, bytes]]]:
    """For each stripe, its index and the bytes of its pieces."""
    stripes = []
    for index in range(count):
        cursor, pieces = cursor_of(sizes, index, count), []
        while cursor.left:
            pieces.append((index, b"".join(data[buffer][start:end] for buffer, start, end in cursor.take(step))))
        stripes.append(pieces)
    return stripes


def place(incoming: Incoming, ordinal: int, index: int, count: int, piece: bytes) -> Delivery | None:
    places = incoming.stripe(ordinal, index, count, len(piece))
    assert places is not None and sum(map(len, places)) == len(piece)
    for view in places:
        view[:], piece = piece[: len(view)], piece[len(view) :]
    return incoming.stripe_placed(ordinal, index, sum(map(len, places)))


@given(sizes_of_buffers.filter(any), st.integers(1, MAX_CONNECTIONS), st.integers(1, 200), st.randoms())
def test_stripes_in_any_order_are_the_message(sizes: list[int], count: int, step: int, rng: random.Random) -> None:
    data = [rng.randbytes(size) for size in sizes]
    counted = AnnouncedBytes()
    incoming = Incoming(announced=counted)
    assert incoming.announce(announced(5, *sizes)) is None
    stripes = [stripe for stripe in pieces_of(sizes, data, count, step) if stripe]
    deliveries = []
    while stripes:
        stripe = rng.choice(stripes)
        deliveries.append(place(incoming, 1, stripe[0][0], count, stripe.pop(0)[1]))
        stripes = [stripe for stripe in stripes if stripe]
    assert deliveries[:-1] == [None] * (len(deliveries) - 1)
    assert deliveries[-1] is not None
    message, buffers = deliveries[-1]
    assert message.transfer == 5 and [bytes(buffer.view) for buffer in buffers] == data
    assert incoming.missing == 0 and "0 of" in repr(counted)


# ---------------------------------------------------------------- what arrives


def test_bytes_that_come_before_their_announcement_wait_for_it() -> None:
    incoming, got = Incoming(), []

    def read() -> None:
        got.append(incoming.stripe(2, 0, 1, 4))

    reader = threading.Thread(target=read)
    reader.start()
    incoming.announce(announced(7, 10))
    assert got == []  # it was the first, and the second is waited for
    incoming.announce(announced(8, 4))
    reader.join(LIMIT_S)
    assert [len(places[0]) for places in got if places] == [4]


def test_a_piece_of_many_buffers_takes_no_long_turn() -> None:
    """One of 1 MiB, for 65,535 buffers of 16 bytes, took memory for all of them at once: 0.8 s in which nobody read."""
    taken = []

    def allocate(size_bytes: int) -> IncomingBuffer:
        taken.append(size_bytes)
        return heap_buffer(size_bytes)

    incoming = Incoming(allocate)
    incoming.announce(announced(1, *[16] * MAX_BUFFERS))
    places = incoming.stripe(1, 0, 1, 16 * MAX_RANGES)
    assert places is not None and len(places) == len(taken) == MAX_RANGES
    incoming.stripe_placed(1, 0, 16 * MAX_RANGES)
    with pytest.raises(ProtocolViolation, match="arrived for more than 64 buffers"):
        incoming.stripe(1, 0, 1, 16 * MAX_RANGES + 1)
    assert len(taken) == MAX_RANGES


def test_no_one_waits_when_nothing_is_announced_any_more() -> None:
    incoming = Incoming()
    reader = threading.Thread(target=lambda: incoming.stripe(2, 0, 1, 4))
    reader.start()
    incoming.end_announcements()
    reader.join(LIMIT_S)
    assert not reader.is_alive() and incoming.stripe(3, 0, 1, 4) is None


def test_bytes_of_an_aborted_message_are_dropped() -> None:
    counted = AnnouncedBytes()
    incoming = Incoming(announced=counted)
    incoming.announce(announced(7, 100))
    places = incoming.stripe(1, 0, 2, 10)
    assert places is not None
    incoming.abort(7)
    places[0][:] = b"x" * 10  # whichever thread received them meanwhile
    assert incoming.stripe_placed(1, 0, 10) is None and incoming.stripe(1, 1, 2, 36) is None
    assert "0 of" in repr(counted)
    incoming.announce(announced(7, 100))  # the number is free again, and the ordinal another one
    assert incoming.stripe(1, 0, 2, 10) is None and incoming.stripe(2, 0, 2, 10) is not None


def test_a_stripe_comes_on_one_connection_at_a_time() -> None:
    """Of two pieces that arrive together, one was noted twice, and memory was handed on that nothing had written to."""
    incoming = Incoming()
    incoming.announce(announced(7, 100))
    assert incoming.stripe(1, 0, 2, 10) is not None
    with pytest.raises(ProtocolViolation, match="two connections bring stripe 0"):
        incoming.stripe(1, 0, 2, 10)
    assert incoming.stripe(1, 1, 2, 36) is not None  # another stripe
    incoming.stripe_placed(1, 0, 10)
    assert incoming.stripe(1, 0, 2, 10) is not None


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([("stripe", 65)], "for a stripe with 64 bytes left"),
        ([("stripe", 0)], "0 bytes arrived"),
        ([("stripe", 64), ("stripe", 1)], "for a stripe with 0 bytes left"),
        ([("stripe", 10), ("chunk", 10)], "in stripes, and also in chunks"),
        ([("chunk", 10), ("stripe", 10)], "in stripes, and also in chunks or lent memory"),
    ],
)
def test_what_a_peer_must_not_send(steps: list[tuple[str, int]], text: str) -> None:
    """Each would have a byte counted twice, and another one never written."""
    incoming = Incoming()
    incoming.announce(announced(7, 100))
    with pytest.raises(ProtocolViolation, match=text):
        for kind, size in steps:
            if kind == "chunk":
                incoming.chunk(Chunk(7, 0, 0, memoryview(b"x" * size)))
            else:
                place(incoming, 1, 0, 2, b"x" * size)


def test_a_wrapped_message_may_come_in_stripes() -> None:
    inner = rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(failure=rpc_pb2.Failure(text="y" * 5000)))
    body = inner.SerializeToString()
    incoming = Incoming()
    assert incoming.announce(announced(7, len(body), wrapped=True)) is None
    half = cursor_of([len(body)], 0, 2).left
    assert place(incoming, 1, 0, 2, body[:half]) is None
    assert place(incoming, 1, 1, 2, body[half:]) == (inner, [])


# ---------------------------------------------------------------- what leaves


class Taken:
    """In the place of `Striping`: takes everything from a size on."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.taken: dict[int, int] = {}  # number to ordinal
        self.aborted: list[int] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.taken)

    def take(self, number: int, ordinal: int, buffers: Any, sizes: Any, owed_bytes: int) -> bool:
        if sum(sizes) < self.least:
            return False
        self.taken[number] = ordinal
        return True

    def abort(self, number: int) -> bool:
        self.aborted.append(number)
        return number in self.taken


def queue(outgoing: Outgoing, id: int, size: int) -> int:
    buffers: list[LargeBuffer] = [Memory(b"x" * size)] if size else []
    return outgoing.add(call(id), buffers)


def test_both_sides_count_the_same_announcements() -> None:
    outgoing, incoming, striper = Outgoing(), Incoming(), Taken(1000)
    outgoing.striper = cast(Striping, striper)
    large = [queue(outgoing, id, size) for id, size in enumerate([0, 1000, 10, 0, 2000, 0, 999, 1001])]
    names: list[str] = []
    ordinals = {}
    while (envelope := outgoing.next_envelope()) is not None:
        for message in parse(envelope, names):
            if isinstance(message, CallMessage) and message.large:
                incoming.announce(message)
                ordinals[message.transfer] = incoming._num_announced
    assert striper.taken == {number: ordinals[number] for number in (large[1], large[4], large[7])}
    assert list(striper.taken.values()) == [1, 3, 5]
    assert not outgoing.is_empty and not outgoing  # not all is written, but nothing of that on this connection
    striper.taken.clear()
    assert outgoing.is_empty


def test_the_parts_of_a_stream_and_what_was_aborted_stay_here() -> None:
    outgoing, striper = Outgoing(), Taken(1000)
    outgoing.striper = cast(Striping, striper)
    item = rpc_pb2.Message()
    item.stream_item.id = 9
    outgoing.add(item, [Memory(b"x" * 5000)])
    assert outgoing.abort(queue(outgoing, 2, 5000)) == ()
    while outgoing.next_envelope() is not None:
        pass
    assert striper.taken == {}


def test_an_abort_reaches_what_was_taken() -> None:
    outgoing, striper = Outgoing(), Taken(1000)
    outgoing.striper = cast(Striping, striper)
    number = queue(outgoing, 1, 1000)
    outgoing.next_envelope()
    assert outgoing.abort(number) == () and outgoing.abort(number + 1) is None
    assert striper.aborted == [number, number + 1]
