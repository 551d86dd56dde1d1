"""A session between two queues in memory: turns, aborts, violations, silence and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rpcdist._proto import rpc_pb2
from rpcdist.errors import TransportError
from rpcdist.ids import Identity
from rpcdist.transport._frames import (
    PIECE_BYTES,
    frame,
    piece_envelope,
)
from rpcdist.transport._incoming import heap_buffer
from rpcdist.transport.session import Session

LIMIT_S = 20.0


class Bytes:
    """A large buffer of the sender."""

    def __init__(self, data: bytes) -> None:
        self.view = memoryview(data)


def call(id: int, body: bytes = b"") -> rpc_pb2.Message:
    message = rpc_pb2.Message()
    message.call.id = id
    message.call.function_pickle = body
    return message


def announced(transfer: int, *sizes: int, wrapped: bool = False) -> rpc_pb2.Message:
    return rpc_pb2.Message(transfer=transfer, large=sizes, wrapped=wrapped)


class MemoryStream:
    """One end of a lane made of two queues."""

    def __init__(self, inbox: asyncio.Queue[Any], outbox: asyncio.Queue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self.num_written = 0
        self.aborted: str | None = None

    async def read(self) -> bytes | None:
        data: bytes | None = await self._inbox.get()
        if self.aborted is not None:
            raise TransportError(self.aborted)
        return data

    async def write(self, data: bytes) -> None:
        if self.aborted is not None:
            raise TransportError(self.aborted)
        self.num_written += 1
        self._outbox.put_nowait(bytes(data))
        await asyncio.sleep(0)

    def abort(self, reason: str) -> None:
        self.aborted = reason
        self._inbox.put_nowait(None)
        self._outbox.put_nowait(None)


class Io:
    """The I/O loop, on the loop of the test."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self.loop.call_soon_threadsafe(callback, *args)

    def spawn(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        return self.loop.create_task(coroutine, name=name)


class Handler:
    """Remembers what a session tells its owner."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[rpc_pb2.Message, list[Any]]] = asyncio.Queue()
        self.opened = 0
        self.closed: list[str] = []
        self.failing = False

    def on_opened(self, session: Session) -> None:
        self.opened += 1

    def on_messages(self, session: Session, messages: list[tuple[rpc_pb2.Message, list[Any]]]) -> None:
        if self.failing:
            raise ValueError("the handler fails")
        for message in messages:
            self.received.put_nowait(message)

    def on_closed(self, session: Session, reason: str) -> None:
        self.closed.append(reason)

    def allocate(self, size_bytes: int) -> Any:
        return heap_buffer(size_bytes)

    async def next(self) -> tuple[int, list[bytes]]:
        async with asyncio.timeout(LIMIT_S):
            message, buffers = await self.received.get()
        return message.call.id, [bytes(buffer.view) for buffer in buffers]


class Pair:
    """Two sessions that are connected."""

    def __init__(self, silence_limit_s: float = 60.0) -> None:
        io: Any = Io()
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]
        self.queues = queues
        self.streams = [MemoryStream(queues[0], queues[1]), MemoryStream(queues[1], queues[0])]
        self.handlers = [Handler(), Handler()]
        self.sessions = [
            Session(
                io,
                self.streams[side],
                Identity("ab"[1 - side], 1 - side, 7),
                role="rpc",
                id=b"1",
                handler=self.handlers[side],
                silence_limit_s=silence_limit_s,
                by_me=side == 0,
            )
            for side in (0, 1)
        ]
        self.tasks = [io.spawn(session.run(), "session") for session in self.sessions]

    async def end(self) -> None:
        for session in self.sessions:
            session.close("the test is over")
        await asyncio.wait(self.tasks, timeout=LIMIT_S)
        await asyncio.sleep(0)  # the writers were cancelled; they end in the next step


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    await pair.end()


async def test_a_session_delivers_in_both_directions(pair: Pair) -> None:
    for number in range(1, 4):
        pair.sessions[0].send(call(number))
        pair.sessions[1].send(call(10 + number))
    assert [await pair.handlers[1].next() for _ in range(3)] == [(1, []), (2, []), (3, [])]
    assert [await pair.handlers[0].next() for _ in range(3)] == [(11, []), (12, []), (13, [])]
    assert [handler.opened for handler in pair.handlers] == [0, 1]
    assert pair.streams[0].num_written == 1  # what waited went together


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
    pair.sessions[0].send(call(1), [Bytes(b"a" * 5 * PIECE_BYTES)])
    pair.sessions[0].send(call(2))
    assert [(await pair.handlers[1].next())[0] for _ in range(2)] == [2, 1]


async def test_an_aborted_transfer_never_arrives(pair: Pair) -> None:
    number = pair.sessions[0].send(call(1), [Bytes(b"a" * 50 * PIECE_BYTES)])
    pair.sessions[0].abort_transfer(number, "not wanted")
    pair.sessions[0].send(call(2), [Bytes(b"b" * PIECE_BYTES)])
    assert (await pair.handlers[1].next())[0] == 2
    assert await pair.sessions[0].drain(LIMIT_S)
    assert pair.handlers[1].received.empty()
    assert pair.streams[0].num_written < 20
    assert "0 transfers" in repr(pair.sessions[1])


@pytest.mark.parametrize("side", [0, 1])
async def test_closing_one_end_ends_both_and_says_so_once(pair: Pair, side: int) -> None:
    pair.sessions[side].close("enough")
    pair.sessions[side].close("again")
    assert await pair.sessions[0].ended(LIMIT_S) and await pair.sessions[1].ended(LIMIT_S)
    assert pair.handlers[side].closed == ["enough"]
    assert pair.handlers[1 - side].closed == ["connection closed by the peer"]
    pair.sessions[side].send(call(1))  # dropped without an error


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff", piece_envelope(1, 0, 5, memoryview(b"late"))], ids=["no envelope", "out of order"]
)
async def test_a_violation_closes_the_session(pair: Pair, data: bytes) -> None:
    pair.queues[1].put_nowait(frame(announced(1, 100)))
    pair.queues[1].put_nowait(data)
    assert await pair.sessions[1].ended(LIMIT_S)
    assert "bytes" in pair.handlers[1].closed[0]


async def test_a_handler_that_fails_ends_the_session_with_a_reason(
    pair: Pair, reported_loop_errors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pair.handlers[1].failing = True
    pair.sessions[0].send(call(1))
    assert await pair.sessions[1].ended(LIMIT_S)
    assert "the handler fails" in pair.handlers[1].closed[0]
    assert "could not be handled" in caplog.text


async def test_silence_ends_a_session_and_heartbeats_prevent_it() -> None:
    pair = Pair(silence_limit_s=0.4)
    await asyncio.sleep(1.0)  # 2.5 limits: only heartbeats keep it open
    assert pair.handlers[0].closed == pair.handlers[1].closed == []
    pair.streams[1].num_written = 0
    pair.tasks[1].cancel()  # and now one side falls silent, with the lane still open
    pair.streams[1].abort = lambda reason: None  # type: ignore[method-assign]
    assert await pair.sessions[0].ended(LIMIT_S)
    await pair.end()


async def test_draining_says_whether_all_was_written(pair: Pair) -> None:
    assert await pair.sessions[0].drain(LIMIT_S)
    pair.sessions[0].send(call(1), [Bytes(b"a" * 3 * PIECE_BYTES)])
    assert await pair.sessions[0].drain(LIMIT_S)
    assert pair.streams[0].num_written == 4
    pair.sessions[0].close("enough")
    await pair.sessions[0].ended(LIMIT_S)
    pair.sessions[0].send(call(2))
    assert not await pair.sessions[0].drain(0.05)
