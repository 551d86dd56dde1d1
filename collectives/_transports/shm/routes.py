"""The layout of a group's segment, and which rank publishes and takes which bytes. Pure.

what        how many        content
headers     2 x size        flag (8 bytes), fingerprint, zeros
wakeups     2               the last step of that half that all ranks reached, written by the last to reach it
sleepers    1               one byte for each rank: whether it sleeps on the wakeup word
    tables      2 x size        sizes of the chunks that this rank sends, then of those that it takes (8 bytes each)
    buffers     2 x size        data that this rank publishes

"2 x size" means: for each half (see [Note: steps] in `signals`), for each rank; only that rank writes it. Each item has
its own pair of cache lines, since some processors fetch lines in pairs; each buffer has its own pages.

An operation runs in steps. In each step a rank copies one slice of each tensor that it publishes to the tensor's place
in its own buffer; when all ranks have done so, it takes slices out of other ranks' buffers. Slice number k of a tensor
is the same range of bytes for the rank that publishes it and the rank that takes it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from rpcdist.collectives._operations.operation import Kind

LINE: Final = 128
PAGE: Final = 4096
ALIGNMENT: Final = 64
"""Slices in a buffer start at multiples of this: a cache line, and whole elements of every dtype."""
BUFFER_BYTES: Final = 1 << 20
"""Size of one buffer. Four of them (two ranks, two halves) must fit into the caches. With half of this size, all_reduce
of 11 MiB took 1.1x as long, as it had twice as many steps."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets for a group of `size` ranks, in bytes from the start of the segment."""

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
        return _up(16 * self.size, LINE)

    def table(self, half: int, rank: int) -> int:
        return self.sleepers + self.sleepers_bytes + (half * self.size + rank) * self.table_bytes

    def tables(self, half: int) -> range:
        """The offsets of a half's tables, by rank."""
        return range(self.table(half, 0), self.table(half + 1, 0), self.table_bytes)

    def buffer(self, half: int, rank: int) -> int:
        start = _up(self.table(2, 0), PAGE)
        return start + (half * self.size + rank) * _up(self.buffer_bytes, PAGE)

    def buffers(self, half: int) -> range:
        """The offsets of a half's buffers, by rank."""
        return range(self.buffer(half, 0), self.buffer(half + 1, 0), _up(self.buffer_bytes, PAGE))

    @property
    def total_bytes(self) -> int:
        return self.buffer(2, 0)


def segment_size(size: int) -> int:
    """Returns the bytes of shared memory that a group of `size` ranks needs; the kernel allocates them at first use."""
    return Layout(size).total_bytes


_MAX_VIEWS: Final = 512


class RankBuffers:
    """Every rank's two buffers."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        self._layout = layout
        self._memory = memory
        self._views: dict[tuple[torch.dtype, int, int], list[list[torch.Tensor]]] = {}
        start = memory.data_ptr()
        self.address: Final = [[start + offset for offset in layout.buffers(half)] for half in (0, 1)]

    def close(self) -> None:
        self._views.clear()
        self._memory = torch.empty(0, device="cpu")

    def views(self, dtype: torch.dtype, offset: int, count: int) -> list[list[torch.Tensor]]:
        """Returns views of `count` elements at `offset` bytes in each buffer: by half, then by rank."""
        key = (dtype, offset, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            stop = offset + count * dtype.itemsize
            starts = [self._layout.buffers(half) for half in (0, 1)]
            with torch.inference_mode(False):  # the views are used after the caller's mode has ended
                found = [[self._memory[start + offset : start + stop].view(dtype) for start in half] for half in starts]
            self._views[key] = found
        return found


# [Note: threads of torch] In every rank, torch divides work on 32,768 or more elements among as many threads as the
# host has cores. The ranks of a host compete for the cores already: 512 KiB then took 8 ms instead of 16 us.
# `torch.set_num_threads` would also affect other threads that start meanwhile; OpenMP's own call affects only the
# calling thread.


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
    """Within this context, torch computes on the calling thread alone; see [Note: threads of torch]."""
    if _omp is None:
        yield
        return
    before = _omp.omp_get_max_threads()
    _omp.omp_set_num_threads(1)
    try:
        yield
    finally:
        _omp.omp_set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of an operation.

    Attributes:
        slice_bytes: the size of a slice; the last one of a tensor may be shorter.
        publishes: the copies that the rank makes before the ranks synchronise in a step: slices of `inputs[source]` go
            to `offset` in its own buffer, as (source, offset).
        takes: the copies that it makes afterwards: slices at `offset` in the buffer of `peer` go to `outputs[target]`,
            as (peer, offset, target).
        own: (index in inputs, index in outputs) of the chunk that the rank copies to itself; or None.
    """

    slice_bytes: int
    publishes: tuple[tuple[int, int], ...] = ()
    takes: tuple[tuple[int, int, int], ...] = ()
    own: tuple[int, int] | None = None


