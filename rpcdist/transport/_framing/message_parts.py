"""Parses messages of protobuf, after it was counted on the wire what they will take.

A message of two bytes can take a hundred once it is parsed, and a number of one byte eight. So whoever wants to use up
the memory of a receiver sends very many very small ones in a field that may be repeated. What the fields take is
counted before anything is made of them; what a message may contain is taken from its description.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rpcdist.errors import ProtocolViolation

M = TypeVar("M", bound=Message)

_COUNTED_FROM_BYTES: Final = 4 << 10
_FREE_BYTES: Final = 1 << 20
"""What the parts of a message may take beside its size, which they may take as well. With the bytes themselves, and the
copy of texts among them, a message takes three times its weight and this."""
_ROOM_BYTES: Final = 64 << 10  # for what is around a value in its message

_FIELD_BYTES: Final = 16
"""Of each field that is looked at, so that looking at all of them takes a bounded time."""
_TEXT_BYTES: Final = 24
_NUMBER_BYTES: Final = 16  # in a field of many numbers, which grows to twice its size
_PART_BYTES: Final = 48
_PER_FIELD_BYTES: Final = 8
"""A message takes so much, and so much for each field that it could have. Measured: a buffer 51, the header of a tensor
91, a share of a reference 187."""
_PER_BYTE: Final = 12  # of a part that has numbers of one byte

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_CONTINUED: Final = bytes(range(0x80, 0x100))


class _Field(NamedTuple):
    """A field with a length: what it takes, for itself and for each of its bytes; whether it takes something for each
    number in it; and its own fields, if they are looked at one by one."""

    cost: int
    per_byte: int
    has_numbers: bool = False
    inner: dict[int, _Field] | None = None


_UNKNOWN: Final = _Field(_TEXT_BYTES, 0)


@cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    """The fields with a length of a message, by their number."""
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
    """Whether a message can have any number of parts that are more than numbers."""
    for field in descriptor.fields:
        kind = field.message_type
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if field.is_repeated and (kind is not None or is_text):
            return True
        if kind is not None and _may_grow(kind):
            return True
    return False


def parsed(kind: type[M], data: bytes) -> M:
    """The message.

    Raises:
        ProtocolViolation: it would take too much for its size.
        DecodeError: it is damaged.
    """
    parsed_cost(kind, data)
    return kind.FromString(data)


def parsed_cost(kind: type[Message], data: bytes | bytearray) -> int:
    """The bytes that the message will take; 0 of a small one, which cannot take much.

    Raises:
        ProtocolViolation: they are too many for its size.
    """
    if len(data) < _COUNTED_FROM_BYTES:
        return 0
    limit = _FREE_BYTES + len(data)
    try:
        return limit - _left(data, 0, len(data), _fields(kind.DESCRIPTOR), limit)
    except IndexError:  # it ends within a field, which the parser says better
        return 0


def missing_weight(kind: type[Message], data: bytes) -> int:
    """How many bytes a message lacks, for `parsed` to take what `data` becomes a part of."""
    most = 1 << 62
    return most - _left(data, 0, len(data), _fields(kind.DESCRIPTOR), most) - len(data) - _FREE_BYTES + _ROOM_BYTES


def _left(data: bytes | bytearray, at: int, end: int, fields: dict[int, _Field], left: int) -> int:
    """What may still be taken after the fields of this message."""
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
            raise ProtocolViolation(f"a message has a field of the wire type {wire_type}, which nothing here sends")
        if left < 0:
            break
    if left < 0:
        raise ProtocolViolation(
            f"the parts of a message of {len(data)} bytes would take more than {_FREE_BYTES + len(data)} once it is "
            "parsed: it has very many very small ones"
        )
    return left


def _varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
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
