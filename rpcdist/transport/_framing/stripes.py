"""Cuts the buffers of a message into stripes, one for each connection that carries them: pure bookkeeping.

The buffers form one sequence of bytes. Both ends know the sizes from the announcement, and so they know the bytes of
each stripe. Only the number of the message and the number of bytes travel with the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rpcdist.errors import ProtocolViolation

MAX_STRIPES: Final = 8
"""Limit of the payload connections of one session."""

MAX_RANGES: Final = 64
"""Limit of the buffer parts in one piece, which one system call sends; systems allow 16 or more, Linux 1024. The
receiver allocates memory for all of them in one turn."""

_ALIGNMENT_BYTES: Final = 64  # each stripe of a tensor begins at an element and at a cache line


class StripeCursor:
    """The position within one stripe.

    Attributes:
        left: the bytes of the stripe that are left.

    Args:
        sizes: sizes of the buffers, in bytes.
        index: number of the stripe, from 0.
        count: number of stripes.
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
        self._at = start  # offset in that buffer
        self._skip()

    def _skip(self) -> None:
        """Moves to the buffer of the next byte, if a byte is left."""
        while self.left and self._at >= self._sizes[self._buffer]:
            self._at -= self._sizes[self._buffer]
            self._buffer += 1

    def take(self, num_bytes: int, max_ranges: int = MAX_RANGES) -> list[tuple[int, int, int]]:
        """Advances by up to `num_bytes`.

        Args:
            num_bytes: more than 0.
            max_ranges: the most ranges to return, even if they have fewer bytes.

        Returns:
            Number of the buffer, start and end of each range passed.
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
        """As `take`, for exactly `num_bytes` that arrived.

        Raises:
            ProtocolViolation: the stripe has fewer bytes left, or they are in more buffers than one piece may have.
        """
        if not 0 < num_bytes <= self.left:
            raise ProtocolViolation(f"{num_bytes} bytes arrived for a stripe with {self.left} bytes left")
        left = self.left - num_bytes
        ranges = self.take(num_bytes)
        if self.left != left:
            raise ProtocolViolation(f"a piece of {num_bytes} bytes arrived for more than {MAX_RANGES} buffers")
        return ranges
