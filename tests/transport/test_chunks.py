"""Frames, chunks and turns on the wire, as tables: pure functions and bookkeeping, no I/O."""

from __future__ import annotations

import random
from typing import Any

import pytest
from chunk_envelopes import chunk_envelope, chunk_of, messages_of
from hypothesis import given, settings
from hypothesis import strategies as st
from session_pairs import announced, call
from transport_nodes import Memory

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation, SerializationError
from rpcdist.transport._framing.frames import (
    CHUNK_BYTES,
    CHUNK_HEAD_BYTES,
    CHUNK_WINDOW_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_FRAME_BYTES,
    Chunk,
    frame,
    parse,
    parse_chunk_head,
)
from rpcdist.transport._framing.incoming import (
    BUFFER_BYTES,
    MAX_BUFFERS,
    TRANSFER_BYTES,
    Incoming,
    IncomingBuffer,
    heap_buffer,
)
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import CallMessage, CompactPass, Loan, ReplyMessage, WireMessage, set_large

MIB = 1 << 20


def chunk(transfer: int, buffer: int, offset: int, data: bytes) -> Chunk:
    return Chunk(transfer, buffer, offset, memoryview(data))


# ---------------------------------------------------------------- frames


def test_joined_frames_are_an_envelope() -> None:
    messages = [rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=number)) for number in (0, 1, 100, 200, 20_000)]
    assert parse(b"".join(map(frame, messages)), []) == messages


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=300))
def test_a_chunk_comes_back(transfer: int, buffer: int, offset: int, data: bytes) -> None:
    encoded = chunk_envelope(transfer, buffer, offset, memoryview(data))
    assert parse(encoded, []) == [Chunk(transfer, buffer, offset, memoryview(data))]
    head = parse_chunk_head(encoded[:CHUNK_HEAD_BYTES], len(encoded))
    assert head == (transfer, buffer, offset, len(data))


# ---------------------------------------------------------------- incoming


def test_a_message_without_buffers_is_delivered_at_once() -> None:
    message = call(1)
    assert Incoming().announce(message) == (message, [])


def test_a_message_is_delivered_with_its_last_byte_and_once() -> None:
    incoming = Incoming()
    message = announced(5, 4, 0, 3)
    assert incoming.announce(message) is None
    assert incoming.chunk(chunk(5, 2, 0, b"ab")) is None
    assert incoming.chunk(chunk(5, 0, 0, b"1234")) is None
    delivery = incoming.chunk(chunk(5, 2, 2, b"c"))
    assert delivery is not None
    assert delivery[0] == message and [bytes(buffer.view) for buffer in delivery[1]] == [b"1234", b"", b"abc"]
    assert incoming.chunk(chunk(5, 2, 2, b"c")) is None
    assert "0 transfers" in repr(incoming)


def test_a_message_with_empty_buffers_waits_for_nothing() -> None:
    delivery = Incoming().announce(announced(1, 0, 0))
    assert delivery is not None and len(delivery[1]) == 2


def test_transfers_do_not_mix() -> None:
    incoming = Incoming()
    for number in (1, 2):
        incoming.announce(announced(number, 4))
    assert incoming.chunk(chunk(1, 0, 0, b"aa")) is None
    assert incoming.chunk(chunk(2, 0, 0, b"bbb")) is None
    first, second = incoming.chunk(chunk(1, 0, 2, b"aa")), incoming.chunk(chunk(2, 0, 3, b"b"))
    assert first is not None and second is not None
    assert [bytes(delivery[1][0].view) for delivery in (first, second)] == [b"aaaa", b"bbbb"]


