"""The bookkeeping under a session, as tables: frames, pieces, turns, control messages, calls, leases; and a session
between two queues in memory."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdist._proto import rpc_pb2, rref_pb2
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import DeadlineExceeded, ProtocolViolation, TransportError
from rpcdist.ids import Identity
from rpcdist.rpc._calls import CallTable, PendingCall
from rpcdist.rpc._control import ControlInbox, ControlOutbox
from rpcdist.rpc._leases import Leases
from rpcdist.transport._frames import (
    MAX_ENVELOPE_BYTES,
    MAX_FRAME_BYTES,
    PIECE_BYTES,
    Piece,
    frame,
    parse,
    piece_envelope,
    unframe,
    varint,
)
from rpcdist.transport._incoming import Incoming, ReceiveBuffer, heap_buffer
from rpcdist.transport._outgoing import Outgoing
from rpcdist.transport.session import Session

LIMIT_S = 20.0
MIB = 1 << 20


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


def piece(transfer: int, buffer: int, offset: int, data: bytes) -> Piece:
    return Piece(transfer, buffer, offset, memoryview(data))


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**32, 2**63])
def test_varint_is_protobufs(value: int) -> None:
    # Field 1 of Call is a uint64: what follows its tag is the varint.
    assert rpc_pb2.Call(id=value).SerializeToString() == (b"\x08" + varint(value) if value else b"")


def test_joined_frames_are_an_envelope() -> None:
    messages = [call(number, b"x" * size) for number, size in enumerate([0, 1, 100, 200, 20_000])]
    envelope = parse(b"".join(map(frame, messages)))
    assert isinstance(envelope, rpc_pb2.Envelope)
    assert list(envelope.messages) == messages
    assert [unframe(frame(message)) for message in messages] == messages


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=300))
def test_pieces_are_ordinary_protobuf_and_come_back(transfer: int, buffer: int, offset: int, data: bytes) -> None:
    encoded = piece_envelope(transfer, buffer, offset, memoryview(data))
    expected = rpc_pb2.Piece(transfer=transfer, buffer=buffer, offset=offset, data=data)
    assert rpc_pb2.Envelope.FromString(encoded).piece == expected
    parsed = parse(encoded)
    assert isinstance(parsed, Piece) and parsed == Piece(transfer, buffer, offset, memoryview(data))
    # Another implementation leaves zeros out; it must be understood as well.
    assert parse(rpc_pb2.Envelope(piece=expected).SerializeToString()) == parsed


@given(st.binary(max_size=200))
def test_random_bytes_are_an_envelope_a_piece_or_a_violation(data: bytes) -> None:
    for candidate in (data, b"\x7a" + data, b"\x0a" + data):
        try:
            parsed = parse(candidate)
        except ProtocolViolation as exc:
            assert f"{len(candidate)} bytes" in str(exc)
        else:
            assert isinstance(parsed, Piece | rpc_pb2.Envelope)


# ---------------------------------------------------------------- incoming


def test_a_message_without_buffers_is_delivered_at_once() -> None:
    assert Incoming().announce(call(1)) == (call(1), [])


def test_a_message_is_delivered_with_its_last_byte_and_once() -> None:
    incoming = Incoming()
    message = announced(5, 4, 0, 3)
    assert incoming.announce(message) is None
    assert incoming.piece(piece(5, 2, 0, b"ab")) is None
    assert incoming.piece(piece(5, 0, 0, b"1234")) is None
    delivery = incoming.piece(piece(5, 2, 2, b"c"))
    assert delivery is not None
    assert delivery[0] == message and [bytes(buffer.view) for buffer in delivery[1]] == [b"1234", b"", b"abc"]
    assert incoming.piece(piece(5, 2, 2, b"c")) is None
    assert "0 transfers" in repr(incoming)


def test_a_message_with_empty_buffers_waits_for_nothing() -> None:
    delivery = Incoming().announce(announced(1, 0, 0))
    assert delivery is not None and len(delivery[1]) == 2


def test_transfers_do_not_mix() -> None:
    incoming = Incoming()
    for number in (1, 2):
        incoming.announce(announced(number, 4))
    assert incoming.piece(piece(1, 0, 0, b"aa")) is None
    assert incoming.piece(piece(2, 0, 0, b"bbb")) is None
    first, second = incoming.piece(piece(1, 0, 2, b"aa")), incoming.piece(piece(2, 0, 3, b"b"))
    assert first is not None and second is not None
    assert [bytes(delivery[1][0].view) for delivery in (first, second)] == [b"aaaa", b"bbbb"]


VIOLATIONS: list[tuple[str, list[Any], str]] = [
    ("announced twice", [announced(1, 5), announced(1, 5)], "announced twice"),
    ("announced as number 0", [announced(0, 5)], "announced twice"),
    ("out of order", [announced(1, 5), piece(1, 0, 2, b"xx")], "expected at 0"),
    ("repeated", [announced(1, 5), piece(1, 0, 0, b"xx"), piece(1, 0, 0, b"xx")], "expected at 2"),
    ("larger than announced", [announced(1, 5), piece(1, 0, 0, b"xxxxxx")], "5 announced bytes"),
    ("larger in the end", [announced(1, 5), piece(1, 0, 0, b"xxx"), piece(1, 0, 3, b"xxx")], "5 announced bytes"),
    ("another buffer", [announced(1, 5), piece(1, 1, 0, b"x")], "buffer 1 of 1"),
    ("more than there is memory", [announced(1, 2**62)], "no memory"),
    ("more than a number holds", [announced(1, 2**64 - 1)], "no memory"),
    ("wrapped nonsense", [announced(1, 2, wrapped=True), piece(1, 0, 0, b"\xff\xff")], "wrapped"),
]


@pytest.mark.parametrize(("steps", "text"), [case[1:] for case in VIOLATIONS], ids=[case[0] for case in VIOLATIONS])
def test_what_a_peer_must_not_send(steps: list[Any], text: str) -> None:
    incoming = Incoming()

    def apply(step: Any) -> object:
        return incoming.piece(step) if isinstance(step, Piece) else incoming.announce(step)

    for step in steps[:-1]:
        assert apply(step) is None
    with pytest.raises(ProtocolViolation, match=text):
        apply(steps[-1])


def test_an_aborted_transfer_is_forgotten_and_its_late_pieces_are_dropped() -> None:
    taken: list[int] = []

    def allocate(size_bytes: int) -> ReceiveBuffer:
        taken.append(size_bytes)
        return heap_buffer(size_bytes)

    incoming = Incoming(allocate)
    incoming.announce(announced(1, 5))
    assert incoming.abort(1) == announced(1, 5)
    assert incoming.abort(1) is None and incoming.abort(9) is None
    assert incoming.piece(piece(1, 0, 0, b"xx")) is None
    assert incoming.announce(announced(1, 2)) is None  # the number is free again
    assert taken == [5, 2]


# ---------------------------------------------------------------- outgoing


def written(outgoing: Outgoing) -> list[bytes]:
    return list(iter(outgoing.next_envelope, None))


def shape(envelope: bytes) -> str:
    """`3,4` for messages of those ids, `7:1@0+5` for a piece of transfer 7, buffer 1."""
    parsed = parse(envelope)
    if isinstance(parsed, Piece):
        return f"{parsed.transfer}:{parsed.buffer}@{parsed.offset // PIECE_BYTES}+{len(parsed.data)}"
    return ",".join(str(message.call.id) for message in parsed.messages)


def receive(envelopes: list[bytes], incoming: Incoming | None = None) -> list[tuple[int, list[bytes]]]:
    """The ids of what is delivered, with the buffers."""
    incoming = incoming or Incoming()
    delivered = []
    for envelope in envelopes:
        parsed = parse(envelope)
        if isinstance(parsed, Piece):
            deliveries = [incoming.piece(parsed)]
        else:
            deliveries = []
            for message in parsed.messages:
                if message.HasField("transfer_aborted"):
                    incoming.abort(message.transfer_aborted.transfer)
                else:
                    deliveries.append(incoming.announce(message))
        delivered += [(item[0].call.id, [bytes(b.view) for b in item[1]]) for item in deliveries if item is not None]
    assert "0 transfers, 0 B" in repr(incoming)
    return delivered


def test_messages_that_wait_go_together() -> None:
    outgoing = Outgoing()
    assert outgoing.next_envelope() is None and not outgoing
    for number in range(1, 6):
        outgoing.add(call(number))
    assert outgoing
    assert [shape(envelope) for envelope in written(outgoing)] == ["1,2,3,4,5"]


def test_small_messages_go_first_and_transfers_take_turns() -> None:
    outgoing = Outgoing()
    outgoing.add(call(1), [Bytes(b"a" * (2 * PIECE_BYTES + 3)), Bytes(b"b" * 4)])
    outgoing.add(call(2), [Bytes(b"c" * (PIECE_BYTES + 1))])
    outgoing.add(call(3))
    seen = []
    while (envelope := outgoing.next_envelope()) is not None:
        seen.append(shape(envelope))
        if len(seen) in (2, 3):
            outgoing.add(call(len(seen) + 2))
    assert seen == [
        "1,2,3", f"1:0@0+{PIECE_BYTES}", "4", f"2:0@0+{PIECE_BYTES}", "5",
        f"1:0@1+{PIECE_BYTES}", "2:0@1+1", "1:0@2+3", "1:1@0+4",
    ]  # fmt: skip


def test_a_stream_of_small_messages_does_not_starve_a_transfer() -> None:
    outgoing = Outgoing()
    outgoing.add(call(1), [Bytes(b"a" * 3 * PIECE_BYTES)])
    kinds = ""
    for number in range(2, 8):
        outgoing.add(call(number))
        envelope = outgoing.next_envelope()
        assert envelope is not None
        kinds += "p" if isinstance(parse(envelope), Piece) else "m"
    assert kinds == "mpmpmp"


def test_an_envelope_has_a_limited_size() -> None:
    outgoing = Outgoing()
    for number in range(1, 9):
        outgoing.add(call(number, b"x" * 400_000))
    envelopes = written(outgoing)
    assert [shape(envelope) for envelope in envelopes] == ["1,2,3", "4,5,6", "7,8"]
    assert all(len(envelope) <= MAX_ENVELOPE_BYTES + MAX_FRAME_BYTES for envelope in envelopes)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES - 40, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 5 * MIB + 7])
def test_a_message_too_big_for_an_envelope_is_wrapped(size: int) -> None:
    outgoing = Outgoing()
    body = random.Random(size).randbytes(size)
    outgoing.add(call(1, body))
    outgoing.add(call(2, body), [Bytes(b"beside" * MIB), Bytes(b"")])
    outgoing.add(call(3))
    envelopes = written(outgoing)
    assert max(map(len, envelopes)) <= MAX_ENVELOPE_BYTES + MAX_FRAME_BYTES
    received = dict(receive(envelopes))
    assert received == {1: [], 2: [b"beside" * MIB, b""], 3: []}


def test_an_abort_stops_a_transfer_wherever_it_is() -> None:
    for envelopes_before in range(4):
        outgoing, incoming = Outgoing(), Incoming()
        number = outgoing.add(call(1), [Bytes(b"a" * 3 * PIECE_BYTES)])
        outgoing.add(call(2), [Bytes(b"b" * 10)])
        sent = [outgoing.next_envelope() for _ in range(envelopes_before)]
        assert outgoing.abort(number)
        outgoing.add(rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=number)))
        assert receive([*filter(None, sent), *written(outgoing)], incoming) == [(2, [b"b" * 10])]
        assert not outgoing.abort(number)


def test_an_abort_stops_what_is_wrapped_and_what_follows_it() -> None:
    for envelopes_before in (0, 2, 4):
        outgoing = Outgoing()
        number = outgoing.add(call(1, b"x" * 2 * MIB), [Bytes(b"a" * 2 * PIECE_BYTES)])
        sent = [outgoing.next_envelope() for _ in range(envelopes_before)]
        assert outgoing.abort(number)
        outgoing.add(rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=number)))
        assert receive([*filter(None, sent), *written(outgoing)]) == []


def test_a_message_that_is_wrapped_can_be_aborted_too() -> None:
    outgoing = Outgoing()
    assert outgoing.add(call(1)) == 0
    number = outgoing.add(call(2, b"x" * 2 * MIB))
    assert number and outgoing.abort(number)
    outgoing.add(rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=number)))
    assert receive(written(outgoing)) == [(1, [])]


def test_an_abort_after_the_last_piece_changes_nothing() -> None:
    outgoing = Outgoing()
    number = outgoing.add(call(1), [Bytes(b"abc")])
    envelopes = written(outgoing)
    assert not outgoing.abort(number) and not outgoing.abort(77)
    assert receive(envelopes) == [(1, [b"abc"])]


def item(stream: int, index: int, size: int = 0) -> tuple[rpc_pb2.Message, list[Bytes]]:
    """An item of a stream: its index in the message, `size` bytes beside it."""
    message = rpc_pb2.Message()
    message.stream_item.id = stream
    message.stream_item.value.body = str(index).encode()
    return message, [Bytes(b"i" * size)] if size else []


def stream_parts(envelopes: list[bytes]) -> dict[int, list[str]]:
    """The parts of each stream in the order of their delivery."""
    incoming, parts = Incoming(), {}  # type: ignore[var-annotated]
    for envelope in envelopes:
        parsed = parse(envelope)
        arrived = [incoming.piece(parsed)] if isinstance(parsed, Piece) else map(incoming.announce, parsed.messages)
        for message, _ in filter(None, arrived):
            if message.HasField("stream_item"):
                parts.setdefault(message.stream_item.id, []).append(message.stream_item.value.body.decode().strip("x"))
            elif message.HasField("stream_end"):
                parts.setdefault(message.stream_end.id, []).append("end")
    return parts


def test_the_parts_of_a_stream_keep_their_order_and_others_pass_them() -> None:
    outgoing = Outgoing()
    outgoing.add(*item(9, 0, 2 * PIECE_BYTES))
    outgoing.add(*item(9, 1))
    outgoing.add(call(1))
    outgoing.add(*item(8, 0))
    outgoing.add(rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=9)))
    first = outgoing.next_envelope()
    assert first is not None and len(parse(first).messages) == 3  # type: ignore[union-attr]
    assert "2 messages, 1 transfers" in repr(outgoing)
    assert stream_parts([first, *written(outgoing)]) == {8: ["0"], 9: ["0", "1", "end"]}


def test_a_held_stream_goes_on_when_the_transfer_before_it_is_aborted() -> None:
    outgoing = Outgoing()
    number = outgoing.add(*item(9, 0, 3 * PIECE_BYTES))
    outgoing.add(*item(9, 1))
    sent = [outgoing.next_envelope(), outgoing.next_envelope()]
    assert outgoing.abort(number)
    assert stream_parts([*filter(None, sent), *written(outgoing)]) == {9: ["1"]}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 10, PIECE_BYTES + 1, -2 * MIB])), max_size=12))
def test_streams_arrive_in_order_whatever_the_sizes(items: list[tuple[int, int]]) -> None:
    outgoing = Outgoing()
    expected: dict[int, list[str]] = {}
    envelopes = []
    for index, (stream, size) in enumerate(items):
        message, buffers = item(stream, index, max(size, 0))
        message.stream_item.value.body += b"x" * -min(size, 0)  # too big for an envelope
        outgoing.add(message, buffers)
        expected.setdefault(stream, []).append(str(index))
        if index % 3 == 0:
            envelopes.append(outgoing.next_envelope())
    for stream in expected:
        outgoing.add(rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=stream)))
        expected[stream].append("end")
    assert stream_parts([*filter(None, envelopes), *written(outgoing)]) == expected
    assert not outgoing and "0 messages" in repr(outgoing)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=3)), max_size=6))
def test_whatever_is_sent_arrives_whole(messages: list[tuple[int, list[int]]]) -> None:
    outgoing = Outgoing()
    expected = []
    for number, (mebibytes, sizes) in enumerate(messages, 1):
        buffers = [bytes([number]) * size for size in sizes]
        outgoing.add(call(number, b"x" * (mebibytes * MIB // 2)), list(map(Bytes, buffers)))
        expected.append((number, buffers))
    assert sorted(receive(written(outgoing))) == expected


# ---------------------------------------------------------------- control messages


def test_control_messages_are_kept_until_acknowledged_and_applied_once() -> None:
    outbox, inbox = ControlOutbox(), ControlInbox()
    sent = [outbox.add(rref_pb2.RRefMessage()) for _ in range(5)]
    assert [message.control_seq for message in sent] == [1, 2, 3, 4, 5]
    assert [inbox.accept(number) for number in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    outbox.acknowledged(inbox.applied)
    outbox.acknowledged(1)  # a late one
    assert [message.control_seq for message in outbox.to_resend()] == [4, 5] and len(outbox) == 2
    assert [inbox.accept(message.control_seq) for message in outbox.to_resend()] == [True, True]
    with pytest.raises(ProtocolViolation, match="7 arrived after 5"):
        inbox.accept(7)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_control_messages_survive_any_number_of_broken_connections(script: list[int]) -> None:
    """0: send one more; 1: deliver one; 2: acknowledge; 3: the connection breaks, and what was on its way is lost."""
    outbox, inbox = ControlOutbox(), ControlInbox()
    made, applied = 0, []
    wire: list[int] = []

    def deliver() -> None:
        number = wire.pop(0)
        if inbox.accept(number):
            applied.append(number)

    for step in [*script, 3]:
        if step == 0:
            made += 1
            wire.append(outbox.add(rref_pb2.RRefMessage()).control_seq)
        elif step == 1 and wire:
            deliver()
        elif step == 2:
            outbox.acknowledged(inbox.applied)
        elif step == 3:
            wire[:] = [message.control_seq for message in outbox.to_resend()]
    while wire:
        deliver()
    assert applied == list(range(1, made + 1))


# ---------------------------------------------------------------- calls


class Outcome:
    """A completer that remembers."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def replied(self, reply: rpc_pb2.Reply, payload: object, jobs: list[Any]) -> None:
        raise AssertionError("nothing replies here")

    def failed(self, exc: BaseException) -> None:
        self.errors.append(exc)


