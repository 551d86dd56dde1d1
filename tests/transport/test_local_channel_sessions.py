"""Sessions over the local channel: threads that write by themselves, who writes when, and how a session ends."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from chunk_envelopes import chunk_envelope
from session_pairs import (
    LIMIT_S,
    ChannelPair,
    announced,
    call,
    lose_turn_once,
    num_unsent,
    pretend_awake,
    turn_of,
    wake_writer,
)
from transport_nodes import Memory

from rpcdist._proto import rpc_pb2
from rpcdist.errors import TransportError
from rpcdist.testing.limits import eventually_async
from rpcdist.transport import session_writer as writer_module
from rpcdist.transport._framing.frames import CHUNK_BYTES, CHUNK_WINDOW_BYTES, frame
from rpcdist.transport._framing.incoming import Incoming, heap_buffer
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.session_writer import FLUSH_FRAMES
from rpcdist.transport.wire_messages import CallMessage, ReplyMessage, WireMessage


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ChannelPair]:
    """Every message for which somebody waits counts as a lone one."""
    monkeypatch.setattr(writer_module, "BURST_GAP_S", 0.0)
    pair = ChannelPair(1000 * LIMIT_S)  # no heartbeat, which would wake the writers
    await asyncio.sleep(0)  # the writers go to sleep
    yield pair
    await pair.end()


def reply(id: int) -> ReplyMessage:
    return ReplyMessage(id, failure=rpc_pb2.Failure())


@pytest.mark.parametrize(
    ("message", "buffers", "expected"),
    [
        (call(1), [], True),
        (reply(1), [], True),
        (call(1), [b"x" * 100_000], True),
        (call(1), [b"x" * 10 * CHUNK_BYTES], False),  # the rest is the writer's
        (CallMessage(1, "m:f"), [], True),
        (ReplyMessage(1, created=True), [], True),
        (rpc_pb2.Message(ack=rpc_pb2.Ack(control_seq=1)), [], False),
    ],
    ids=["call", "reply", "small buffer", "large buffer", "compact call", "created", "ack"],
)
async def test_what_somebody_waits_for_is_written_at_once(
    pair: ChannelPair, message: WireMessage, buffers: list[bytes], expected: bool
) -> None:
    """The loop does not run in between, so only this thread can have written it."""
    session, num_wakes = pair.sessions[0], pair.io.num_wakes
    session.send(message, [Memory(data) for data in buffers])
    assert num_unsent(session) == (0 if expected else 1) and (pair.io.num_wakes == num_wakes) is expected
    assert await session.drain(LIMIT_S)


async def test_a_wait_flushes_a_burst(pair: ChannelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not run in between: the thread that is about to wait writes what it and others have queued."""
    monkeypatch.setattr(writer_module, "BURST_GAP_S", LIMIT_S)
    session = pair.sessions[0]
    session.send(call(1))
    assert num_unsent(session) == 1
    session.read_while_waiting(lambda: False, 0.0, None, lambda: session.send(call(2)))
    assert num_unsent(session) == 0
    assert [(await pair.handlers[1].next())[0] for _ in range(2)] == [1, 2]


