"""Envelopes as a peer sends them, and what lies in those of ours."""

from __future__ import annotations

from typing import Any

from rpcdist.transport._framing.frames import Chunk, chunk_head, parse
from rpcdist.transport.wire_messages import WireMessage

__all__ = ["chunk_envelope", "chunk_of", "messages_of"]


def chunk_envelope(transfer: int, buffer: int, offset: int, data: bytes | memoryview) -> bytes:
    """An envelope that carries one chunk, in one run of bytes."""
    return b"".join((chunk_head(transfer, buffer, offset, len(data)), data))


def chunk_of(envelope: bytes | bytearray) -> Chunk | None:
    """The chunk in an envelope; None if it carries messages."""
    first = parse(envelope, [])[0]
    return first if isinstance(first, Chunk) else None


def messages_of(envelope: bytes | bytearray) -> list[Any]:
    """The messages in an envelope, without chunks."""
    return [message for message in parse(envelope, []) if isinstance(message, WireMessage)]
