"""The local channel's stream on a pair of Unix sockets: frames, chunks in place, limits, backpressure and the end."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from chunk_envelopes import chunk_envelope

from rpcdist.errors import ProtocolViolation, TransportError
from rpcdist.testing import eventually_async
from rpcdist.transport._channels import socket_channel
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._channels.socket_pipe import SocketPipe
from rpcdist.transport._framing.frames import CHUNK_BYTES, chunk_head, parse_chunk_head
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES
from rpcdist.transport.unix_sockets import names_senders

LIMIT_S = 20.0
LENGTH = struct.Struct("<I")
LAST = 1 << 31
SIZES = [0, 1, 3, 4, 100, 65535, 65536, 65537, 131068, 131072, 131073, 200_000, 1 << 20]


def is_read(channel: SocketChannel) -> bool:
    """Whether a thread or the loop reads it now."""
    return channel._reader._lock.locked()


def framed(data: bytes, flag: int = 0) -> bytes:
    return LENGTH.pack(len(data) | flag) + data


class Receiver:
    """Remembers what a stream delivers; one buffer takes the chunks of transfer 1."""

    def __init__(self, size: int = 0) -> None:
        self.frames: list[bytes] = []
        self.buffer = bytearray(size)
        self.placed_sizes: list[int] = []
        self.failing: Exception | None = None
        self._arrived = asyncio.Event()

    def receive(self, data: bytes | bytearray) -> None:
        if self.failing is not None:
            raise self.failing
        self.frames.append(bytes(data))
        self._arrived.set()

    def place(self, transfer: int, buffer: int, offset: int, size: int) -> memoryview | None:
        return memoryview(self.buffer)[offset : offset + size] if transfer == 1 else None

    def placed(self, transfer: int, buffer: int, size: int) -> None:
        assert (transfer, buffer) == (1, 0)
        self.placed_sizes.append(size)
        self._arrived.set()

    async def until(self, frames: int = 0, placed: int = 0) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.frames) < frames or len(self.placed_sizes) < placed:
                self._arrived.clear()
                await self._arrived.wait()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets; a test may close them."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    names_senders(ours, on=True)
    yield ours, theirs
    ours.close()
    theirs.close()


async def reason_of(awaitable: Any) -> str:
    with pytest.raises(TransportError) as caught:
        await asyncio.wait_for(awaitable, LIMIT_S)
    return str(caught.value)


async def send_all(theirs: socket.socket, data: bytes, steps: Iterator[int] | None = None) -> None:
    """Sends in runs of the given sizes, each when the one before was taken from us."""
    at = 0
    while at < len(data):
        size = next(steps) if steps is not None else len(data)
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(theirs, data[at : at + size]), LIMIT_S)
        await asyncio.sleep(0)
        at += size


# ---------------------------------------------------------------- frames


async def test_frames_of_all_sizes_arrive_as_they_were(ends: Any) -> None:
    here, there = SocketChannel(ends[0], "b"), SocketChannel(ends[1], "a")
    receiver = Receiver()
    delivering = asyncio.ensure_future(there.deliver(receiver))
    sent = [os.urandom(size) for size in SIZES]
    for data in sent:
        await asyncio.wait_for(here.write_parts(data), LIMIT_S)
    await receiver.until(frames=len(sent))
    assert receiver.frames == sent
    here.abort("done")
    assert await reason_of(delivering) == "a closed the connection: done"
    there.abort("done")


@pytest.mark.parametrize("seed", range(4))
async def test_frames_arrive_however_they_are_cut(ends: Any, seed: int) -> None:
    chance = random.Random(seed)
    steps = iter(lambda: chance.choice([1, 3, 5, 64, 70, 4096, 65536, 100_000, 300_000]), None)
    chunk = chance.randbytes(150_000)
    envelopes = [
        chance.randbytes(10),
        chunk_envelope(1, 0, 0, memoryview(chunk)),  # received in place
        b"",
        chance.randbytes(150_000),  # large, and no chunk
        chunk_envelope(2, 0, 0, memoryview(chunk)),  # a chunk that nobody waits for
        chunk_envelope(1, 0, 150_000, memoryview(chunk[:10])),  # a small one
        chance.randbytes(70_000),
    ]
    stream, receiver = SocketChannel(ends[0], "b"), Receiver(150_000)
    delivering = asyncio.ensure_future(stream.deliver(receiver))
    await send_all(ends[1], b"".join(map(framed, envelopes)), steps)
    await receiver.until(frames=len(envelopes) - 1, placed=1)
    assert receiver.frames == [data for data in envelopes if data is not envelopes[1]]
    assert (receiver.placed_sizes, bytes(receiver.buffer)) == ([150_000], chunk)
    delivering.cancel()
    stream.abort("done")


def test_the_head_of_a_chunk_is_read_alone() -> None:
    head = chunk_head(1 << 40, 3, 5 << 30, CHUNK_BYTES)
    size = len(head) + CHUNK_BYTES
    assert parse_chunk_head(head, size) == (1 << 40, 3, 5 << 30, CHUNK_BYTES)
    for damaged in (b"", head[:-1], b"\x0a" + head[1:], head[:2], b"\x7a" + b"\xff" * 70):
        assert parse_chunk_head(damaged, size) is None
    assert parse_chunk_head(head, size + 1) is None


async def test_what_comes_right_after_the_handshake_is_for_the_channel(ends: Any) -> None:
    ends[0].setblocking(False)
    ends[1].sendall(framed(b"hello") + framed(b"first") + framed(b"second")[:5])
    assert await SocketPipe(ends[0], "b").read() == b"hello"
    stream, receiver = SocketChannel(ends[0], "b"), Receiver()
    delivering = asyncio.ensure_future(stream.deliver(receiver))
    await receiver.until(frames=1)
    ends[1].sendall(framed(b"second")[5:])
    await receiver.until(frames=2)
    assert receiver.frames == [b"first", b"second"]
    delivering.cancel()
    stream.abort("done")


async def test_a_channel_that_has_ended_keeps_no_memory_of_a_chunk(ends: Any) -> None:
    """Its owner may keep the channel, and the memory may belong to a pool."""
    begun = asyncio.Event()

    class NotingReceiver(Receiver):
        def place(self, transfer: int, buffer: int, offset: int, size: int) -> memoryview | None:
            begun.set()
            return super().place(transfer, buffer, offset, size)

    channel, receiver = SocketChannel(ends[0], "a"), NotingReceiver(CHUNK_BYTES)
    delivering = asyncio.ensure_future(channel.deliver(receiver))
    await send_all(ends[1], framed(chunk_envelope(1, 0, 0, bytes(CHUNK_BYTES)))[:100_000])
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    channel.abort("enough")
    assert await reason_of(delivering) == "enough"

    def is_free() -> bool:
        try:
            receiver.buffer.clear()
        except BufferError:  # a view of it exists
            return False
        return True

    await eventually_async(is_free)


# ---------------------------------------------------------------- turns


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame that the loop takes ends its turn."""
    monkeypatch.setattr(socket_channel, "READ_TURN_S", -1.0)


