"""Sessions that threads read while they wait: what they dispatch or leave to the loop, in which order, and the end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar

import pytest
from session_pairs import LIMIT_S, ChannelPair, call, for_loop
from transport_nodes import Memory

from rpcdist._proto import rpc_pb2
from rpcdist.testing import eventually_async, wait_until_asleep

reading_thread: ContextVar[str] = ContextVar("reading_thread", default="of the loop")


@pytest.fixture
async def pair() -> AsyncIterator[ChannelPair]:
    pair = ChannelPair(shares=(True, True))
    await eventually_async(lambda: reading_is_open(pair))
    yield pair
    await pair.end()


def reading_is_open(pair: ChannelPair) -> bool:
    return all(not stream._reader._holder for stream in pair.streams)


class Reading:
    """A thread that reads one session of a pair until `is_waiting` says no.

    Attributes:
        result: what `read_while_waiting` returned.
    """

    def __init__(self, pair: ChannelPair, is_waiting: Callable[[], bool], side: int = 1) -> None:
        self.result: bool | None = None
        self._session = pair.sessions[side]
        self._is_waiting = is_waiting
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        reading_thread.set("of the reading thread")
        self.result = self._session.read_while_waiting(self._is_waiting, LIMIT_S)

    def asleep(self) -> Reading:
        wait_until_asleep(self.thread)
        return self

    async def joined(self) -> None:
        await eventually_async(lambda: not self.thread.is_alive())


def misses(pair: ChannelPair, count: int) -> Callable[[], bool]:
    return lambda: len(pair.handlers[1].handed_on) < count


async def test_a_reading_thread_hands_on_what_may_be_handled_anywhere(pair: ChannelPair) -> None:
    reading = Reading(pair, misses(pair, 2)).asleep()
    pair.sessions[0].send(call(1))
    pair.sessions[0].send(call(2, b"x" * 1000))
    await reading.joined()
    assert reading.result is True
    assert pair.handlers[1].handed_on == [(1, reading.thread), (2, reading.thread)]


async def test_what_the_loop_must_handle_keeps_back_what_comes_after_it(pair: ChannelPair) -> None:
    """Every other message is for the loop; all arrive in order, whichever thread reads them."""
    handler, here = pair.handlers[1], threading.current_thread()
    readings = [Reading(pair, misses(pair, 200)) for _ in range(2)]
    for number in range(200):
        pair.sessions[0].send(for_loop(number) if number % 2 else call(number))
        if number % 20 == 0:
            await asyncio.sleep(0)  # the loop reads, too
    await eventually_async(lambda: len(handler.handed_on) == 200)
    pair.sessions[1].interrupt()
    for reading in readings:
        await reading.joined()
    assert [number for number, _ in handler.handed_on] == list(range(200))
    assert {thread for number, thread in handler.handed_on if number % 2} == {here}


async def test_what_is_left_to_the_loop_does_not_see_the_variables_of_the_reading_thread(pair: ChannelPair) -> None:
    seen = []
    pair.handlers[1].on_messages = lambda session, messages: seen.append(reading_thread.get())  # type: ignore[method-assign]
    reading = Reading(pair, lambda: not seen).asleep()
    pair.sessions[0].send(for_loop(1))
    await eventually_async(lambda: bool(seen))
    pair.sessions[1].interrupt()
    await reading.joined()
    assert seen == ["of the loop"]


@pytest.mark.parametrize("size", [100_000, 5 << 20], ids=["one chunk", "many"])
async def test_a_reading_thread_receives_large_buffers(pair: ChannelPair, size: int) -> None:
    """In chunks the first time, in lent memory the second."""
    reading = Reading(pair, misses(pair, 2)).asleep()
    for number in (1, 2):
        pair.sessions[0].send(call(number), [Memory(bytes([number]) * size)])
        assert await pair.handlers[1].next() == (number, [bytes([number]) * size])
    await reading.joined()
    assert reading.result is True


async def test_a_sign_of_life_that_a_reading_thread_reads_counts(pair: ChannelPair) -> None:
    session = pair.sessions[1]
    before = session.last_received
    reading = Reading(pair, lambda: session.last_received == before).asleep()
    pair.sessions[0].send(rpc_pb2.Message(heartbeat=rpc_pb2.Heartbeat()))
    await reading.joined()
    assert reading.result is True


async def test_a_peer_that_speaks_is_not_silent_while_a_reading_thread_is_held_up() -> None:
    pair = ChannelPair(silence_limit_s=0.2)
    await eventually_async(lambda: reading_is_open(pair))
    held, go_on = threading.Event(), threading.Event()

    def is_waiting() -> bool:
        held.set()
        assert go_on.wait(LIMIT_S)
        return False

    reading = Reading(pair, is_waiting)
    assert held.wait(LIMIT_S)
    before = pair.sessions[1].last_received
    ticks: list[bool] = []
    judge = pair.sessions[1]._has_unread
    pair.sessions[1]._has_unread = lambda: ticks.append(judge()) or ticks[-1]  # type: ignore[method-assign, func-returns-value]
    await eventually_async(lambda: len(ticks) >= 3)  # three times it would have been given up
    assert pair.sessions[1].closed_reason is None and pair.sessions[1].last_received == before
    go_on.set()
    await reading.joined()
    await eventually_async(lambda: pair.sessions[1].last_received > before)
    await pair.end()


# ---------------------------------------------------------------- the end


async def test_the_end_of_the_peer_while_a_thread_reads(pair: ChannelPair) -> None:
    reading = Reading(pair, lambda: True).asleep()
    pair.sessions[0].close("good night")
    await reading.joined()
    assert reading.result is False
    await eventually_async(lambda: bool(pair.handlers[1].closed))
    assert pair.handlers[1].closed == ["the client closed the connection: good night"] or pair.handlers[1].closed == [
        "the server closed the connection: good night"
    ]


async def test_a_broken_connection_while_a_thread_reads(pair: ChannelPair) -> None:
    reading = Reading(pair, lambda: True).asleep()
    pair.sockets[0].shutdown(socket.SHUT_RDWR)
    await reading.joined()
    assert reading.result is False
    await eventually_async(lambda: bool(pair.handlers[1].closed))
    assert "the process there is gone" in pair.handlers[1].closed[0]


async def test_closing_while_a_thread_reads(pair: ChannelPair) -> None:
    reading = Reading(pair, lambda: True).asleep()
    pair.sessions[1].close("enough")
    await reading.joined()
    assert reading.result is False
    await eventually_async(lambda: bool(pair.handlers[1].closed))
    assert pair.handlers[1].closed == ["enough"]
    assert pair.sockets[1].fileno() == -1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_handler_that_fails_on_a_reading_thread_ends_the_session(
    pair: ChannelPair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.handlers[1].failing = True
    reading = Reading(pair, lambda: True).asleep()
    pair.sessions[0].send(call(1))
    await reading.joined()
    assert reading.result is False
    await eventually_async(lambda: bool(pair.handlers[1].closed))
    assert "the handler fails" in pair.handlers[1].closed[0]


async def test_what_a_reading_thread_left_to_the_loop_may_fail_there(pair: ChannelPair) -> None:
    pair.handlers[1].failing = True
    reading = Reading(pair, lambda: True).asleep()
    pair.sessions[0].send(for_loop(1))
    await reading.joined()
    await eventually_async(lambda: bool(pair.handlers[1].closed))
    assert "the handler fails" in pair.handlers[1].closed[0]


async def test_a_violation_that_a_reading_thread_reads_ends_the_session(pair: ChannelPair) -> None:
    reading = Reading(pair, lambda: True).asleep()
    pair.sockets[0].sendall(b"\xff\xff\xff\x7fgarbage")
    await reading.joined()
    await eventually_async(lambda: bool(pair.handlers[1].closed))
    assert "announced a frame" in pair.handlers[1].closed[0]
