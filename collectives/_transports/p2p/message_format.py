"""The format of messages between two ranks on a socket. Nothing is ever unpickled.

A socket carries messages from the rank that connected it to the rank that accepted it:

    header  magic, kind, dtype, tag, sequence number on this socket, size of the payload in bytes
    payload the tensor's elements; only of a MESSAGE

In the other direction the receiver sends refusals only: a REFUSED header with the size and dtype that it expected,
followed by a copy of the header that it refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

from rpcdist.collectives._operations.operation import DTYPES
from rpcdist.errors import ProtocolViolation

_HEADER: Final = struct.Struct("<IBBxxqQQ")
_MAGIC: Final = 0x32705250  # "PRp2"
_MOST_BYTES: Final = 1 << 48
HEADER_BYTES: Final = _HEADER.size


class MessageFrame(IntEnum):
    """The kinds of header."""

    MESSAGE = 1
    GOODBYE = 2  # the sender closed its side of the group on purpose
    REFUSED = 3


class Header(NamedTuple):
    """The header before a payload; `code` is `dtype_code` of the elements."""

    kind: int
    code: int
    tag: int
    sequence: int
    size_bytes: int

    def __str__(self) -> str:
        """Describes the payload for errors, e.g. "16 bytes of float32"."""
        return f"{self.size_bytes} bytes of {str(DTYPES[self.code]).removeprefix('torch.')}"


_KINDS: Final = frozenset(MessageFrame)
_ITEM_BYTES: Final = tuple(dtype.itemsize for dtype in DTYPES)


pack_header: Final[Callable[[int, int, int, int, int], bytes]] = partial(_HEADER.pack, _MAGIC)
"""The bytes of a header, of its fields in their order. Raises `struct.error` for a tag that has more than 64 bits."""


def unpack_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Reads a header. Raises `ProtocolViolation` for anything that `pack_header` does not write."""
    magic, kind, code, tag, sequence, size_bytes = _HEADER.unpack_from(data, offset)
    if magic == _MAGIC and kind in _KINDS and code < len(DTYPES) and size_bytes <= _MOST_BYTES:
        if size_bytes % _ITEM_BYTES[code] == 0:
            return Header(kind, code, tag, sequence, size_bytes)
    raise ProtocolViolation(f"not a header: {bytes(data[offset : offset + HEADER_BYTES]).hex()}")


def refusal(expected: Header, refused: Header) -> bytes:
    """Makes the refusal of a receiver that expected a payload like this."""
    expected = Header(MessageFrame.REFUSED, expected.code, refused.tag, refused.sequence, expected.size_bytes)
    return pack_header(*expected) + pack_header(*refused)


def take_refusals(data: bytearray) -> list[tuple[Header, Header]]:
    """Removes the whole refusals from bytes that came from a receiver.

    Returns:
        For each what the receiver expected, and the header that it refused.

    Raises:
        ProtocolViolation: they are something else.
    """
    refusals = []
    while len(data) >= 2 * HEADER_BYTES:
        expected, refused = unpack_header(data), unpack_header(data, HEADER_BYTES)
        if expected.kind != MessageFrame.REFUSED or refused.kind != MessageFrame.MESSAGE:
            raise ProtocolViolation(f"not a refusal: {bytes(data[: 2 * HEADER_BYTES]).hex()}")
        refusals.append((expected, refused))
        del data[: 2 * HEADER_BYTES]
    return refusals