VIOLATIONS: list[tuple[str, list[Any], str]] = [
    ("announced twice", [announced(1, 5), announced(1, 5)], "announced twice"),
    ("announced as number 0", [announced(0, 5)], "announced twice"),
    ("out of order", [announced(1, 5), chunk(1, 0, 2, b"xx")], "bytes is at 0"),
    ("repeated", [announced(1, 5), chunk(1, 0, 0, b"xx"), chunk(1, 0, 0, b"xx")], "bytes is at 2"),
    ("larger than announced", [announced(1, 5), chunk(1, 0, 0, b"xxxxxx")], "5 announced bytes"),
    ("larger in the end", [announced(1, 5), chunk(1, 0, 0, b"xxx"), chunk(1, 0, 3, b"xxx")], "5 announced bytes"),
    ("another buffer", [announced(1, 5), chunk(1, 1, 0, b"x")], "buffer 1 of 1"),
    ("more buffers than are allowed", [announced(1, *[1] * (MAX_BUFFERS + 1))], "65537 buffers"),
    ("wrapped nonsense", [announced(1, 2, wrapped=True), chunk(1, 0, 0, b"\xff\xff")], "wrapped"),
]


@pytest.mark.parametrize(("steps", "text"), [case[1:] for case in VIOLATIONS], ids=[case[0] for case in VIOLATIONS])
def test_what_a_peer_must_not_send(steps: list[Any], text: str) -> None:
    incoming = Incoming()

    def apply(step: Any) -> object:
        return incoming.chunk(step) if isinstance(step, Chunk) else incoming.announce(step)

    for step in steps[:-1]:
        assert apply(step) is None
    with pytest.raises(ProtocolViolation, match=text):
        apply(steps[-1])


def no_memory(size_bytes: int) -> IncomingBuffer:
    raise MemoryError(f"{size_bytes} bytes of a few")


@pytest.mark.parametrize("reason", ["bytes of a few", "max_incoming_bytes"])
def test_a_transfer_that_does_not_fit_fails_alone(reason: str) -> None:
    """Its bytes are dropped, its message comes with the reason, and the session goes on."""
    if reason == "max_incoming_bytes":
        incoming = Incoming(announced=(counted := AnnouncedBytes(TRANSFER_BYTES + 2 * BUFFER_BYTES + 9)))
    else:
        incoming = Incoming(no_memory, announced=(counted := AnnouncedBytes()))
    assert incoming.announce(announced(1, 6, 4)) is None
    assert incoming.chunk(chunk(1, 0, 0, b"xxx")) is None and incoming.chunk(chunk(1, 1, 0, b"xxxx")) is None
    with pytest.raises(ProtocolViolation, match="bytes is at 3"):  # what it drops is looked at as well
        incoming.chunk(chunk(1, 0, 4, b"xxx"))
    delivery = incoming.chunk(chunk(1, 0, 3, b"xxx"))
    assert delivery is not None and delivery[0] == announced(1, 6, 4)
    for buffer in delivery[1]:
        with pytest.raises(SerializationError, match=reason):
            buffer.view  # noqa: B018
        with pytest.raises(SerializationError, match=reason):
            buffer.memory  # type: ignore[attr-defined]  # noqa: B018
    assert incoming.missing == 0 and repr(counted).startswith("<AnnouncedBytes 0 of")


def test_an_aborted_transfer_is_forgotten_and_its_late_chunks_are_dropped() -> None:
    taken: list[int] = []

    def allocate(size_bytes: int) -> IncomingBuffer:
        taken.append(size_bytes)
        return heap_buffer(size_bytes)

    incoming = Incoming(allocate)
    incoming.announce(announced(1, 5))
    for number in (1, 1, 9):
        incoming.abort(number)
    assert incoming.chunk(chunk(1, 0, 0, b"xx")) is None
    assert incoming.announce(announced(1, 2)) is None  # the number is free again
    assert incoming.chunk(chunk(1, 0, 0, b"x")) is None
    assert taken == [2]


# ---------------------------------------------------------------- outgoing


def written(outgoing: Outgoing) -> list[bytes]:
    """Everything, for a peer that takes chunks as fast as they come."""
    envelopes = []
    while (envelope := outgoing.next_envelope()) is not None:
        envelopes.append(envelope)
        if chunk_of(envelope) is not None:
            outgoing.grant(len(envelope))
    return envelopes


