"""Large buffers in shared memory, on sessions over a pair of Unix sockets: what is lent, what comes back, and abuse."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from session_pairs import LIMIT_S, ChannelPair, call
from transport_nodes import Memory

from rpcdist._proto import rpc_pb2
from rpcdist.inspection.facts import LentMemory
from rpcdist.transport._framing.frames import CHUNK_BYTES, ReturnedSegments, frame, returned_frame
from rpcdist.transport.lending import LEND_FROM_BYTES, RETURN_TOGETHER
from rpcdist.transport.shared_memory import Segment, unavailable
from rpcdist.transport.unix_sockets import MAX_DESCRIPTORS

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"memory cannot be shared here: {unavailable()}")

T = TypeVar("T")
LARGE = LEND_FROM_BYTES


@pytest.fixture
async def pair() -> AsyncIterator[ChannelPair]:
    pair = ChannelPair(shares=(True, True))
    await asyncio.sleep(0)
    yield pair
    await pair.end()


async def exchange(pair: ChannelPair, data: bytes, side: int = 0) -> bytes:
    """Sends a buffer; returns what arrived, whose memory is free again then."""
    pair.sessions[side].send(call(1), [Memory(data)])
    _, buffers = await pair.handlers[1 - side].next()
    return buffers[0]


def lent(pair: ChannelPair, side: int = 0) -> LentMemory:
    """The segments that one side lends."""
    return pair.sessions[side].lent_memory or LentMemory("nobody", 0, 0, 0)


async def until(condition: Callable[[], T]) -> T:
    """Lets the sessions run until the condition is true."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if value := condition():
                return value
            await asyncio.sleep(0)


async def until_free(pair: ChannelPair) -> None:
    """Until the first side has a segment that it may use, and no other."""
    await until(lambda: lent(pair).num_segments > lent(pair).num_lent == 0)


async def until_returned(pair: ChannelPair, side: int = 0) -> None:
    """Leases go back by a timer of the session, if no message takes them along."""
    await until(lambda: not lent(pair, side).num_lent)


async def test_each_message_lends_its_buffer_from_the_first_on(pair: ChannelPair) -> None:
    for letter in (b"a", b"b", b"c"):
        pair.sessions[0].send(call(2), [Memory(letter * LARGE)])
        async with asyncio.timeout(LIMIT_S):
            message, [buffer] = await pair.handlers[1].received.get()
        assert len(message.loans) == 1 and list(message.large) == [LARGE]
        assert buffer.view == letter * LARGE
        del buffer
        await until_returned(pair)
    assert lent(pair).num_segments == 1


@pytest.mark.parametrize("side", [0, 1])
async def test_messages_in_a_row_use_few_segments_and_none_stays_lent(pair: ChannelPair, side: int) -> None:
    for number in range(50):
        data = bytes([number]) * LARGE
        assert await exchange(pair, data, side) == data
        assert await exchange(pair, b"an answer, which takes the news along", 1 - side)
    await until_returned(pair, side)
    assert lent(pair, side).num_segments <= RETURN_TOGETHER + 2


async def test_lent_and_other_buffers_of_one_message(pair: ChannelPair) -> None:
    sizes = [40_000, LARGE, 0, LARGE, 100]
    for _ in range(4):
        pair.sessions[0].send(call(3), [Memory(os.urandom(1)[:1] * size) for size in sizes])
        number, received = await pair.handlers[1].next()
        assert number == 3 and [len(data) for data in received] == sizes
        assert all(len(set(data)) <= 1 for data in received)


async def test_the_first_message_of_many_buffers_is_lent_as_a_whole(pair: ChannelPair) -> None:
    sizes = [LARGE + 1000 * number for number in range(300)]
    pair.sessions[0].send(call(1), [Memory(bytes([number % 256]) * size) for number, size in enumerate(sizes)])
    async with asyncio.timeout(LIMIT_S):
        message, buffers = await pair.handlers[1].received.get()
    assert sorted(loan.buffer for loan in message.loans) == list(range(300))
    assert len({loan.segment for loan in message.loans}) < 20
    assert all(bytes(buffer.view) == bytes([number % 256]) * sizes[number] for number, buffer in enumerate(buffers))
    del buffers
    await until_returned(pair)


