"""Chunks as a peer sends them."""

from __future__ import annotations

from rpcdist.transport._framing.frames import chunk_head

__all__ = ["chunk_envelope"]


def chunk_envelope(transfer: int, buffer: int, offset: int, data: bytes | memoryview) -> bytes:
    """An envelope that carries one chunk, in one run of bytes."""
    return b"".join((chunk_head(transfer, buffer, offset, len(data)), data))
