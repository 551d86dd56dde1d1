"""Sessions between two queues in memory, and over the local channel: turns, aborts, violations, silence and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from chunk_envelopes import chunk_envelope
from session_pairs import LIMIT_S, ChannelPair, MemoryPair, Pair, announced, call
from transport_nodes import Memory

from rpcdist.transport._framing.frames import CHUNK_BYTES, frame


@pytest.fixture(params=[MemoryPair, ChannelPair], ids=["memory", "channel"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair: Pair = request.param()
    yield pair
    await pair.end()


@pytest.fixture
async def memory_pair() -> AsyncIterator[MemoryPair]:
    pair = MemoryPair()
    yield pair
    await pair.end()


async def test_a_session_delivers_in_both_directions(pair: Pair) -> None:
    for number in range(1, 4):
        pair.sessions[0].send(call(number))
        pair.sessions[1].send(call(10 + number))
    assert [await pair.handlers[1].next() for _ in range(3)] == [(1, []), (2, []), (3, [])]
    assert [await pair.handlers[0].next() for _ in range(3)] == [(11, []), (12, []), (13, [])]
    assert [handler.opened for handler in pair.handlers] == [0, 1]


async def test_what_waits_goes_together(memory_pair: MemoryPair) -> None:
    for number in range(1, 4):
        memory_pair.sessions[0].send(call(number))
    assert [await memory_pair.handlers[1].next() for _ in range(3)] == [(1, []), (2, []), (3, [])]
    assert memory_pair.streams[0].num_written == 1


async def test_a_session_delivers_from_many_threads(pair: Pair) -> None:
    def send(thread: int) -> None:
        for index in range(200):
            pair.sessions[0].send(call(thread * 1000 + index + 1))

    await asyncio.gather(*(asyncio.to_thread(send, thread) for thread in range(4)))
    got = [(await pair.handlers[1].next())[0] for _ in range(800)]
    for thread in range(4):
        assert [n for n in got if n // 1000 == thread] == [thread * 1000 + i + 1 for i in range(200)]
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_small_messages_overtake_large_ones(pair: Pair) -> None:
    pair.sessions[0].send(call(1), [Memory(b"a" * 5 * CHUNK_BYTES)])
    pair.sessions[0].send(call(2))
    assert [(await pair.handlers[1].next())[0] for _ in range(2)] == [2, 1]


class OfDevice(Memory):
    """Memory to which a device copies; the twentieth look at it finds that done."""

    may_wait = True
    num_looks = 0

    def part(self, start: int, end: int) -> memoryview:
        assert self.num_looks > 20, "the loop would wait"
        return super().part(start, end)

    def is_ready(self, end: int) -> bool:
        self.num_looks += 1
        return self.num_looks > 20


async def test_what_a_device_copies_is_sent_when_it_is_there(pair: Pair) -> None:
    """Nobody says so: the writer looks from time to time, and writes other messages meanwhile."""
    late = OfDevice(b"a" * 2 * CHUNK_BYTES)
    pair.sessions[0].send(call(1), [late])
    pair.sessions[0].send(call(2))
    assert await pair.handlers[1].next() == (2, [])
    assert await pair.handlers[1].next() == (1, [b"a" * 2 * CHUNK_BYTES])
    assert await pair.sessions[0].drain(LIMIT_S)


async def test_an_aborted_transfer_never_arrives(pair: Pair) -> None:
    number = pair.sessions[0].send(call(1), [Memory(b"a" * 50 * CHUNK_BYTES)])
    pair.sessions[0].abort_transfer(number, "not wanted")
    pair.sessions[0].send(call(2), [Memory(b"b" * CHUNK_BYTES)])
    assert (await pair.handlers[1].next())[0] == 2
    assert await pair.sessions[0].drain(LIMIT_S)
    assert pair.handlers[1].received.empty()
    assert "0 transfers" in repr(pair.sessions[1])


@pytest.mark.parametrize("side", [0, 1])
async def test_closing_one_end_ends_both_and_says_so_once(pair: Pair, side: int) -> None:
    pair.sessions[side].close("enough")
    pair.sessions[side].close("again")
    assert await pair.sessions[0].ended(LIMIT_S) and await pair.sessions[1].ended(LIMIT_S)
    assert pair.handlers[side].closed == ["enough"]
    [reason] = pair.handlers[1 - side].closed
    assert reason == "connection closed by the peer" or reason.endswith("closed the connection: enough")
    pair.sessions[side].send(call(1))  # dropped without an error


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff", chunk_envelope(1, 0, 5, memoryview(b"late"))], ids=["no envelope", "out of order"]
)
async def test_a_violation_closes_the_session(memory_pair: MemoryPair, data: bytes) -> None:
    memory_pair.queues[1].put_nowait(frame(announced(1, 100)))
    memory_pair.queues[1].put_nowait(data)
    assert await memory_pair.sessions[1].ended(LIMIT_S)
    assert "bytes" in memory_pair.handlers[1].closed[0]


async def test_a_handler_that_fails_ends_the_session_with_a_reason(
    pair: Pair, reported_loop_errors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pair.handlers[1].failing = True
    pair.sessions[0].send(call(1))
    assert await pair.sessions[1].ended(LIMIT_S)
    assert "the handler fails" in pair.handlers[1].closed[0]
    assert "could not be handled" in caplog.text


async def test_silence_ends_a_session_and_heartbeats_prevent_it() -> None:
    pair = MemoryPair(silence_limit_s=0.4)
    await asyncio.sleep(1.0)  # 2.5 limits: only heartbeats keep it open
    assert pair.handlers[0].closed == pair.handlers[1].closed == []
    pair.streams[1].num_written = 0
    pair.tasks[1].cancel()  # and now one side falls silent, with the channel still open
    pair.streams[1].abort = lambda reason: None
    assert await pair.sessions[0].ended(LIMIT_S)
    await pair.end()


async def test_draining_says_whether_all_was_written(memory_pair: MemoryPair) -> None:
    assert await memory_pair.sessions[0].drain(LIMIT_S)
    memory_pair.sessions[0].send(call(1), [Memory(b"a" * 3 * CHUNK_BYTES)])
    assert await memory_pair.sessions[0].drain(LIMIT_S)
    assert memory_pair.streams[0].num_written == 4
    memory_pair.sessions[0].close("enough")
    await memory_pair.sessions[0].ended(LIMIT_S)
    memory_pair.sessions[0].send(call(2))
    assert not await memory_pair.sessions[0].drain(0.05)
