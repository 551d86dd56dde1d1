"""Compact calls and replies as bytes: they come back as they went, and nothing that a peer writes does harm."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from chunk_envelopes import chunk_envelope
from hypothesis import given
from hypothesis import strategies as st

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._framing.calls_in_protobuf import in_protobuf
from rpcdist.transport._framing.frames import (
    MAX_FRAMES,
    MAX_FUNCTIONS,
    Chunk,
    ReturnedSegments,
    call_frame,
    frame,
    parse,
    reply_frame,
    returned_frame,
    want_value,
)
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.wire_messages import (
    MAX_NAME_BYTES,
    CallMessage,
    History,
    Loan,
    ReplyMessage,
    WireMessage,
)

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
I64 = st.integers(-(2**63), 2**63 - 1)
BODIES = st.binary(max_size=100)
REFERENCES = st.none() | st.tuples(I64, I64, U64, I64, I64, U64)


@st.composite
def with_large(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> Any:
    """A message that may have large buffers, some of them lent."""
    message = draw(messages)
    sizes = draw(st.lists(U64, max_size=4))
    if sizes:
        message.transfer, message.large = draw(U64), sizes
        segments = draw(st.lists(U64, min_size=len(sizes), max_size=len(sizes)))
        message.loans = [Loan(index, segment) for index, segment in enumerate(segments) if segment]
    return message


@st.composite
def with_history(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> Any:
    """A message whose value may have history; a call has it inside of a context only."""
    message = draw(messages)
    if isinstance(message, CallMessage):
        message.context = draw(I64)
    if isinstance(message, ReplyMessage) or message.context:
        message.history = draw(st.none() | st.builds(History, I64, U64))
    return message


CALLS = with_history(with_large(st.builds(CallMessage, U64, st.just("m:f"), U64, BODIES, U16, REFERENCES, REFERENCES)))
REPLIES = with_history(with_large(st.builds(ReplyMessage, U64, BODIES, U16, st.booleans())))


def fields(message: WireMessage | Chunk | ReturnedSegments) -> dict[str, Any]:
    assert isinstance(message, CallMessage | ReplyMessage)
    return {name: getattr(message, name) for name in type(message).__slots__} | {
        "large": list(message.large),
        "loans": list(message.loans),
    }


@given(CALLS, st.integers(1, 3))
def test_a_call_comes_back(call: CallMessage, number: int) -> None:
    [found] = parse(call_frame(call, number), ["m:f"] * number)
    assert fields(found) == fields(call)


FETCH = CallMessage(5, "", 9, target=(1, 2, 3, 4, 5, 6), traceparent="00-1-2-01")
ACTOR = CallMessage(
    6, "m:f", result=(1, 2, 3, 4, 5, 6), is_serial=True, device_map=rpc_pb2.DeviceMap(here="a", there="b")
)
NOT_COMPACT = [
    CallMessage(1, "m:f", 7, value=value_pb2.Value(body=b"arguments"), context=-8, is_nested=True),
    CallMessage(2, "", value=value_pb2.Value(body=b"function"), is_by_value=True, target=(1, 2, 3, 4, 5, 6)),
    CallMessage(3, "m:f", counts_as_idle=True, transfer=4, large=[7, 8], loans=[Loan(1, 3)]),
    CallMessage(4, "m:" + "f" * MAX_NAME_BYTES),
    FETCH,
    ACTOR,
    ReplyMessage(1, value=value_pb2.Value(body=b"result"), transfer=4, large=[7]),
    ReplyMessage(2, failure=rpc_pb2.Failure(text="no")),
    ReplyMessage(3, is_stream=True),
]


@pytest.mark.parametrize("message", NOT_COMPACT, ids=lambda message: repr(message))
def test_what_is_not_compact_comes_back_as_the_same_object(message: CallMessage | ReplyMessage) -> None:
    assert not message.is_compact
    [found] = parse(frame(message), [])
    assert type(found) is type(message)
    if isinstance(found, CallMessage):
        assert len(frame(message)) - len(frame(rpc_pb2.Message())) <= found.size_bytes < len(frame(message))
        found.num_arrived_bytes = 0
    assert fields(found) == fields(message)


def test_all_that_arrives_with_arguments_counts() -> None:
    """The arguments keep the whole message in memory, also parts that nobody knows."""
    call = CallMessage(1, "m:f", value=value_pb2.Value(body=b"arguments"), traceparent="0" * 3000)
    message = rpc_pb2.Message.FromString(in_protobuf(call).SerializeToString() + unknown_field(5000))
    [found] = parse(frame(message), [])
    assert isinstance(found, CallMessage) and found.size_bytes >= 8000


def unknown_field(size: int) -> bytes:
    """A text under a number that no message has."""
    found = rpc_pb2.Failure(text="x" * size).SerializeToString()
    return b"\xfa\xff\x03" + found[found.index(b"x") - 2 :]


@given(CALLS.filter(lambda call: call.result is not None))
def test_a_creation_may_be_changed_to_want_the_value(call: CallMessage) -> None:
    data = call_frame(call, 1, b"m:f")
    assert isinstance(data, bytearray)
    assert not want_value(data, call.id ^ 1) and want_value(data, call.id)
    call.wants_value = True
    [found] = parse(data, [])
    assert fields(found) == fields(call)


def test_the_value_of_a_creation_is_wanted_while_its_message_is_the_last_that_waits() -> None:
    creation, other = CallMessage(7, "m:f", result=(1, 2, 3, 4, 5, 6)), CallMessage(8, "m:f")
    outgoing = Outgoing()
    assert not outgoing.want_value(7)  # nothing waits
    outgoing.add(other)
    assert not outgoing.want_value(8)  # what it returns is its value
    outgoing.add(creation)
    assert outgoing.want_value(7)
    written = outgoing.next_envelope() or b""
    assert [call.wants_value for call in parse(written, []) if isinstance(call, CallMessage)] == [False, True]
    assert not outgoing.want_value(7)  # it has left
    outgoing.add(creation)
    outgoing.add(other)
    assert not outgoing.want_value(7)


@given(REPLIES, st.booleans())
def test_a_reply_comes_back(reply: ReplyMessage, has_value: bool) -> None:
    reply.has_value = reply.created and has_value
    [found] = parse(reply_frame(reply), [])
    assert fields(found) == fields(reply)


@given(st.lists(U64))
def test_returned_segments_come_back(numbers: list[int]) -> None:
    [found] = parse(returned_frame(numbers), [])
    assert isinstance(found, ReturnedSegments) and list(found.numbers) == numbers


def test_a_function_is_named_once_in_the_order_of_numbers() -> None:
    names: list[str] = []
    first = call_frame(CallMessage(1, "m:f"), 1, b"m:f")
    second = call_frame(CallMessage(2, "größe:g"), 2, "größe:g".encode())
    found = parse(first + second + call_frame(CallMessage(3, "m:f"), 1), names)
    found += parse(call_frame(CallMessage(4, "größe:g"), 2), names)
    assert [(call.id, call.function) for call in found if isinstance(call, CallMessage)] == [
        (1, "m:f"),
        (2, "größe:g"),
        (3, "m:f"),
        (4, "größe:g"),
    ]
    assert names == ["m:f", "größe:g"]


def test_a_name_without_a_number_is_not_kept() -> None:
    names: list[str] = []
    [call] = parse(call_frame(CallMessage(1, "m:f"), 0, b"m:f"), names)
    assert isinstance(call, CallMessage) and call.function == "m:f" and names == []


def test_a_fetch_names_no_function() -> None:
    [call] = parse(call_frame(CallMessage(1, "", target=(1, 2, 3, 4, 5, 6)), 0), [])
    assert isinstance(call, CallMessage) and (call.function, call.target) == ("", (1, 2, 3, 4, 5, 6))


NAMED = bytes(call_frame(CallMessage(1, "m:f"), 1, b"m:f"))
LARGE = ReplyMessage(1)
LARGE.large = [5]


@pytest.mark.parametrize(
    ("envelope", "says"),
    [
        (NAMED[:-1], "not an envelope"),
        (NAMED[:27], "not an envelope"),
        (NAMED + b"\0", "not an envelope"),
        (call_frame(CallMessage(1, ""), 1), "function 1 arrived; the peer has named 0"),
        (call_frame(CallMessage(1, ""), 0), "function 0 arrived"),
        (call_frame(CallMessage(1, "", target=(1, 2, 3, 4, 5, 6)), 9), "function 9 arrived"),
        (NAMED + NAMED, "number 1 was given a name after 1 others"),
        (call_frame(CallMessage(1, "m:f"), 2, b"m:f"), "number 2 was given a name after 0 others"),
        (call_frame(CallMessage(1, "m:f"), 1, b"x" * (MAX_NAME_BYTES + 1)), "a function's name of 1001 bytes"),
        (call_frame(CallMessage(1, "m:f"), 1, b"\xff\xff"), "not an envelope"),
        (NAMED[:5] + b"\x80" + NAMED[6:], "function 1 arrived; the peer has named 0"),
        (NAMED[:5] + b"\x04" + NAMED[6:], "cut off"),
        (NAMED[:5] + b"\x01" + NAMED[6:], "not an envelope"),
        (NAMED[:5] + b"\x12" + NAMED[6:], "not an envelope"),
        (call_frame(CallMessage(1, "m:f"), 1)[:5] + b"\x10" + bytes(22), "not an envelope"),
        (call_frame(CallMessage(1, "m:f"), 1)[:5] + b"\x20" + bytes(22), "history is cut off"),
        (reply_frame(ReplyMessage(1))[:5] + b"\x20" + bytes(22), "history is cut off"),
        (reply_frame(ReplyMessage(1))[:5] + b"\x02" + bytes(22), ""),
        (reply_frame(ReplyMessage(1))[:5] + b"\x04" + bytes(22), "unknown flags (0x4)"),
        (reply_frame(ReplyMessage(1))[:5] + b"\x42" + bytes(22), ""),
        (reply_frame(ReplyMessage(1))[:5] + b"\x40" + bytes(22), "has a value, but does not answer a remote()"),
        (NAMED[:5] + b"\x42" + NAMED[6:], "a call arrived that asks for a value, but is not a remote()"),
        (reply_frame(LARGE)[:36] + b"\xff\xff" + reply_frame(LARGE)[38:], "65535 large buffers were announced"),
        (reply_frame(LARGE)[:36] + b"\0\0" + reply_frame(LARGE)[38:], "0 large buffers were announced"),
        (b"\0" * 28, "unknown kind (0)"),
        (b"\x07" + returned_frame([])[1:] + bytes(7), "not an envelope"),
        (frame(rpc_pb2.Message(call=rpc_pb2.Call(id=1, function="m:f")))[:-1] + b"\xff", "not an envelope"),
    ],
)
def test_what_is_malformed_is_named(envelope: bytes, says: str) -> None:
    if not says:  # what the rows beside it differ from
        parse(envelope, [])
        return
    with pytest.raises(ProtocolViolation) as caught:
        parse(envelope, [])
    assert says in str(caught.value)


def test_no_more_functions_than_the_limit_are_kept() -> None:
    names = [f"m:f{number}" for number in range(MAX_FUNCTIONS)]
    with pytest.raises(ProtocolViolation, match=f"number {MAX_FUNCTIONS + 1} was given a name"):
        parse(call_frame(CallMessage(1, "m:f"), MAX_FUNCTIONS + 1, b"m:f"), names)
    assert len(names) == MAX_FUNCTIONS


SAMPLES = [
    NAMED,
    reply_frame(LARGE),
    chunk_envelope(1, 0, 0, b"x" * 50),
    frame(rpc_pb2.Message(ack=rpc_pb2.Ack())),
    returned_frame([1, 2]),
]


@given(st.data())
def test_whatever_arrives_is_messages_or_a_violation(data: st.DataObject) -> None:
    envelope = bytearray(b"".join(data.draw(st.lists(st.sampled_from(SAMPLES), max_size=3))) or data.draw(BODIES))
    for _ in range(data.draw(st.integers(0, 4))):
        if envelope:
            envelope[data.draw(st.integers(0, len(envelope) - 1))] = data.draw(st.integers(0, 255))
    names = ["m:f"] * data.draw(st.integers(0, 2))
    try:
        found = parse(bytes(envelope[: data.draw(st.integers(0, len(envelope)))]), names)
    except ProtocolViolation as exc:
        assert str(exc)
    else:
        assert all(isinstance(message, WireMessage | Chunk | ReturnedSegments) for message in found)
        assert sum(len(m.body) for m in found if isinstance(m, CallMessage | ReplyMessage)) <= len(envelope)


# ---------------------------------------------------------------- numbering at the sender


def sent(outgoing: Outgoing, names: list[str]) -> list[str]:
    found = []
    while (envelope := outgoing.next_envelope()) is not None:
        found += [call.function for call in parse(envelope, names) if isinstance(call, CallMessage)]
    return found


def test_the_sender_stops_numbering_at_the_limit() -> None:
    outgoing, names = Outgoing(), list[str]()
    functions = [f"m:f{number}" for number in range(MAX_FUNCTIONS + 3)]
    for _ in range(2):
        for function in functions:
            outgoing.add(CallMessage(1, function))
    assert sent(outgoing, names) == functions * 2
    assert names == functions[:MAX_FUNCTIONS]


def test_threads_that_name_functions_at_once_confuse_nobody() -> None:
    outgoing, names = Outgoing(), list[str]()
    functions = [f"m:f{number}" for number in range(300)]
    barrier = threading.Barrier(4)

    def send() -> None:
        barrier.wait(20)
        for function in functions:
            outgoing.add(CallMessage(1, function))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(sent(outgoing, names)) == sorted(functions * 4)
    assert sorted(names) == sorted(functions)


def test_an_envelope_has_a_bounded_number_of_frames() -> None:
    """A mebibyte of calls was handled in one piece, while no heartbeat of others was read."""
    outgoing, names = Outgoing(), list[str]()
    for number in range(MAX_FRAMES + 5):
        outgoing.add(ReplyMessage(number))
    assert [len(parse(outgoing.next_envelope() or b"", names)) for _ in range(2)] == [MAX_FRAMES, 5]
    with pytest.raises(ProtocolViolation, match=f"more than {MAX_FRAMES} frames"):
        parse(b"".join(reply_frame(ReplyMessage(number)) for number in range(MAX_FRAMES + 1)), names)