async def test_a_burst_of_small_frames_lets_others_in(ends: Any, short_turns: None) -> None:
    order: list[str] = []

    class Noting(Receiver):
        def receive(self, data: bytes | bytearray) -> None:
            order.append(bytes(data).decode())
            super().receive(data)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        many, few = SocketChannel(ends[0], "many"), SocketChannel(ours, "few")
        receivers = Noting(), Noting()
        ends[1].sendall(b"".join(framed(b"many") for _ in range(1000)) + framed(b"last"))
        theirs.sendall(framed(b"few") * 3)
        delivering = [
            asyncio.ensure_future(many.deliver(receivers[0])),
            asyncio.ensure_future(few.deliver(receivers[1])),
        ]
        await receivers[1].until(frames=3)
        assert len(receivers[0].frames) < 20
        assert many.has_unread is False and is_read(many)  # the rest lies in the channel
        await receivers[0].until(frames=1001)
        assert receivers[0].frames == [b"many"] * 1000 + [b"last"] and order.count("few") == 3
        await eventually_async(lambda: not is_read(many), "a thread may read again")
        for task in delivering:
            task.cancel()
        many.abort("done")
        few.abort("done")


async def test_what_a_peer_sent_before_it_went_arrives_though_turns_are_short(ends: Any, short_turns: None) -> None:
    stream, receiver = SocketChannel(ends[0], "b"), Receiver()
    large = b"x" * 100_000
    ends[1].sendall(framed(b"first") * 300)
    ends[1].sendall(framed(large)[:60_000])
    delivering = asyncio.ensure_future(stream.deliver(receiver))
    await receiver.until(frames=1)
    ends[1].sendall(framed(large)[60_000:] + framed(b"last") * 2)
    ends[1].close()
    assert (await reason_of(delivering)).startswith("the connection with b broke: ")
    assert receiver.frames == [b"first"] * 300 + [large] + [b"last"] * 2
    stream.abort("done")


async def test_an_abort_between_two_turns_drops_the_frames_that_are_left(ends: Any, short_turns: None) -> None:
    stream, receiver = SocketChannel(ends[0], "b"), Receiver()
    ends[1].sendall(framed(b"x") * 300)
    delivering = asyncio.ensure_future(stream.deliver(receiver))
    await receiver.until(frames=1)
    stream.abort("enough")
    assert await reason_of(delivering) == "enough"
    assert len(receiver.frames) < 300