@pytest.mark.parametrize("sizes", [[LARGE], [LARGE, 100, 2 * LARGE], [LARGE + number for number in range(30)]])
async def test_a_receiver_without_descriptors_gets_the_first_message_too(
    pair: ChannelPair, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = pair.streams[1]
    take = channel.take_descriptor
    taken: list[int] = []

    def close() -> None:  # None, as where none was left for it
        taken.append(take())
        os.close(taken[-1])

    monkeypatch.setattr(channel, "take_descriptor", close)
    for number in range(3):
        pair.sessions[0].send(call(number), [Memory(bytes([number]) * size) for size in sizes])
        assert await pair.handlers[1].next() == (number, [bytes([number]) * size for size in sizes])
    assert taken, "no buffer was lent"


async def test_a_receiver_that_refuses_while_messages_are_under_way() -> None:
    pair = ChannelPair(shares=(True, False))
    for number in range(40):
        pair.sessions[0].send(call(number), [Memory(bytes([number]) * (LARGE + number)), Memory(b"small" * 10_000)])
    received = dict([await pair.handlers[1].next() for _ in range(40)])
    assert received == {n: [bytes([n]) * (LARGE + n), b"small" * 10_000] for n in range(40)}
    await until(lambda: lent(pair) == LentMemory("b", 0, 0, 0))
    await pair.end()


async def test_threads_that_send_at_the_same_time(pair: ChannelPair) -> None:
    def send(thread: int) -> None:
        for _ in range(20):
            pair.sessions[0].send(call(thread), [Memory(bytes([thread]) * LARGE)])

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(1, 5)]
    for thread in threads:
        thread.start()
    for _ in range(80):
        number, [data] = await pair.handlers[1].next()
        assert data == bytes([number]) * LARGE
    for thread in threads:
        thread.join(LIMIT_S)
    await until_returned(pair)


@pytest.mark.parametrize("shares", [(True, False), (False, True)], ids=["receiver refuses", "sender does not lend"])
async def test_one_side_that_does_not_share_is_enough(shares: tuple[bool, bool]) -> None:
    pair = ChannelPair(shares=shares)
    for _ in range(20):
        assert await exchange(pair, b"a" * LARGE) == b"a" * LARGE
    assert lent(pair).size_bytes == 0
    await pair.end()


async def test_a_descriptor_arrives_when_the_socket_was_full(pair: ChannelPair) -> None:
    pair.sessions[0].send(call(1), [Memory(b"x" * (64 << 20))])  # its chunks fill the socket
    pair.sessions[0].send(call(2), [Memory(b"y" * LARGE)])
    received = dict([await pair.handlers[1].next(), await pair.handlers[1].next()])
    assert {number: len(buffers[0]) for number, buffers in received.items()} == {1: 64 << 20, 2: LARGE}
    await until_free(pair)
    assert lent(pair).num_segments == 2


async def test_memory_that_somebody_uses_outlives_the_session(pair: ChannelPair) -> None:
    await exchange(pair, b"a" * LARGE)
    await until_free(pair)
    pair.sessions[0].send(call(2), [Memory(b"b" * LARGE)])
    message, [buffer] = await pair.handlers[1].received.get()
    assert len(message.loans) == 1
    gc.collect()  # what earlier tests have dropped
    descriptors = len(os.listdir("/proc/self/fd"))
    await pair.end()
    assert buffer.view == b"b" * LARGE
    del buffer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors - 3  # the two sockets, and the epoll instance of their loop


# ---------------------------------------------------------------- a peer that abuses it


async def closed_reason(pair: ChannelPair, side: int = 0) -> str:
    return await until(lambda: pair.sessions[side].closed_reason) or ""


