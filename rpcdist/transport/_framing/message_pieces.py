"""Messages that are too large for gRPC's limit, cut into pieces: messages of a type with the field `data`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from typing import Any, Final

from google.protobuf.message import Message

from rpcdist.transport._framing.frames import CHUNK_BYTES

LARGEST_UNCUT_BYTES: Final = 2 << 20
"""The size that fits into one message of gRPC, with room for its head; see the limit of the channels."""
LARGEST_JOINED_BYTES: Final = 160 << 20
"""All pieces of a message together: more than any part sends, so that nobody can fill the memory of a process."""


class TooLarge(ValueError):
    """The pieces are more than `LARGEST_JOINED_BYTES`."""


def cut(data: bytes, piece_type: type[Message]) -> Iterator[bytes]:
    """The serialized pieces of `data`; at least one."""
    kind: Any = piece_type
    for start in range(0, max(1, len(data)), CHUNK_BYTES):
        yield kind(data=data[start : start + CHUNK_BYTES]).SerializeToString()


async def joined(pieces: AsyncIterable[bytes], piece_type: type[Message]) -> bytes:
    """The data that the pieces were cut from.

    Raises:
        TooLarge: nothing more is read then.
        DecodeError: something is no piece.
    """
    kind: Any = piece_type
    parts: list[bytes] = []
    size_bytes = 0
    async for piece in pieces:
        parts.append(kind.FromString(piece).data)
        size_bytes += len(parts[-1])
        if size_bytes > LARGEST_JOINED_BYTES:
            raise TooLarge(f"more than {LARGEST_JOINED_BYTES} bytes")
    return b"".join(parts)
