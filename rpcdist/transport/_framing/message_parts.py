"""Parses messages of protobuf, after their fields were counted on the wire.

A message of two bytes can take a hundred once it is parsed, and its object in Python more. So whoever wants to use up
the memory of a receiver sends very many very small ones in a field that may be repeated. The fields are counted before
anything is made of them; what a message may contain is taken from its description.
"""

from __future__ import annotations

from functools import cache
from typing import Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rpcdist.errors import ProtocolViolation

__all__ = ["PARSED_FIELD_BYTES", "count_fields", "parsed"]

M = TypeVar("M", bound=Message)

PARSED_FIELD_BYTES: Final = 256
"""What a field takes at most, once there is an object for it. Measured: the header of a tensor 160 to 250."""

_COUNTED_FROM_BYTES: Final = 4 << 10
_FREE_FIELDS: Final = 1024
_LEAST_BYTES: Final = 4
"""On average, of the fields that are counted. The smallest tensors that are sent have 5.5 for each of theirs."""
_MAX_FIELDS: Final = 1 << 19
"""Of one message: a quarter of a million tensors that are too unlike each other for runs."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

_Inner = dict[int, "_Inner"]


@cache
def _inner(descriptor: Descriptor) -> _Inner:
    """The fields of a message that are counted inside, by their number: those whose own parts may be repeated."""
    found: _Inner = {}
    for field in descriptor.fields:
        kind = field.message_type
        if kind is not None and _may_grow(kind):
            found[field.number] = _inner(kind)
    return found


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
        ProtocolViolation: it has too many fields for its size.
        DecodeError: it is damaged.
    """
    count_fields(kind, data)
    return kind.FromString(data)


def count_fields(kind: type[Message], data: bytes) -> int:
    """How many fields there are, as far as they are counted; 0 of a small message, in which there cannot be many.

    Raises:
        ProtocolViolation: they are too many for its size.
    """
    if len(data) < _COUNTED_FROM_BYTES:
        return 0
    limit = min(_MAX_FIELDS, _FREE_FIELDS + len(data) // _LEAST_BYTES)
    try:
        return limit - _left(data, 0, len(data), _inner(kind.DESCRIPTOR), limit)
    except IndexError:  # it ends within a field, which the parser says better
        return 0


def _left(data: bytes, at: int, end: int, inner: _Inner, left: int) -> int:
    """How many more fields there may be after those of this message."""
    while at < end:
        left -= 1
        if left < 0:
            raise ProtocolViolation(
                f"a message of {len(data)} bytes has more fields than its size is worth: at most {_MAX_FIELDS}, of "
                f"{_LEAST_BYTES} bytes on average"
            )
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
            below = inner.get(tag >> 3)
            if below is not None:
                left = _left(data, at, min(at + size, end), below, left)
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
    return left


def _varint(data: bytes, at: int) -> tuple[int, int]:
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