# ---------------------------------------------------------------- before the proof


@pytest.mark.parametrize("size", [MAX_HANDSHAKE_BYTES + 1, (1 << 32) - 1])
async def test_a_stranger_may_not_announce_much(ends: Any, size: int) -> None:
    ends[0].setblocking(False)
    ends[1].sendall(LENGTH.pack(size))
    with pytest.raises(ProtocolViolation, match=f"b announced a handshake message of {size} bytes"):
        await asyncio.wait_for(SocketPipe(ends[0], "b").read(), LIMIT_S)


async def test_what_a_stranger_sends_unasked_stays_in_its_socket(ends: Any) -> None:
    ends[0].setblocking(False)
    pipe = SocketPipe(ends[0], "b")
    ends[1].sendall(framed(b"x"))
    assert await pipe.read() == b"x"
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            ends[1].send(framed(b"y" * MAX_HANDSHAKE_BYTES) * 30)
            await asyncio.sleep(0)
    assert await pipe.read() == b"y" * MAX_HANDSHAKE_BYTES


async def test_descriptors_of_a_stranger_are_dropped_by_the_kernel(ends: Any) -> None:
    ends[0].setblocking(False)
    inside, outside = os.pipe()
    socket.send_fds(ends[1], [framed(b"x")], [outside])
    os.close(outside)
    assert await SocketPipe(ends[0], "b").read() == b"x"
    assert os.read(inside, 1) == b""  # nobody has the other end any more
    os.close(inside)


async def test_a_message_that_ends_early_is_none(ends: Any) -> None:
    ends[0].setblocking(False)
    ends[1].sendall(framed(b"hello")[:6])
    ends[1].close()
    assert await SocketPipe(ends[0], "b").read() is None


async def test_a_cancelled_read_leaves_the_socket_to_its_owner(ends: Any) -> None:
    ends[0].setblocking(False)
    pipe = SocketPipe(ends[0], "b")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pipe.read(), 0.01)
    ends[1].sendall(framed(b"late"))
    assert await pipe.read() == b"late"


# ---------------------------------------------------------------- the end


async def test_the_reason_is_told_even_if_something_was_left_unread(ends: Any) -> None:
    """The kernel reports an error beside the data then, and uvloop calls the reader once for the two."""
    here, there = SocketChannel(ends[0], "b"), SocketChannel(ends[1], "a")
    delivering = asyncio.ensure_future(there.deliver(Receiver()))
    await asyncio.sleep(0)
    there.put(b"never read")
    here.abort("enough\x1b[2J of this")
    assert await reason_of(delivering) == "a closed the connection: enough?[2J of this"
    there.abort("done")


@pytest.mark.parametrize("unread", [b"", b"never read"], ids=["all read", "unread"])
@pytest.mark.parametrize(
    "last", [b"", framed(b"x" * 100)[:50], framed(b"x" * 70_000)[:5000]], ids=["", "small", "large"]
)
async def test_a_peer_that_is_gone_is_noticed_at_once(ends: Any, unread: bytes, last: bytes) -> None:
    stream, receiver = SocketChannel(ends[0], "b"), Receiver()
    delivering = asyncio.ensure_future(stream.deliver(receiver))
    await asyncio.sleep(0)
    if unread:
        stream.put(unread)
    ends[1].sendall(framed(b"whole") + last)
    ends[1].close()
    assert (await reason_of(delivering)).startswith("the connection with b broke: ")
    assert receiver.frames == [b"whole"]
    with pytest.raises(TransportError, match="broke"):
        stream.put(b"too late")
    stream.abort("done")


async def test_a_peer_that_goes_while_we_wait_to_write(ends: Any) -> None:
    stream = SocketChannel(ends[0], "b")
    delivering = asyncio.ensure_future(stream.deliver(Receiver()))
    writing = asyncio.ensure_future(stream.write_parts(b"x" * (32 << 20)))
    await eventually_async(lambda: not stream.is_free, "the sockets are full")
    assert not writing.done()
    ends[1].close()
    assert "broke" in await reason_of(writing) and "broke" in await reason_of(delivering)
    stream.abort("done")


async def test_a_peer_that_only_ends_its_own_direction_is_gone(ends: Any) -> None:
    stream = SocketChannel(ends[0], "b")
    delivering = asyncio.ensure_future(stream.deliver(Receiver()))
    ends[1].shutdown(socket.SHUT_WR)
    assert "the process there is gone" in await reason_of(delivering)
    stream.abort("done")