async def test_what_was_queued_goes_out_even_if_the_wait_does_not_begin(pair: ChannelPair) -> None:
    session = pair.sessions[0]

    def first() -> None:
        session.send(call(1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.read_while_waiting(lambda: True, LIMIT_S, None, first)
    assert num_unsent(session) == 0 and (await pair.handlers[1].next())[0] == 1


async def test_a_flush_leaves_to_the_writer_what_it_cannot_write(pair: ChannelPair) -> None:
    session, num_wakes = pair.sessions[0], pair.io.num_wakes
    with turn_of(session):  # another thread writes
        session.read_while_waiting(lambda: False, 0.0, None, lambda: session.send(call(1)))
    assert pair.io.num_wakes > num_wakes and (await pair.handlers[1].next())[0] == 1


async def test_a_thread_that_is_interrupted_while_it_writes_ends_the_session(
    pair: ChannelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C strikes when bytes have left, and before they are counted: what followed them would be read as garbage."""
    session, channel = pair.sessions[0], pair.streams[0]

    def put(head: bytes, payload: memoryview | None = None) -> None:
        pair.sockets[0].send(head[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(channel, "put", put)
        with pytest.raises(KeyboardInterrupt):
            session.send(call(1))
    await eventually_async(lambda: bool(pair.handlers[0].closed), "the session ends")
    assert pair.handlers[0].closed == ["writing to b was interrupted: KeyboardInterrupt"]


async def test_a_long_burst_is_written_in_parts_if_the_loop_is_late(
    pair: ChannelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BURST_GAP_S", LIMIT_S)
    session = pair.sessions[0]
    for number in range(FLUSH_FRAMES + 5):
        session.send(call(number + 1))
    assert num_unsent(session) == 5
    assert [(await pair.handlers[1].next())[0] for _ in range(FLUSH_FRAMES + 5)] == list(range(1, FLUSH_FRAMES + 6))


async def test_a_long_burst_wakes_the_writer_that_went_to_sleep_meanwhile(
    pair: ChannelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BURST_GAP_S", LIMIT_S)
    monkeypatch.setattr(writer_module, "MAX_PUTS", 1)
    session = pair.sessions[0]
    channel = pair.streams[0]
    put = channel.put

    def put_meanwhile(*parts: Any) -> None:
        monkeypatch.setattr(channel, "put", put)
        put(*parts)
        session.hold_back(lambda: session.send(call(FLUSH_FRAMES + 1)))
        pretend_awake(session, False)  # as the writer's task does that finds the turn taken

    await asyncio.sleep(0)  # the task is asleep
    monkeypatch.setattr(channel, "put", put_meanwhile)
    pretend_awake(session, True)
    for number in range(FLUSH_FRAMES):
        session.send(call(number + 1))
    assert [(await pair.handlers[1].next())[0] for _ in range(FLUSH_FRAMES + 1)] == list(range(1, FLUSH_FRAMES + 2))


async def test_the_writer_does_not_sleep_when_the_turn_has_come_back(
    pair: ChannelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread gives it back between the writer's try and its sleep, and still finds it awake."""
    monkeypatch.setattr(writer_module, "BURST_GAP_S", LIMIT_S)
    session = pair.sessions[0]
    await asyncio.sleep(0)  # the task is asleep
    losses = lose_turn_once(session)
    session.send(call(1))
    assert (await pair.handlers[1].next())[0] == 1 and losses == ["lost"]


async def test_the_task_writes_what_a_thread_left_in_the_channel_while_it_went_to_sleep(pair: ChannelPair) -> None:
    """The queue is empty then, but half a frame is out: the rest would come with the next message only."""
    session = pair.sessions[0]
    await asyncio.sleep(0)  # the task is asleep
    pair.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def put() -> None:  # by a thread, which finds the task awake when it is done
        pair.streams[0].put(frame(call(1, b"x" * 1_000_000)))
        assert not pair.streams[0].is_free

    losses = lose_turn_once(session, put)
    wake_writer(session)
    assert (await pair.handlers[1].next())[0] == 1 and losses == ["lost"]


async def test_a_burst_is_left_to_the_writer_who_joins_it(pair: ChannelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BURST_GAP_S", LIMIT_S)
    session = pair.sessions[0]
    for number in range(1, 6):
        session.send(call(number))
    assert num_unsent(session) == 5
    assert [(await pair.handlers[1].next())[0] for _ in range(5)] == [1, 2, 3, 4, 5]


async def test_a_burst_stays_one_where_a_write_takes_longer_than_the_gap(
    pair: ChannelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: were the gap counted from the beginning of a write, each message would be written alone."""
    session, now_s = pair.sessions[0], [time.monotonic() + 100]
    channel = pair.streams[0]
    put = channel.put

    def slow_put(*parts: Any) -> None:
        now_s[0] += 2.0
        put(*parts)

    monkeypatch.setattr(writer_module, "BURST_GAP_S", 1.0)
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(channel, "put", slow_put)
    session.send(call(1))
    assert num_unsent(session) == 0
    session.send(call(2))
    assert num_unsent(session) == 1
    assert [(await pair.handlers[1].next())[0] for _ in range(2)] == [1, 2]


def creation(id: int) -> CallMessage:
    message = call(id)
    message.result = (0, id, 0, 0, id, 0)
    return message


async def test_a_creation_in_compact_form_lingers_too(pair: ChannelPair) -> None:
    session = pair.sessions[0]
    session.send(CallMessage(1, "m:f", result=(0, 1, 0, 0, 1, 0)))
    assert num_unsent(session) == 1
    session.flush()
    assert num_unsent(session) == 0


async def test_a_creation_lingers_until_the_next_message_takes_it_along(pair: ChannelPair) -> None:
    session = pair.sessions[0]
    session.send(creation(1))
    assert num_unsent(session) == 1
    session.send(call(2))  # nobody waits, and nothing was written for a while: written by this thread
    assert num_unsent(session) == 0
    assert [(await pair.handlers[1].next())[0] for _ in range(2)] == [1, 2]


async def test_a_creation_is_flushed_by_whoever_waits_for_something_else(pair: ChannelPair) -> None:
    session = pair.sessions[0]
    session.send(creation(1))
    session.read_while_waiting(lambda: False, 0.0)
    assert num_unsent(session) == 0 and (await pair.handlers[1].next())[0] == 1


async def test_creations_that_nothing_follows_leave_by_the_clock_or_in_a_drain(pair: ChannelPair) -> None:
    session = pair.sessions[0]
    for number in range(1, 6):  # also after the ticks have come to rest
        session.send(creation(number))
        assert (await pair.handlers[1].next())[0] == number
        await pair.io.at_rest()
    session.send(creation(6))
    assert await session.drain(LIMIT_S) and num_unsent(session) == 0
    assert (await pair.handlers[1].next())[0] == 6


async def test_many_creations_do_not_wait_for_the_clock(pair: ChannelPair) -> None:
    session = pair.sessions[0]
    for number in range(FLUSH_FRAMES):
        session.send(creation(number))
    assert num_unsent(session) == 0


@pytest.mark.parametrize("lone_after_s", [0.0, 60e-6, 1.0])
async def test_many_threads_lose_and_reorder_nothing(
    pair: ChannelPair, lone_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BURST_GAP_S", lone_after_s)
    big = os.urandom(3 * CHUNK_BYTES)

    def send(thread: int) -> None:
        for index in range(300):
            buffers = [Memory(big)] if index == 100 else []
            pair.sessions[thread % 2].send(call(thread * 1000 + index + 1), buffers)

    await asyncio.gather(*(asyncio.to_thread(send, thread) for thread in range(6)))
    for side in (0, 1):
        got = [await pair.handlers[1 - side].next() for _ in range(900)]
        for thread in range(side, 6, 2):
            ids = [id for id, _ in got if id // 1000 == thread]
            assert sorted(ids) == [thread * 1000 + index + 1 for index in range(300)]
            assert [id for id in ids if id % 1000 != 101] == [id for id in sorted(ids) if id % 1000 != 101]
        assert [buffers for _, buffers in got if buffers] == [[big]] * 3
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_thread_that_writes_while_the_session_drains(pair: ChannelPair) -> None:
    for number in range(1, 200):
        sending = asyncio.to_thread(pair.sessions[0].send, call(number))
        task = asyncio.ensure_future(sending)
        await asyncio.sleep(0)
        assert await pair.sessions[0].drain(LIMIT_S)
        await task
        assert await pair.sessions[0].drain(LIMIT_S)
        assert (await pair.handlers[1].next())[0] == number
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_small_messages_pass_transfers_in_both_directions(pair: ChannelPair) -> None:
    data = os.urandom(8 << 20)
    for side in (0, 1):
        for number in range(1, 5):
            pair.sessions[side].send(call(number), [Memory(data)])
        for number in range(10, 20):
            pair.sessions[side].send(call(number))
    for side in (0, 1):
        got = [await pair.handlers[1 - side].next() for _ in range(14)]
        assert [id for id, _ in got] == [*range(10, 20), 1, 2, 3, 4]
        assert [buffers for _, buffers in got[10:]] == [[data]] * 4


async def test_a_receiver_that_stands_still_stops_the_sender(pair: ChannelPair) -> None:
    """Credit is for taken data; other data stays with the sender, in its tensors."""
    pair.tasks[1].cancel()
    pair.streams[1].abort = lambda reason: None
    await asyncio.wait([pair.tasks[1]], timeout=LIMIT_S)
    session, size = pair.sessions[0], 64 << 20
    session.send(call(1), [Memory(bytes(size))])
    taken = 0  # by the kernel of the receiver
    async with asyncio.timeout(LIMIT_S):
        while taken < CHUNK_WINDOW_BYTES:
            taken += len(await asyncio.get_running_loop().sock_recv(pair.sockets[1], 1 << 20))
    await asyncio.sleep(0.1)  # in which a sender that minds no credit would send more
    with suppress(BlockingIOError):
        while True:
            taken += len(pair.sockets[1].recv(1 << 20))
    assert taken <= CHUNK_WINDOW_BYTES + 2 * CHUNK_BYTES
    session.send(call(2))
    assert "1 transfers" in repr(session)
    del pair.streams[1].abort
    pair.streams[1].abort("done")


@pytest.mark.parametrize("side", [0, 1])
async def test_the_reason_of_the_end_crosses_the_channel(pair: ChannelPair, side: int) -> None:
    names = ("the server", "the client")
    pair.sessions[side].close("enough")
    assert await pair.sessions[0].ended(LIMIT_S) and await pair.sessions[1].ended(LIMIT_S)
    assert pair.handlers[side].closed == ["enough"]
    assert pair.handlers[1 - side].closed == [f"{names[1 - side]} closed the connection: enough"]


async def test_who_writes_to_a_peer_that_closed_learns_the_peers_reason(pair: ChannelPair) -> None:
    pair.streams[1].abort("the reason that counts")
    pair.sessions[0].send(call(1))  # fails, before anything was read
    assert await pair.sessions[0].ended(LIMIT_S)
    assert pair.handlers[0].closed == ["the server closed the connection: the reason that counts"]
    pair.sessions[0].send(call(2))  # dropped without an error


async def test_a_peer_that_is_gone_ends_the_session_at_once(pair: ChannelPair) -> None:
    pair.sessions[0].send(call(1), [Memory(bytes(64 << 20))])
    pair.sessions[1].send(call(2), [Memory(bytes(64 << 20))])
    await asyncio.sleep(0)
    pair.sockets[1].shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that was killed
    assert await pair.sessions[0].ended(LIMIT_S) and await pair.sessions[1].ended(LIMIT_S)
    [reason] = pair.handlers[0].closed
    assert reason.startswith("the connection with the server broke: ")


@pytest.mark.parametrize(
    ("envelopes", "says"),
    [
        ([frame(announced(1, 200_000)), chunk_envelope(1, 0, 5, memoryview(bytes(100_000)))], "at offset 5"),
        ([frame(announced(1, 90_000)), chunk_envelope(1, 0, 0, memoryview(bytes(100_000)))], "90000"),
        ([frame(announced(1, 90_000)), chunk_envelope(1, 7, 0, memoryview(bytes(80_000)))], "buffer 7"),
        ([b"\xff" * 100_000], "not an envelope"),
    ],
    ids=["out of order", "too long", "no such buffer", "not an envelope"],
)
async def test_a_violation_in_a_large_frame_ends_the_session(
    pair: ChannelPair, envelopes: list[bytes], says: str
) -> None:
    for data in envelopes:
        await asyncio.wait_for(pair.streams[0].write_parts(data), LIMIT_S)
    assert await pair.sessions[1].ended(LIMIT_S)
    assert says in pair.handlers[1].closed[0] and pair.handlers[1].received.empty()
    await pair.sessions[0].ended(LIMIT_S)
    assert says in pair.handlers[0].closed[0]


async def test_a_handler_that_fails_is_named_to_the_peer(
    pair: ChannelPair, caplog: pytest.LogCaptureFixture, reported_loop_errors: list[str]
) -> None:
    pair.handlers[1].failing = True
    pair.sessions[0].send(call(1))
    assert await pair.sessions[0].ended(LIMIT_S)
    assert "could not be handled: ValueError: the handler fails" in pair.handlers[0].closed[0]


async def test_an_aborted_transfer_frees_the_channel(pair: ChannelPair) -> None:
    number = pair.sessions[0].send(call(1), [Memory(bytes(64 << 20))])
    pair.sessions[0].abort_transfer(number, "not wanted")
    pair.sessions[0].send(call(2), [Memory(bytes(CHUNK_BYTES))])
    assert (await pair.handlers[1].next())[0] == 2
    assert await pair.sessions[0].drain(LIMIT_S) and pair.handlers[1].received.empty()


# ---------------------------------------------------------------- the bookkeeping beneath


def test_a_chunk_can_be_received_where_it_belongs() -> None:
    incoming = Incoming(heap_buffer)
    assert incoming.announce(rpc_pb2.Message(transfer=1, large=[6])) is None
    place = incoming.place(1, 0, 0, 4)
    assert place is not None
    place[:] = b"abcd"
    assert incoming.placed(1, 0, 4) is None
    assert incoming.place(2, 0, 0, 4) is None  # nobody waits for it
    place = incoming.place(1, 0, 4, 2)
    assert place is not None
    place[:] = b"ef"
    delivery = incoming.placed(1, 0, 2)
    assert delivery is not None and bytes(delivery[1][0].view) == b"abcdef"
    assert incoming.placed(1, 0, 2) is None


def test_an_envelope_in_parts_is_the_envelope() -> None:
    data = os.urandom(2 * CHUNK_BYTES + 5)
    whole, parts = Outgoing(), Outgoing()
    for outgoing in (whole, parts):
        outgoing.add(call(1), [Memory(data)])
    while (envelope := whole.next_envelope()) is not None:
        taken = parts.next_parts()
        assert taken is not None
        head, payload = taken
        assert envelope == head + (payload or b"")
        assert payload is None or payload.obj is data  # the sender's own memory
    assert parts.next_parts() is None


def test_the_queue_of_a_session_stands_many_threads() -> None:
    """Credit that is granted while another thread takes chunks is not lost."""
    outgoing, rounds = Outgoing(), 100
    outgoing.add(call(1), [Memory(bytes(CHUNK_BYTES * rounds))])
    taken: list[int] = []

    def take() -> None:
        while len(taken) <= rounds:
            parts = outgoing.next_parts()
            if parts is not None:
                taken.append(len(parts[0]) + len(parts[1] or b""))

    thread = threading.Thread(target=take)
    thread.start()
    granted = 0
    while thread.is_alive():
        while granted < len(taken):
            outgoing.grant(taken[granted])
            granted += 1
    thread.join(LIMIT_S)
    assert outgoing.is_empty and len(taken) == 1 + rounds
    not_granted = sum(taken[granted:]) - taken[0]
    outgoing.add(call(2), [Memory(bytes(2 * CHUNK_WINDOW_BYTES))])
    for head, payload in iter(outgoing.next_parts, None):
        not_granted += 0 if payload is None else len(head) + len(payload)
    assert CHUNK_WINDOW_BYTES <= not_granted < CHUNK_WINDOW_BYTES + 2 * CHUNK_BYTES


async def test_a_closed_channel_raises_on_every_way_in(pair: ChannelPair) -> None:
    pair.sessions[0].close("enough")
    await pair.sessions[0].ended(LIMIT_S)
    for attempt in (pair.streams[0].flush, lambda: pair.streams[0].write_parts(b"x")):
        try:
            await attempt()
        except TransportError:
            continue
        assert attempt == pair.streams[0].flush  # nothing was left to flush
