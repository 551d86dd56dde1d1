"""Which rank publishes which bytes, and which takes them: the plans of the operations on shared memory. Pure.

An operation runs in steps. In each step a rank copies one slice of each tensor that it publishes to its own buffer, at
the tensor's place in it; when all ranks have done so, it takes slices out of other ranks' buffers. Slice number k of a
tensor is the same range of bytes for the rank that publishes and the one that takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from rpcdist.collectives._operations.operation import Kind
from rpcdist.collectives._transports.shm.segment_layout import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Publish:
    """Slices of `inputs[source]` go to `offset` in this rank's buffer."""

    source: int
    offset: int


@dataclass(frozen=True, slots=True)
class Take:
    """Slices at `offset` in the buffer of `peer` go to `outputs[target]`."""

    peer: int
    offset: int
    target: int


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of an operation.

    Attributes:
        slice_bytes: the size of a slice; the last one of a tensor may be shorter.
        publishes: the copies that it makes before the ranks synchronise in a step.
        takes: the copies that it makes afterwards.
        own: (index in inputs, index in outputs) of the chunk that the rank copies from itself to itself; or None.
    """

    slice_bytes: int
    publishes: tuple[Publish, ...] = ()
    takes: tuple[Take, ...] = ()
    own: tuple[int, int] | None = None


def num_steps(longest_bytes: int, slice_bytes: int) -> int:
    """Steps until a tensor of `longest_bytes` has gone through; at least one, in which fingerprints are compared."""
    return max(1, -(-longest_bytes // slice_bytes))


def span(step: int, slice_bytes: int, length_bytes: int) -> tuple[int, int]:
    """Start and stop of slice number `step` of a tensor; equal when it has no such slice."""
    start = min(step * slice_bytes, length_bytes)
    return start, min(start + slice_bytes, length_bytes)


def route(kind: Kind, rank: int, size: int, root: int, buffer_bytes: int) -> Route:
    """The part of `rank` in an operation that moves data without reducing it; for REDUCE_SCATTER, the publishing half.

    Every rank must call it with the same `buffer_bytes`.
    """
    others = [peer for peer in range(size) if peer != rank]
    slot = _slot_bytes(size, buffer_bytes)
    if kind is Kind.BROADCAST:
        if rank == root:
            return Route(buffer_bytes, publishes=(Publish(0, 0),))
        return Route(buffer_bytes, takes=(Take(root, 0, 0),))
    if kind is Kind.ALL_GATHER:
        return Route(buffer_bytes, (Publish(0, 0),), tuple(Take(peer, 0, peer) for peer in others), (0, rank))
    if kind is Kind.GATHER:
        if rank == root:
            return Route(buffer_bytes, takes=tuple(Take(peer, 0, peer) for peer in others), own=(0, rank))
        return Route(buffer_bytes, (Publish(0, 0),))
    if kind is Kind.SCATTER:
        if rank == root:
            return Route(slot, tuple(Publish(peer, peer * slot) for peer in others), own=(rank, 0))
        return Route(slot, takes=(Take(root, rank * slot, 0),))
    if kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER):
        publishes = tuple(Publish(peer, peer * slot) for peer in others)
        return Route(slot, publishes, tuple(Take(peer, rank * slot, peer) for peer in others), (rank, rank))
    raise ValueError(f"{kind.title} has no route")


def _slot_bytes(size: int, buffer_bytes: int) -> int:
    """The size of a slot in a buffer that has one for each rank."""
    return buffer_bytes // size // ALIGNMENT * ALIGNMENT


def two_phase_slice_bytes(size: int, buffer_bytes: int) -> int:
    """The size of a slice of a reduction in two phases: a slice and one share of it fit into a buffer."""
    return buffer_bytes * size // (size + 1) // ALIGNMENT * ALIGNMENT - ALIGNMENT


def shares(length: int, size: int, multiple: int) -> list[tuple[int, int]]:
    """Cuts `length` elements into `size` runs (start, stop) that start at a `multiple`; equal except the last."""
    share = -(-length // (size * multiple)) * multiple
    return [(min(rank * share, length), min((rank + 1) * share, length)) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of tensor number `tensor`; they lie at element `offset` of the step's buffer."""

    tensor: int
    start: int
    stop: int
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's elements of its flat tensor."""
        return tensor if self.stop - self.start == tensor.numel() else tensor[self.start : self.stop]

    def __repr__(self) -> str:
        return f"{self.tensor}[{self.start}:{self.stop}]@{self.offset}"


@lru_cache(maxsize=256)
def cut(counts: tuple[int, ...], limit: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each step; at least one step. Ranks with equal sums of `counts` have as many steps of equal sizes.

    Args:
        counts: elements of each tensor.
        limit: elements that fit into the buffer of a step.
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