def test_no_more_chunks_than_the_peer_has_granted_and_messages_pass() -> None:
    outgoing = Outgoing()
    outgoing.add(call(1), [Memory(bytes(CHUNK_WINDOW_BYTES + 3 * CHUNK_BYTES))])
    sent = list(iter(outgoing.next_envelope, None))
    assert [shape(envelope) for envelope in sent[:1]] == ["1"]
    assert len(sent) == 1 + CHUNK_WINDOW_BYTES // CHUNK_BYTES
    assert not outgoing and not outgoing.is_empty
    outgoing.add(call(2))
    assert shape(outgoing.next_envelope() or b"") == "2"
    assert outgoing.next_envelope() is None
    assert outgoing.grant(len(sent[1]))  # a transfer waited for it
    assert chunk_of(outgoing.next_envelope() or b"") is not None
    outgoing.grant(CHUNK_WINDOW_BYTES)
    assert len(written(outgoing)) == 2 and outgoing.is_empty
    assert not outgoing.grant(CHUNK_WINDOW_BYTES)


def shape(envelope: bytes) -> str:
    """`3,4` for messages of those ids, `7:1@0+5` for a chunk of transfer 7, buffer 1."""
    parsed = chunk_of(envelope)
    if parsed is not None:
        return f"{parsed.transfer}:{parsed.buffer}@{parsed.offset // CHUNK_BYTES}+{len(parsed.data)}"
    return ",".join(str(message.id) for message in messages_of(envelope))


def receive(envelopes: list[bytes], incoming: Incoming | None = None) -> list[tuple[int, list[bytes]]]:
    """The ids of what is delivered, with the buffers."""
    incoming = incoming or Incoming()
    delivered = []
    for envelope in envelopes:
        parsed = chunk_of(envelope)
        if parsed is not None:
            deliveries = [incoming.chunk(parsed)]
        else:
            deliveries = []
            for message in messages_of(envelope):
                if isinstance(message, rpc_pb2.Message) and message.HasField("transfer_aborted"):
                    incoming.abort(message.transfer_aborted.transfer)
                else:
                    deliveries.append(incoming.announce(message))
        for done, buffers in filter(None, deliveries):
            assert isinstance(done, CallMessage)
            delivered.append((done.id, [bytes(buffer.view) for buffer in buffers]))
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
    outgoing.add(call(1), [Memory(b"a" * (2 * CHUNK_BYTES + 3)), Memory(b"b" * 4)])
    outgoing.add(call(2), [Memory(b"c" * (CHUNK_BYTES + 1))])
    outgoing.add(call(3))
    seen = []
    while (envelope := outgoing.next_envelope()) is not None:
        seen.append(shape(envelope))
        if len(seen) in (2, 3):
            outgoing.add(call(len(seen) + 2))
    assert seen == [
        "1,2,3", f"1:0@0+{CHUNK_BYTES}", "4", f"2:0@0+{CHUNK_BYTES}", "5",
        f"1:0@1+{CHUNK_BYTES}", "2:0@1+1", "1:0@2+3", "1:1@0+4",
    ]  # fmt: skip


def test_a_stream_of_small_messages_does_not_starve_a_transfer() -> None:
    outgoing = Outgoing()
    outgoing.add(call(1), [Memory(b"a" * 3 * CHUNK_BYTES)])
    kinds = ""
    for number in range(2, 8):
        outgoing.add(call(number))
        envelope = outgoing.next_envelope()
        assert envelope is not None
        kinds += "m" if chunk_of(envelope) is None else "p"
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
    outgoing.add(call(2, body), [Memory(b"beside" * MIB), Memory(b"")])
    outgoing.add(call(3))
    envelopes = written(outgoing)
    assert max(map(len, envelopes)) <= MAX_ENVELOPE_BYTES + MAX_FRAME_BYTES
    received = dict(receive(envelopes))
    assert received == {1: [], 2: [b"beside" * MIB, b""], 3: []}


