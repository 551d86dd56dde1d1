"""Where everything lies in the segment of a group. Pure: numbers in, numbers out.

    what        how many        content
    headers     2 x size        flag (8 bytes), fingerprint, zeros
    wakeups     2               the last step of that half that all ranks came to, written by the last ones to come
    sleepers    1               one byte for each rank: whether it sleeps on the wakeup word
    tables      2 x size        sizes of the chunks that this rank sends, then of those that it takes (8 bytes each)
    buffers     2 x size        data that this rank publishes

"2 x size" is: for each half (see [Note: steps] in `signals`), for each rank. Each of those is written by one rank
only. Everything lies in cache lines of its own, two together since some processors fetch lines in pairs, and buffers on
pages of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LINE: Final = 128
PAGE: Final = 4096
ALIGNMENT: Final = 64
"""Slices in a buffer start at multiples of this: a cache line, and whole elements of every dtype."""
BUFFER_BYTES: Final = 1 << 20
"""Size of one buffer. Four of them (two ranks, two halves) have to stay in the caches on their way. With half of this,
all_reduce of 11 MiB took 1.1x as long: half as many steps cost half as much."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Layout:
    """The places for a group of `size` ranks; all results are offsets in bytes from the segment's start."""

    size: int
    buffer_bytes: int = BUFFER_BYTES

    def header(self, half: int, rank: int) -> int:
        return (half * self.size + rank) * LINE

    def wakeup(self, half: int) -> int:
        return self.header(2, 0) + half * LINE

    @property
    def sleepers_bytes(self) -> int:
        return _up(self.size, LINE)

    @property
    def sleepers(self) -> int:
        return self.wakeup(2)

    @property
    def table_bytes(self) -> int:
        """Size of one rank's table."""
        return _up(16 * self.size, LINE)

    def table(self, half: int, rank: int) -> int:
        return self.sleepers + self.sleepers_bytes + (half * self.size + rank) * self.table_bytes

    def buffer(self, half: int, rank: int) -> int:
        start = _up(self.table(2, 0), PAGE)
        return start + (half * self.size + rank) * _up(self.buffer_bytes, PAGE)

    @property
    def total_bytes(self) -> int:
        return self.buffer(2, 0)


def segment_size(size: int) -> int:
    """How many bytes of shared memory a group of `size` ranks needs; the kernel allocates them at first use."""
    return Layout(size).total_bytes