def pending(table: CallTable, timeout_s: float, deadline: Deadline | None = None, agent: Any = None) -> PendingCall:
    deadline = deadline or Deadline.after(timeout_s)
    made = PendingCall(agent, table.next_id(), 1, lambda: "rpc to 'b' of f", deadline, timeout_s, Outcome())
    table.add(made)
    return made


def test_a_call_is_taken_once() -> None:
    table = CallTable(lambda at: None)
    made = pending(table, 10)
    assert list(table) == [made] and len(table) == 1
    assert [table.take(made.id), table.take(made.id)] == [made, None]
    assert table.wait_empty(0)


def test_calls_expire_at_their_deadline_and_the_timer_follows_the_earliest() -> None:
    wakes: list[float] = []
    table = CallTable(wakes.append)
    now = time.monotonic()
    late, past, never = (pending(table, at, Deadline(now + at)) for at in (50, -1, float("inf")))
    assert wakes == [now + 50, now - 1]
    assert table.take_expired() == [past] and wakes[2:] == [now + 50]
    assert table.take_expired() == []
    table.take(late.id)
    del wakes[:]
    assert table.take_expired() == [] and wakes == []
    assert list(table) == [never]


def test_calls_are_taken_by_what_they_wait_for() -> None:
    table = CallTable(lambda at: None)
    calls = [pending(table, 10) for _ in range(4)]
    assert table.take_where(lambda made: made.id % 2 == 0) == calls[1::2]
    assert list(table) == calls[::2] and table.total == 4
    assert not table.wait_empty(0)