@pytest.mark.parametrize(
    "answer",
    [
        ReplyMessage(1, bytes(500)),
        CompactPass(1, 2, bytes(500)),  # the outcome of an optimizer's step
        rpc_pb2.Message(call_state=rpc_pb2.CallState(id=1)),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_small_answers_that_nobody_reads_overdraw_an_account(answer: WireMessage) -> None:
    """Those to steps of optimizers were not counted: a peer that read none made the memory of a worker grow."""
    account = AnnouncedBytes(1)
    outgoing, num_queued = Outgoing(account), 0
    while not outgoing.is_overdrawn and num_queued < 1_000_000:
        if not outgoing.add_quickly(answer):
            outgoing.add(answer)
        num_queued += 1
    assert outgoing.is_overdrawn and num_queued * len(frame(answer)) < 3 * MIB
    written(outgoing)
    assert "<AnnouncedBytes 0 of" in repr(account)


def test_an_abort_stops_a_transfer_wherever_it_is() -> None:
    for envelopes_before in range(4):
        outgoing, incoming = Outgoing(), Incoming()
        number = outgoing.add(call(1), [Memory(b"a" * 3 * CHUNK_BYTES)])
        outgoing.add(call(2), [Memory(b"b" * 10)])
        sent = [outgoing.next_envelope() for _ in range(envelopes_before)]
        assert outgoing.abort(number) is not None
        outgoing.add(rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=number)))
        assert receive([*filter(None, sent), *written(outgoing)], incoming) == [(2, [b"b" * 10])]
        assert not outgoing.abort(number)


def test_an_abort_stops_what_is_wrapped_and_what_follows_it() -> None:
    for envelopes_before in (0, 2, 4):
        outgoing = Outgoing()
        number = outgoing.add(call(1, b"x" * 2 * MIB), [Memory(b"a" * 2 * CHUNK_BYTES)])
        sent = [outgoing.next_envelope() for _ in range(envelopes_before)]
        assert outgoing.abort(number) is not None
        outgoing.add(rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=number)))
        assert receive([*filter(None, sent), *written(outgoing)]) == []


@pytest.mark.parametrize("envelopes_before", [0, 1, 2, 3])
def test_an_abort_says_which_segments_the_peer_will_not_read_of(envelopes_before: int) -> None:
    outgoing = Outgoing()
    message = call(1, b"x" * 2 * MIB)
    set_large(message, [2 * CHUNK_BYTES, MIB], [Loan(1, 7)])
    number = outgoing.add(message, [Memory(b"a" * 2 * CHUNK_BYTES), Memory(b"")])
    for _ in range(envelopes_before):
        outgoing.next_envelope()
    assert outgoing.abort(number) == [7]
    assert not outgoing.abort(number)


def test_a_message_that_is_wrapped_can_be_aborted_too() -> None:
    outgoing = Outgoing()
    assert outgoing.add(call(1)) == 0
    number = outgoing.add(call(2, b"x" * 2 * MIB))
    assert number and outgoing.abort(number) is not None
    outgoing.add(rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=number)))
    assert receive(written(outgoing)) == [(1, [])]


def test_an_abort_after_the_last_chunk_changes_nothing() -> None:
    outgoing = Outgoing()
    number = outgoing.add(call(1), [Memory(b"abc")])
    envelopes = written(outgoing)
    assert outgoing.abort(number) is None and outgoing.abort(77) is None
    assert receive(envelopes) == [(1, [b"abc"])]


def item(stream: int, index: int, size: int = 0) -> tuple[rpc_pb2.Message, list[Memory]]:
    """An item of a stream: its index in the message, `size` bytes beside it."""
    message = rpc_pb2.Message()
    message.stream_item.id = stream
    message.stream_item.value.body = str(index).encode()
    return message, [Memory(b"i" * size)] if size else []


