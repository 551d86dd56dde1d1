"""How the rows of a parameter are divided among the servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of each server. A tensor without dimensions counts as one row.

    Attributes:
        shape: of the whole parameter.
        rows: of each server, as a slice of the first dimension.
    """

    shape: tuple[int, ...]
    rows: tuple[slice, ...]

    @classmethod
    def in_blocks(cls, shape: Sequence[int], num_servers: int) -> RowLayout:
        """Each server has a block of neighbouring rows."""
        num_rows = shape[0] if shape else 1
        ends = [num_rows * index // num_servers for index in range(num_servers + 1)]
        return cls(tuple(shape), tuple(map(slice, ends, ends[1:])))

    @classmethod
    def in_turns(cls, shape: Sequence[int], num_servers: int) -> RowLayout:
        """Row `i` is on server `i % num_servers`, so that neighbours, which are often used alike, are divided."""
        return cls(tuple(shape), tuple(slice(index, None, num_servers) for index in range(num_servers)))

    def split(self, whole: Tensor) -> list[Tensor]:
        """The part of each server; views."""
        matrix = whole if self.shape else whole.reshape(1)
        return [matrix[rows] for rows in self.rows]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all servers. Gradients flow through it where rows are in blocks."""
        if self.rows[0].step is None:
            return torch.cat(list(parts)).view(self.shape)
        whole = parts[0].new_empty(self.shape)
        self.write(parts, whole)
        return whole

    def write(self, parts: Sequence[Tensor], whole: Tensor) -> None:
        """Copies the parts of all servers into a tensor of the whole shape, on any device."""
        for part, target in zip(parts, self.split(whole), strict=True):
            target.copy_(part)

    def part_shape(self, index: int) -> tuple[int, ...]:
        """The shape of one server's part."""
        num_rows = len(range(*self.rows[index].indices(self.shape[0] if self.shape else 1)))
        return (num_rows, *self.shape[1:])

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)
