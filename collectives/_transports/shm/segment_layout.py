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

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

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


_MAX_VIEWS: Final = 512


class RankBuffers:
    """Every rank's two buffers."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        self._layout = layout
        self._memory = memory
        self._views: dict[tuple[torch.dtype, int, int], list[list[torch.Tensor]]] = {}
        start = memory.data_ptr()
        self.address: Final = [[start + layout.buffer(half, rank) for rank in range(layout.size)] for half in (0, 1)]

    def close(self) -> None:
        """Releases the memory."""
        self._views.clear()
        self._memory = torch.empty(0)

    def views(self, dtype: torch.dtype, offset: int, count: int) -> list[list[torch.Tensor]]:
        """`count` elements at `offset` bytes in each buffer: by half, then by rank."""
        key = (dtype, offset, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            found = self._views[key] = self._make_views(dtype, offset, count)
        return found

    def _make_views(self, dtype: torch.dtype, offset: int, count: int) -> list[list[torch.Tensor]]:
        stop = offset + count * dtype.itemsize
        starts = [[self._layout.buffer(half, rank) for rank in range(self._layout.size)] for half in (0, 1)]
        with torch.inference_mode(False):  # the views are used after the caller's mode has ended
            return [[self._memory[start + offset : start + stop].view(dtype) for start in half] for half in starts]


# [Note: threads of torch] torch cuts work on 32,768 elements and more among its threads, as many as there are cores, in
# every rank. The ranks of a host compete for the cores already: 512 KiB were then seen to take 8 ms instead of 16 us.
# `torch.set_num_threads` would also change what other threads get that start meanwhile; OpenMP's own call changes
# the calling thread only.


def _openmp() -> ctypes.PyDLL | None:
    """The OpenMP runtime that torch uses; None when it uses none."""
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        library = ctypes.PyDLL(path)
        _ = library.omp_set_num_threads, library.omp_get_max_threads
    except (OSError, AttributeError):
        return None
    return library


_omp = _openmp()


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on the calling thread alone; see [Note: threads of torch]."""
    if _omp is None:
        yield
        return
    before = _omp.omp_get_max_threads()
    _omp.omp_set_num_threads(1)
    try:
        yield
    finally:
        _omp.omp_set_num_threads(before)