def num_steps(longest_bytes: int, slice_bytes: int) -> int:
    """Returns the number of steps that move `longest_bytes`; at least one, in which ranks compare fingerprints."""
    return max(1, -(-longest_bytes // slice_bytes))


def span(step: int, slice_bytes: int, length_bytes: int) -> tuple[int, int]:
    """Returns start and stop of slice number `step` of a tensor; equal if the tensor has no such slice."""
    start = min(step * slice_bytes, length_bytes)
    return start, min(start + slice_bytes, length_bytes)


@lru_cache(maxsize=256)
def route(kind: Kind, rank: int, size: int, root: int, buffer_bytes: int) -> Route:
    """Returns the part of `rank` in an operation that does not reduce data; for REDUCE_SCATTER, only what it publishes.

    Every rank must call it with the same `buffer_bytes`.
    """
    others = [peer for peer in range(size) if peer != rank]
    slot = buffer_bytes // size // ALIGNMENT * ALIGNMENT
    if kind is Kind.BROADCAST:
        if rank == root:
            return Route(buffer_bytes, publishes=((0, 0),))
        return Route(buffer_bytes, takes=((root, 0, 0),))
    if kind is Kind.ALL_GATHER:
        return Route(buffer_bytes, ((0, 0),), tuple((peer, 0, peer) for peer in others), (0, rank))
    if kind is Kind.GATHER:
        if rank == root:
            return Route(buffer_bytes, takes=tuple((peer, 0, peer) for peer in others), own=(0, rank))
        return Route(buffer_bytes, ((0, 0),))
    if kind is Kind.SCATTER:
        if rank == root:
            return Route(slot, tuple((peer, peer * slot) for peer in others), own=(rank, 0))
        return Route(slot, takes=((root, rank * slot, 0),))
    if kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER):
        publishes = tuple((peer, peer * slot) for peer in others)
        return Route(slot, publishes, tuple((peer, rank * slot, peer) for peer in others), (rank, rank))
    raise ValueError(f"{kind.title} has no route")


def two_phase_slice_bytes(size: int, buffer_bytes: int) -> int:
    """Returns the slice size for a reduction in two phases: a slice and one portion of it fit into a buffer."""
    return buffer_bytes * size // (size + 1) // ALIGNMENT * ALIGNMENT - ALIGNMENT


def portions(length: int, size: int, multiple: int) -> list[tuple[int, int]]:
    """Cuts `length` elements into `size` runs (start, stop) that start at a `multiple`; equal except the last."""
    portion = -(-length // (size * multiple)) * multiple
    return [(min(rank * portion, length), min((rank + 1) * portion, length)) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of tensor number `tensor`, at element `offset` of the step's buffer."""

    tensor: int
    start: int
    stop: int
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.stop - self.start == tensor.numel() else tensor[self.start : self.stop]


@lru_cache(maxsize=256)
def cut(counts: tuple[int, ...], limit: int) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of each step; at least one step. Ranks with equal sums of `counts` get steps of equal sizes.

    Args:
        limit: the number of elements that fit into a step's buffer.
    """
    steps: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    filled = 0
    for tensor, count in enumerate(counts):
        start = 0
        while start < count:
            if filled == limit:
                steps.append(tuple(pieces))
                pieces, filled = [], 0
            stop = min(count, start + limit - filled)
            pieces.append(Piece(tensor, start, stop, filled))
            filled += stop - start
            start = stop
    return (*steps, tuple(pieces))
