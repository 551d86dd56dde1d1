"""Cuts batches into micro-batches, and merges their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from rpcdist.errors import ConfigError


def as_tuple(values: object) -> tuple[object, ...]:
    """The input or output of a stage as a tuple: that of a tuple or list, or of one value."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def batch_size(values: Sequence[object]) -> int:
    """The length of the first dimension of all tensors. Raises `ConfigError` if they differ or there are none."""
    sizes = {value.size(0) for value in values if isinstance(value, Tensor) and value.dim() > 0}
    if len(sizes) != 1:
        raise ConfigError(
            f"the tensors of a batch must agree about their first dimension, its size, but there are {sorted(sizes)}"
            if sizes
            else "a batch needs at least one tensor with a first dimension, which is cut into micro-batches"
        )
    (size,) = sizes
    if size == 0:
        raise ConfigError("the batch is empty")
    return size


def split_sizes(size: int, num_parts: int) -> list[int]:
    """`size` in at most `num_parts` positive parts that differ by at most one, larger ones first."""
    num_parts = min(size, num_parts)
    return [size // num_parts + (part < size % num_parts) for part in range(num_parts)]


def split(values: tuple[object, ...], sizes: Sequence[int]) -> list[tuple[object, ...]]:
    """One tuple per micro-batch: tensors are cut along their first dimension (views), other values are repeated."""
    columns = [
        value.split(list(sizes)) if isinstance(value, Tensor) and value.dim() > 0 else [value] * len(sizes)
        for value in values
    ]
    return [tuple(row) for row in zip(*columns, strict=True)]


def merge(parts: Sequence[object]) -> object:
    """The outputs of all micro-batches as those of the batch: tensors are joined along their first dimension.

    Tensors without dimensions become one with a first dimension over the micro-batches; tuples are merged place by
    place; other values become a list.
    """
    first = parts[0]
    if isinstance(first, tuple | list):
        rows = cast(Sequence[Sequence[object]], parts)
        return tuple(merge(list(column)) for column in zip(*rows, strict=True))
    if isinstance(first, Tensor):
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return torch.cat(tensors) if first.dim() > 0 else torch.stack(tensors)
    return list(parts)