def raw(message: rpc_pb2.Message | ReturnedSegments) -> bytes:
    data = returned_frame(message.numbers) if isinstance(message, ReturnedSegments) else frame(message)
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (rpc_pb2.Message(segment_offer={"segment": 1, "size": LARGE}), "but sent no descriptor"),
        (rpc_pb2.Message(segment_answer={"segment": 1, "accepted": True}), "was answered, but not offered"),
        (ReturnedSegments([1]), "was returned, but not lent"),
        (rpc_pb2.Message(segment_news={"withdrawn": [1]}), "was withdrawn"),
        (rpc_pb2.Message(call={"id": 1}, transfer=1, large=[LARGE], loans=[{"segment": 7}]), "is not known"),
        (rpc_pb2.Message(call={"id": 1}, transfer=1, large=[LARGE], loans=[{"buffer": 1}]), "buffer 1 of 1"),
    ],
    ids=["offer", "answer", "returned", "withdrawn", "loan", "index"],
)
async def test_a_lie_ends_the_session(
    pair: ChannelPair, message: rpc_pb2.Message | ReturnedSegments, reason: str
) -> None:
    pair.sockets[1].send(raw(message))
    assert reason in await closed_reason(pair)


async def test_descriptors_that_nobody_announced_end_the_session(pair: ChannelPair) -> None:
    with Segment.create(LARGE) as segment:
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(MAX_DESCRIPTORS + 1):
            message = rpc_pb2.Message(heartbeat=rpc_pb2.Heartbeat())
            socket.send_fds(pair.sockets[1], [raw(message)], [segment.fileno()])
        assert "sent descriptors that no message announced" in await closed_reason(pair)
        await pair.end()
        assert len(os.listdir("/proc/self/fd")) <= descriptors - 3


async def test_an_offer_for_whose_descriptor_there_is_no_room_is_refused(pair: ChannelPair) -> None:
    offer = rpc_pb2.Message(segment_offer={"segment": 1, "size": LARGE})
    with Segment.create(LARGE) as segment, no_more_descriptors():
        socket.send_fds(pair.sockets[1], [raw(offer)], [segment.fileno()])
        assert "was answered, but not offered" in await closed_reason(pair, side=1)  # the refusal


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_message_that_is_aborted_gives_back_what_was_lent_for_it(pair: ChannelPair) -> None:
    await exchange(pair, bytes(LARGE))
    await until_free(pair)
    session = pair.sessions[0]
    number = session.send(call(1, bytes(2 * CHUNK_BYTES)), [Memory(bytes(LARGE))])  # too long for one envelope
    assert lent(pair).num_lent == 1
    session.abort_transfer(number, "for the test")
    await until_returned(pair)
    assert await exchange(pair, b"x" * LARGE) == b"x" * LARGE


async def test_a_descriptor_of_something_else_is_refused_and_closed(pair: ChannelPair) -> None:
    reading, writing = os.pipe()
    message = rpc_pb2.Message(segment_offer={"segment": 1, "size": LARGE})
    socket.send_fds(pair.sockets[1], [raw(message)], [reading])
    os.close(reading)
    with pytest.raises(BrokenPipeError):  # when its last reader is gone
        await until(lambda: not os.write(writing, b"x"))
    os.close(writing)
    assert "was answered, but not offered" in await closed_reason(pair, side=1)  # the refusal; this end offered nothing


class OfDevice(Memory):
    """Memory to which a device copies."""

    may_wait = True
    is_there = False

    def part(self, start: int, end: int) -> memoryview:
        assert self.is_there, "the reader would wait"
        return super().part(start, end)

    def copy_to(self, address: int) -> None:
        self.is_there = True  # this thread has waited
        super().copy_to(address)

    def is_ready(self, end: int) -> bool:
        return self.is_there


async def test_on_a_loop_shared_memory_does_not_take_what_a_device_still_copies(pair: ChannelPair) -> None:
    """A loop would wait for the device, and other threads do."""
    await exchange(pair, bytes(LARGE))
    await until_free(pair)
    late = OfDevice(b"a" * LARGE)
    pair.sessions[0].send(call(1), [late])
    assert not late.is_there and not lent(pair).num_lent
    late.is_there = True
    assert await pair.handlers[1].next() == (1, [b"a" * LARGE])
    await asyncio.to_thread(pair.sessions[0].send, call(2), [OfDevice(b"b" * LARGE)])
    assert await pair.handlers[1].next() == (2, [b"b" * LARGE])
    await asyncio.get_running_loop().shutdown_default_executor()
