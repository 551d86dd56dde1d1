"""Parses protobuf messages, after computing from their bytes how much memory the parsed messages will take.

A message of two bytes can take a hundred bytes once it is parsed, and a number of one byte takes eight. So a hostile
peer could use up the receiver's memory with very many very small messages in a repeated field. The memory of the fields
is therefore computed before they are parsed, with the fields that the descriptor of the message allows.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rpcdist.errors import ProtocolViolation

M = TypeVar("M", bound=Message)

UNWEIGHED_BYTES: Final = 4 << 10
"""The parts of shorter messages are not counted."""
_FREE_BYTES: Final = 1 << 20
"""The parts of a message may take its size and this. With its bytes, and the copies of strings, a message then takes at
most three times its size and this."""
_ROOM_BYTES: Final = 64 << 10  # for the fields around a value in its message

_FIELD_BYTES: Final = 16
"""Counted for each field that is read, so that reading all of them takes a bounded time."""
_TEXT_BYTES: Final = 24
_NUMBER_BYTES: Final = 16  # for each number of a repeated field, which grows to twice its size
_PART_BYTES: Final = 48
_PER_FIELD_BYTES: Final = 8
"""A message takes `_PART_BYTES`, and this for each field that it can have."""
_PER_BYTE: Final = 12  # for each byte of a part whose numbers may have one byte

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_CONTINUED: Final = bytes(range(0x80, 0x100))


class _Field(NamedTuple):
    """A length-delimited field: the memory that it takes, in all and for each of its bytes; whether each number in it
    takes memory; and its own fields, if they are read one by one."""

    cost: int
    per_byte: int
    has_numbers: bool = False
    inner: dict[int, _Field] | None = None


_UNKNOWN: Final = _Field(_TEXT_BYTES, 0)


@cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    """The length-delimited fields of a message, by their number."""
    found: dict[int, _Field] = {}
    for field in descriptor.fields:
        kind = field.message_type
        if kind is not None and _may_grow(kind):
            found[field.number] = _Field(_size(kind), 0, inner=_fields(kind))
        elif kind is not None:
            has_numbers = any(one.is_repeated for one in kind.fields)
            found[field.number] = _Field(_size(kind, not has_numbers), _PER_BYTE if has_numbers else 0)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            found[field.number] = _UNKNOWN
        else:
            found[field.number] = _Field(_TEXT_BYTES, 0, has_numbers=True)
    return found


def _size(kind: Descriptor, with_parts: bool = False) -> int:
    parts = [field.message_type for field in kind.fields if field.message_type is not None] if with_parts else []
    return _PART_BYTES + _PER_FIELD_BYTES * len(kind.fields) + sum(map(_size, parts))


@cache
def _may_grow(descriptor: Descriptor) -> bool:
    """Whether a message can have an unlimited number of parts other than numbers."""
    for field in descriptor.fields:
        kind = field.message_type
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if field.is_repeated and (kind is not None or is_text):
            return True
        if kind is not None and _may_grow(kind):
            return True
    return False


def parsed(kind: type[M], data: bytes) -> M:
    """Parses a message.

    Raises:
        ProtocolViolation: the parsed message would take too much memory for its size.
        DecodeError: it is damaged.
    """
    parsed_cost(kind, data)
    return kind.FromString(data)


def parsed_cost(kind: type[Message], data: bytes | bytearray) -> int:
    """The bytes that the parsed message will take; 0 for a small message, which cannot take much.

    Raises:
        ProtocolViolation: the parsed message would be too large for its size.
    """
    if len(data) < UNWEIGHED_BYTES:
        return 0
    limit = _FREE_BYTES + len(data)
    try:
        return limit - _left(data, 0, len(data), _fields(kind.DESCRIPTOR), limit)
    except IndexError:  # it ends within a field, which the parser reports better
        return 0


def missing_weight(kind: type[Message], data: bytes) -> int:
    """The bytes that a message with `data` as a part needs in addition, so that `parsed` accepts it."""
    most = 1 << 62
    return most - _left(data, 0, len(data), _fields(kind.DESCRIPTOR), most) - len(data) - _FREE_BYTES + _ROOM_BYTES


def _left(data: bytes | bytearray, at: int, end: int, fields: dict[int, _Field], left: int) -> int:
    """The bytes of `left` that remain after the fields of this message."""
    while at < end:
        left -= _FIELD_BYTES
        tag = data[at]
        at += 1
        if tag & 0x80:
            tag, at = _varint(data, at - 1)
        wire_type = tag & 7
        if wire_type == _LENGTH:
            size = data[at]
            at += 1
            if size & 0x80:
                size, at = _varint(data, at - 1)
            field = fields.get(tag >> 3, _UNKNOWN)
            left -= field.cost + field.per_byte * min(size, end - at)
            if left < 0:
                break
            if field.inner is not None:
                left = _left(data, at, min(at + size, end), field.inner, left)
            elif field.has_numbers:
                left -= _NUMBER_BYTES * len(data[at : min(at + size, end)].translate(None, _CONTINUED))
            at += size
        elif wire_type == _VARINT:
            while data[at] & 0x80:
                at += 1
            at += 1
        elif wire_type == _FIXED64:
            at += 8
        elif wire_type == _FIXED32:
            at += 4
        else:
            raise ProtocolViolation(f"a message has a field of wire type {wire_type}, which rpcdist never sends")
        if left < 0:
            break
    if left < 0:
        raise ProtocolViolation(
            f"a message of {len(data)} bytes would take more than {_FREE_BYTES + len(data)} bytes once it is parsed: "
            "it has too many very small parts"
        )
    return left


def _varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ProtocolViolation("a message has a number of more than 64 bits")
