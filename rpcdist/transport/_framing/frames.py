"""How messages become bytes: pure functions over the protobuf wire format of `proto/rpc.proto`.

The writer joins messages that were serialized where they were made, so an envelope costs one copy of its bytes and no
protobuf object; a chunk of a large buffer is written around the buffer's own memory for the same reason. What comes out
is an ordinary `Envelope`, which any protobuf implementation reads.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation

__all__ = [
    "CHUNK_BYTES",
    "CHUNK_HEAD_BYTES",
    "CHUNK_WINDOW_BYTES",
    "MAX_ENVELOPE_BYTES",
    "MAX_FRAME_BYTES",
    "Chunk",
    "ChunkHead",
    "chunk_head",
    "frame",
    "parse",
    "parse_chunk_head",
    "varint",
]

CHUNK_BYTES = 1 << 19
"""Payload of one chunk. Measured on gRPC: one 64 MiB message 0.4 GB/s, chunks of this size 1.4 GB/s."""
CHUNK_WINDOW_BYTES = 8 << 20
"""So much of chunks may be under way in one direction of a session. What is queued in sockets delays small messages,
and gRPC's own window grows to many MiB. Measured, 2 MiB and 8 MiB: the p99 of a no-op beside four echoes of 16 MiB is
14 and 33 ms, and an echo of 64 MiB takes 2.1 and 1.6 times as long as in torch."""
MAX_FRAME_BYTES = 1 << 20
"""A message above this travels as chunks itself."""
MAX_ENVELOPE_BYTES = 1 << 20
"""The writer starts a new envelope when this is reached, so no envelope exceeds the sum of this and one frame."""

CHUNK_HEAD_BYTES = 64
"""No `chunk_head` is longer: five tags and as many numbers of at most ten bytes."""

_CHUNK_TAG = 0x7A  # Envelope.chunk, field 15, length-delimited


class Chunk(NamedTuple):
    """A part of a large buffer as it arrived; `data` is a view of the envelope's bytes."""

    transfer: int
    buffer: int
    offset: int
    data: memoryview


class ChunkHead(NamedTuple):
    """What an envelope says before the bytes of its chunk; `size` counts those, and `head_size` what came before."""

    transfer: int
    buffer: int
    offset: int
    size: int
    head_size: int


def varint(value: int) -> bytes:
    """Protobuf's base-128 encoding of a number >= 0."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frame(message: rpc_pb2.Message) -> bytes:
    """The message as one entry of an envelope; envelopes are such entries joined."""
    body = message.SerializeToString()
    size = len(body)
    if size < 0x80:
        return b"\x0a%c%b" % (size, body)
    return b"\x0a" + varint(size) + body


def chunk_head(transfer: int, buffer: int, offset: int, size: int) -> bytes:
    """The first bytes of an envelope that carries one chunk; the `size` bytes of the chunk follow."""
    head = b"\x08%b\x10%b\x18%b\x22%b" % (varint(transfer), varint(buffer), varint(offset), varint(size))
    return b"".join((b"\x7a", varint(len(head) + size), head))


def parse(data: bytes | bytearray) -> rpc_pb2.Envelope | Chunk:
    """Reads an envelope.

    Raises:
        ProtocolViolation: the bytes are no envelope.
    """
    if data and data[0] == _CHUNK_TAG:
        chunk = _parse_chunk(data)
        if chunk is not None:
            return chunk
    try:
        envelope = rpc_pb2.Envelope.FromString(bytes(data))
    except DecodeError as exc:
        raise ProtocolViolation(f"{len(data)} bytes arrived that are no envelope") from exc
    if envelope.HasField("chunk"):  # written by another implementation, in another order of fields
        chunk_pb = envelope.chunk
        return Chunk(chunk_pb.transfer, chunk_pb.buffer, chunk_pb.offset, memoryview(chunk_pb.data))
    return envelope


def _read_varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError


def parse_chunk_head(data: bytes | bytearray | memoryview, size: int) -> ChunkHead | None:
    """What the first bytes of an envelope say, if it carries a chunk in the layout of `chunk_head`; else None.

    Args:
        data: the envelope's first `CHUNK_HEAD_BYTES`, or all of it.
        size: size of the whole envelope, in bytes.
    """
    fields = []
    try:
        if data[0] != _CHUNK_TAG:
            return None
        length, at = _read_varint(data, 1)
        if at + length != size:
            return None
        for tag in (0x08, 0x10, 0x18, 0x22):
            if data[at] != tag:
                return None
            value, at = _read_varint(data, at + 1)
            fields.append(value)
    except IndexError:
        return None
    head = ChunkHead(fields[0], fields[1], fields[2], fields[3], at)
    return head if at + head.size == size else None


def _parse_chunk(data: bytes | bytearray) -> Chunk | None:
    """The chunk in the layout that `chunk_head` begins, without a copy; None if the layout is another."""
    head = parse_chunk_head(data, len(data))
    if head is None:
        return None
    return Chunk(head.transfer, head.buffer, head.offset, memoryview(data)[head.head_size :])