def stream_parts(envelopes: list[bytes]) -> dict[int, list[str]]:
    """The parts of each stream in the order of their delivery."""
    incoming, parts = Incoming(), {}  # type: ignore[var-annotated]
    for envelope in envelopes:
        parsed = chunk_of(envelope)
        arrived = map(incoming.announce, messages_of(envelope)) if parsed is None else [incoming.chunk(parsed)]
        for message, _ in filter(None, arrived):
            if not isinstance(message, rpc_pb2.Message):
                continue
            if message.HasField("stream_item"):
                parts.setdefault(message.stream_item.id, []).append(message.stream_item.value.body.decode().strip("x"))
            elif message.HasField("stream_end"):
                parts.setdefault(message.stream_end.id, []).append("end")
    return parts


def test_the_parts_of_a_stream_keep_their_order_and_others_pass_them() -> None:
    outgoing = Outgoing()
    outgoing.add(*item(9, 0, 2 * CHUNK_BYTES))
    outgoing.add(*item(9, 1))
    outgoing.add(call(1))
    outgoing.add(*item(8, 0))
    outgoing.add(rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=9)))
    first = outgoing.next_envelope()
    assert first is not None and len(messages_of(first)) == 3
    assert "2 messages, 1 transfers" in repr(outgoing)
    assert stream_parts([first, *written(outgoing)]) == {8: ["0"], 9: ["0", "1", "end"]}


def test_a_held_stream_goes_on_when_the_transfer_before_it_is_aborted() -> None:
    outgoing = Outgoing()
    number = outgoing.add(*item(9, 0, 3 * CHUNK_BYTES))
    outgoing.add(*item(9, 1))
    sent = [outgoing.next_envelope(), outgoing.next_envelope()]
    assert outgoing.abort(number) is not None
    assert stream_parts([*filter(None, sent), *written(outgoing)]) == {9: ["1"]}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 10, CHUNK_BYTES + 1, -2 * MIB])), max_size=12))
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


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=3)), max_size=6))
def test_whatever_is_sent_arrives_whole(messages: list[tuple[int, list[int]]]) -> None:
    outgoing = Outgoing()
    expected = []
    for number, (mebibytes, sizes) in enumerate(messages, 1):
        buffers = [bytes([number]) * size for size in sizes]
        outgoing.add(call(number, b"x" * (mebibytes * MIB // 2)), list(map(Memory, buffers)))
        expected.append((number, buffers))
    assert sorted(receive(written(outgoing))) == expected


class OfDevice(Memory):
    """Memory to which a device copies; its first bytes are there."""

    may_wait = True

    def __init__(self, data: bytes, num_ready: int) -> None:
        super().__init__(data)
        self.num_ready = num_ready

    def part(self, start: int, end: int) -> memoryview:
        assert end <= self.num_ready, "the loop would wait"
        return super().part(start, end)

    def is_ready(self, end: int) -> bool:
        return end <= self.num_ready


def test_what_a_device_has_not_copied_yet_holds_up_nothing_else() -> None:
    outgoing = Outgoing()
    late = OfDevice(b"a" * 3 * CHUNK_BYTES, CHUNK_BYTES)
    outgoing.add(call(1), [late])
    assert [shape(outgoing.next_envelope() or b"") for _ in range(2)] == ["1", f"1:0@0+{CHUNK_BYTES}"]
    assert not outgoing.waits
    assert outgoing.next_envelope() is None and outgoing.waits and outgoing and not outgoing.is_empty
    outgoing.add(call(2), [Memory(b"b" * (CHUNK_BYTES + 1))])
    assert not outgoing.waits
    seen = [shape(envelope) for envelope in iter(outgoing.next_envelope, None)]
    assert seen == ["2", f"2:0@0+{CHUNK_BYTES}", "2:0@1+1"] and outgoing.waits
    late.num_ready = late.size
    seen = [shape(envelope) for envelope in iter(outgoing.next_envelope, None)]
    assert seen == [f"1:0@1+{CHUNK_BYTES}", f"1:0@2+{CHUNK_BYTES}"] and not outgoing.waits and outgoing.is_empty
