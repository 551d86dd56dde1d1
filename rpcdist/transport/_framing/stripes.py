"""How the buffers of a message are cut into stripes, one for each connection that carries them: pure bookkeeping.

The buffers are taken as one sequence of bytes. Both ends know their sizes from the announcement, and so which bytes are
in which stripe: what travels with the bytes is only which message they belong to, and how many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rpcdist.errors import ProtocolViolation

MAX_STRIPES: Final = 8
"""Connections for the payloads of one session, at most."""

MAX_RANGES: Final = 64
"""Parts of buffers in one piece, at most, which are sent by one system call; the least limit of any system is 16, Linux
has 1024. Who receives them takes memory for each, in one turn."""

_ALIGNMENT_BYTES: Final = 64  # both halves of a tensor begin where its elements and the cache's lines do


class StripeCursor:
    """How far one stripe has come.

    Attributes:
        left: bytes of the stripe that are still to come.

    Args:
        sizes: of the buffers, in bytes.
        index: which stripe, from 0.
        count: how many stripes there are.
    """

    __slots__ = ("_at", "_buffer", "_sizes", "left")

    def __init__(self, sizes: Sequence[int], index: int, count: int) -> None:
        total = sum(sizes)
        width = -(-total // count)
        width += -width % _ALIGNMENT_BYTES
        start = min(total, index * width)
        self.left = min(total, start + width) - start
        self._sizes = sizes
        self._buffer = 0
        self._at = start  # in that buffer
        self._skip()

    def __repr__(self) -> str:
        return f"<StripeCursor [{self.left} B left]>"

    def _skip(self) -> None:
        """Goes to the buffer that the next byte is in; there is none where nothing is left."""
        while self.left and self._at >= self._sizes[self._buffer]:
            self._at -= self._sizes[self._buffer]
            self._buffer += 1

    def take(self, num_bytes: int, max_ranges: int = MAX_RANGES) -> list[tuple[int, int, int]]:
        """Goes on by up to `num_bytes`.

        Args:
            num_bytes: more than 0.
            max_ranges: how many ranges it gives at most, even if that is less.

        Returns:
            Number, start and end of what is passed in each buffer.
        """
        ranges: list[tuple[int, int, int]] = []
        while num_bytes and self.left and len(ranges) < max_ranges:
            start = self._at
            size = min(num_bytes, self._sizes[self._buffer] - start)
            size = min(size, self.left)
            ranges.append((self._buffer, start, start + size))
            num_bytes -= size
            self.left -= size
            self._at += size
            self._skip()
        return ranges

    def take_all(self, num_bytes: int) -> list[tuple[int, int, int]]:
        """As `take`, of so many bytes that came.

        Raises:
            ProtocolViolation: the stripe has not that many left, or they lie in more buffers than are sent at once.
        """
        if not 0 < num_bytes <= self.left:
            raise ProtocolViolation(f"{num_bytes} bytes came for a stripe with {self.left} bytes left")
        left = self.left - num_bytes
        ranges = self.take(num_bytes)
        if self.left != left:
            raise ProtocolViolation(f"a piece of {num_bytes} bytes came that lies in more than {MAX_RANGES} buffers")
        return ranges