def test_a_call_that_met_a_closed_session_is_reported() -> None:
    unanswered: list[tuple[Any, ...]] = []
    agent = SimpleNamespace(connections=SimpleNamespace(on_unanswered=lambda *args: unanswered.append(args)))
    table = CallTable(lambda at: None)
    made = pending(table, 10, agent=agent)
    peer = Identity("b", 1, 7)
    made.on_sent(SimpleNamespace(peer=peer, closed_reason=None, last_received=0.0), 3)  # type: ignore[arg-type]
    assert made.transfer == 3 and not unanswered
    session = SimpleNamespace(peer=peer, closed_reason="broken", last_received=0.0)
    made.on_sent(session, 0)  # type: ignore[arg-type]
    assert unanswered == [(made, session, "broken")]


def test_the_error_of_a_deadline_says_how_long_it_was() -> None:
    table = CallTable(lambda at: None)
    assert str(pending(table, 0.25).deadline_error()) == (
        "RPC ran for more than set timeout (250 ms) and will now be marked with an error: rpc to 'b' of f"
    )
    token = current_deadline.set(Deadline.after(0.1))
    try:
        inherited = pending(table, 60, current_deadline.get()).deadline_error()
    finally:
        current_deadline.reset(token)
    assert isinstance(inherited, DeadlineExceeded)
    assert "60000 ms" not in str(inherited) and "(100 ms, what was left" in str(inherited)


# ---------------------------------------------------------------- leases


def test_leases_are_renewed_by_signs_of_life_and_end_once() -> None:
    now = [100.0]
    leases = Leases(10.0, lambda: now[0])
    a, b = Identity("a", 1, 5), Identity("b", 2, 6)
    leases.seen(a)
    leases.seen(b, 95.0)
    leases.seen(b, 90.0)  # an older sign does not shorten a lease
    now[0] = 105.0
    assert leases.take_ended() == []
    now[0] = 106.0
    assert leases.take_ended() == [b] and leases.take_ended() == []
    leases.seen(a, 104.0)
    now[0] = 114.0
    assert leases.take_ended() == []
    now[0] = 114.5
    assert leases.take_ended() == [a]
    leases.seen(a)  # one that comes back
    assert leases.take_ended() == []


# ---------------------------------------------------------------- a session in memory


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
