"""Messages as bytes and back, without sockets, in pieces of every size."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdist.collectives._transports.p2p.peer_sockets import InStream, OutStream
from rpcdist.collectives._transports.p2p.requests import (
    GOODBYE,
    HEADER_BYTES,
    MESSAGE,
    REFUSED,
    Header,
    PostedReceive,
    Request,
    Target,
    UnexpectedMessage,
    pack_header,
    refusal,
    take_refusals,
    unpack_header,
)
from rpcdist.errors import ProtocolViolation

LARGE = 70_000  # does not fit into the buffer of a stream


def ignore(_: Request) -> None:
    """The completely sent messages."""


class NoDriver:
    """Moves nothing: nobody waits here."""

    def drive(self, mine: Request) -> None:
        raise AssertionError("somebody waits")

    def ensure_progress(self) -> None:
        raise AssertionError("somebody waits")


def message(size: int, tag: int = 0) -> Request:
    return Request("a send", torch.randint(0, 256, (size,), dtype=torch.uint8), 1, tag, math.inf, NoDriver())


def receive(size: int, tag: int) -> PostedReceive:
    return PostedReceive("a recv", torch.zeros(size, dtype=torch.uint8), 0, tag, math.inf, NoDriver())


class Sink:
    """Takes every message; those of which the tag is odd go straight into a receive, multiples of 5 are dropped."""

    def __init__(self) -> None:
        self.done: list[tuple[int, torch.Tensor]] = []
        self.headers: dict[int, Header] = {}
        self.stream = InStream(self.begin, self.end)

    def begin(self, header: Header) -> Target | None:
        self.headers[header.tag] = header
        if header.tag % 5 == 0:
            return None
        if header.tag % 2:
            return receive(header.size_bytes, header.tag)
        return UnexpectedMessage(0, header, torch.zeros(header.size_bytes, dtype=torch.uint8))

    def end(self, target: Target) -> None:
        tag = target.tag if isinstance(target, PostedReceive) else target.header.tag
        self.done.append((tag, target.tensor))

    def feed(self, data: bytes) -> None:
        while data:
            space = self.stream.space()
            taken = min(len(space), len(data))
            space[:taken] = data[:taken]
            self.stream.advance(taken)
            data = data[taken:]


def sent_bytes(stream: OutStream, piece: int) -> bytes:
    """Everything that the stream sends, if the socket takes `piece` bytes at a time."""
    sent = b""
    while stream.queue:
        data = b"".join(bytes(part) for part in stream.parts())[:piece]
        sent += data
        stream.advance(len(data))
    return sent


@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 31, 32, 33, 1000, 16384, 16385, 65504, 65536, LARGE]), max_size=8),
    piece_out=st.sampled_from([1 << 20, 40_000, 4097]),
    piece_in=st.sampled_from([1 << 20, 65536, 4096, 997]),
)
def test_messages_survive_any_cutting(sizes: list[int], piece_out: int, piece_in: int) -> None:
    out, sink = OutStream(ignore), Sink()
    requests = [message(size, tag) for tag, size in enumerate(sizes, start=1)]
    for request in requests:
        out.put(request)
    data = sent_bytes(out, piece_out)
    for start in range(0, len(data), piece_in):
        sink.feed(data[start : start + piece_in])
    kept = [request for request in requests if request.tag % 5]
    assert [tag for tag, _ in sink.done] == [request.tag for request in kept]
    assert all(torch.equal(got, request.tensor) for (_, got), request in zip(sink.done, kept, strict=True))
    assert not sink.stream.inside_message


def test_a_small_message_is_copied_when_it_is_put() -> None:
    out, sink = OutStream(ignore), Sink()
    request = message(8, tag=1)
    expected = request.tensor.clone()
    out.put(request)
    request.tensor.zero_()
    sink.feed(sent_bytes(out, 1 << 20))
    assert torch.equal(sink.done[0][1], expected)


def test_a_target_can_be_dropped_in_the_middle() -> None:
    out, sink = OutStream(ignore), Sink()
    out.put(message(LARGE, tag=1))
    out.put(message(10, tag=3))
    data = sent_bytes(out, 1 << 20)
    sink.feed(data[: LARGE // 2])
    target = sink.stream.target
    assert isinstance(target, PostedReceive)
    sink.stream.drop_target()
    before = target.tensor.clone()
    sink.feed(data[LARGE // 2 :])
    assert torch.equal(target.tensor, before)
    assert [tag for tag, _ in sink.done] == [3]


def test_a_withdrawn_message_leaves_no_gap() -> None:
    out, sink = OutStream(ignore), Sink()
    requests = [message(10, tag) for tag in (1, 2, 3)]
    for request in requests:
        out.put(request)
    out.parts()  # numbers were given
    assert out.withdraw(requests[1])
    sink.feed(sent_bytes(out, 1 << 20))
    assert [tag for tag, _ in sink.done] == [1, 3]


def test_a_message_that_has_begun_stays() -> None:
    out = OutStream(ignore)
    request = message(10)
    out.put(request)
    out.parts()
    out.advance(1)
    assert not out.withdraw(request)
    assert out.find(0) is request
    assert out.clear() == [request]
    assert out.inside_message


def test_goodbye_ends_the_stream() -> None:
    sink = Sink()
    sink.feed(pack_header(GOODBYE, 0, 0, 0, 0))
    assert sink.stream.said_goodbye
    with pytest.raises(ProtocolViolation):
        sink.feed(pack_header(MESSAGE, 0, 0, 0, 0))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        bytes(HEADER_BYTES),
        pack_header(9, 0, 0, 0, 0),
        pack_header(MESSAGE, 200, 0, 0, 0),
        pack_header(MESSAGE, 0, 0, 0, 1 << 50),
        pack_header(MESSAGE, 7, 0, 0, 5),  # not a multiple of a float
        pack_header(MESSAGE, 0, 0, 1, 0),  # another number than the next
        pack_header(REFUSED, 0, 0, 0, 0),
    ],
)
def test_garbage_is_found(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        Sink().feed(data)


@given(st.binary(min_size=HEADER_BYTES, max_size=3 * HEADER_BYTES))
def test_random_bytes_never_do_anything_else(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        Sink().feed(data)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 63), st.integers(0, 1 << 40))
def test_headers_come_back(tag: int, sequence: int, size: int) -> None:
    header = Header(MESSAGE, 0, tag, sequence, size)
    assert unpack_header(pack_header(*header)) == header


def test_tags_have_64_bits() -> None:
    with pytest.raises(struct.error):
        pack_header(MESSAGE, 0, 1 << 63, 0, 0)


def test_refusals_come_back_in_pieces() -> None:
    refused = Header(MESSAGE, 7, 5, 3, 16)
    data = refusal(Header(MESSAGE, 0, 0, 0, 9), refused) * 2
    come, got = bytearray(), []
    for byte in data:
        come.append(byte)
        got += take_refusals(come)
    assert got == [(Header(REFUSED, 0, 5, 3, 9), refused)] * 2
    with pytest.raises(ProtocolViolation):
        take_refusals(bytearray(b"x" * 64))
