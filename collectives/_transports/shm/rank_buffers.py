"""The ranks' buffers in the segment: as addresses for copies, as tensors for arithmetic."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from rpcdist.collectives._transports.shm.segment_layout import Layout

_MAX_VIEWS: Final = 512


class RankBuffers:
    """Every rank's two buffers.

    Args:
        layout: where everything lies in the segment.
        memory: the whole segment, as bytes.
    """

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
