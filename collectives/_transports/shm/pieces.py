"""Cuts tensors into steps as if they lay one after the other in memory, without copying them together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


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