async def test_an_abort_in_the_middle_of_a_frame_does_not_complete_it(ends: Any) -> None:
    here, there, receiver = SocketChannel(ends[0], "b"), SocketChannel(ends[1], "a"), Receiver()
    data = b"x" * (32 << 20)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    here.put(data[:100_000])
    assert not here.is_free
    here._rest = [here._rest[-1][-5:]]  # what is missing is shorter than any last word
    here.abort("a reason that is longer than what is missing")
    delivering = asyncio.ensure_future(there.deliver(receiver))
    assert "broke" in await reason_of(delivering)
    assert receiver.frames == []
    there.abort("done")


@pytest.mark.parametrize("data", [LENGTH.pack(64 << 20), LENGTH.pack(5000 | LAST)], ids=["frame", "reason"])
async def test_a_proven_peer_has_limits_too(ends: Any, data: bytes) -> None:
    stream = SocketChannel(ends[0], "b")
    ends[1].sendall(data)
    with pytest.raises(ProtocolViolation, match="announced"):
        await asyncio.wait_for(stream.deliver(Receiver()), LIMIT_S)
    stream.abort("done")


@pytest.mark.parametrize("error", [KeyError("on purpose"), BlockingIOError("on purpose"), OSError("on purpose")])
async def test_what_the_receiver_raises_ends_the_stream(ends: Any, error: Exception) -> None:
    stream, receiver = SocketChannel(ends[0], "b"), Receiver()
    receiver.failing = error
    ends[1].sendall(framed(b"x") * 3)
    with pytest.raises(type(error), match="on purpose"):
        await asyncio.wait_for(stream.deliver(receiver), LIMIT_S)
    stream.abort("done")
    stream.abort("again")
    with pytest.raises(TransportError, match="is closed"):
        stream.put(b"x")


# ---------------------------------------------------------------- writing


async def test_a_slow_reader_holds_the_writer_back(ends: Any) -> None:
    here, there = SocketChannel(ends[0], "b"), SocketChannel(ends[1], "a")
    written = 0

    async def write() -> None:
        nonlocal written
        while written < 64 << 20:
            await here.write_parts(b"x" * (1 << 20))
            written += 1 << 20

    writing = asyncio.ensure_future(write())
    await asyncio.sleep(0.05)  # in which a writer that nobody holds back would write all
    assert written < 32 << 20 and not here.is_free  # what fits into the sockets, and no more
    receiver = Receiver()
    delivering = asyncio.ensure_future(there.deliver(receiver))
    await asyncio.wait_for(writing, LIMIT_S)
    await receiver.until(frames=64)
    here.abort("done")
    await reason_of(delivering)
    there.abort("done")


async def test_a_cancelled_write_is_completed_by_the_next_flush(ends: Any) -> None:
    here, there, receiver = SocketChannel(ends[0], "b"), SocketChannel(ends[1], "a"), Receiver()
    payload = bytearray(os.urandom(2 << 20))
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(here.write_parts(b"head", memoryview(payload)), 0.02)
    assert not here.is_free
    delivering = asyncio.ensure_future(there.deliver(receiver))
    await asyncio.wait_for(here.flush(), LIMIT_S)
    await here.write_parts(b"next")
    await receiver.until(frames=2)
    assert receiver.frames == [b"head" + payload, b"next"] and here.is_free
    delivering.cancel()
    here.abort("done")
    there.abort("done")


async def test_closing_beside_a_thread_that_writes_never_touches_another_file(ends: Any) -> None:
    """The number of a closed socket goes to the next file that is opened; nothing may be written to that."""
    loop = asyncio.get_running_loop()
    for _ in range(30):
        ours, theirs = socket.socketpair()
        stream = SocketChannel(ours, "b")
        started = threading.Event()
        errors: list[TransportError] = []

        def write(stream: SocketChannel = stream, started: threading.Event = started, errors: Any = errors) -> None:
            try:
                while stream.is_free:
                    stream.put(b"x")
                    started.set()
            except TransportError as exc:
                errors.append(exc)

        thread = threading.Thread(target=write)
        thread.start()
        assert started.wait(LIMIT_S)
        stream.abort("enough")
        a, b = socket.socketpair()  # takes the number
        await loop.run_in_executor(None, thread.join, LIMIT_S)
        b.setblocking(False)
        with pytest.raises(BlockingIOError):
            b.recv(1)
        for end in (a, b, theirs):
            end.close()
        assert all("is closed" in str(error) for error in errors)
    await loop.shutdown_default_executor()


async def test_a_stream_is_done_with_its_descriptor(ends: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        streams = [SocketChannel(end, "b") for end in socket.socketpair()]
        tasks = [asyncio.ensure_future(stream.deliver(Receiver())) for stream in streams]
        await asyncio.sleep(0)
        streams[0].abort("enough")
        await asyncio.wait(tasks, timeout=LIMIT_S)
        for task in tasks:
            assert isinstance(task.exception(), TransportError)
        streams[1].abort("enough")
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1
