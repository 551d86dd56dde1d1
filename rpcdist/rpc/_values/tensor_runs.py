"""Runs: many small tensors of one kind that stand next to each other in the table of a value.

A header, a buffer and a trip through Python for each would cost 10 us at either end. A run has one header and one
buffer, into which torch joins its tensors at the sender, and which torch takes apart at the receiver: there each tensor
has memory of its own again, so that one that is kept does not keep the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from operator import add, le, mul
from typing import Final, cast

import torch

__all__ = ["RUNS_FROM", "find_runs", "join_run", "split_run"]

RUNS_FROM: Final = 64
"""Values of fewer tensors are not searched for runs: they gain less than the search costs."""

_MIN_RUN: Final = 8
_MAX_TENSOR_BYTES: Final = 1024  # the memory of larger ones is worth sending without the copy

_DTYPES: Final = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)

# torch's stubs know these two only as they are with `out=`, where they return None.
_unbind_copy: Final = cast("Callable[[torch.Tensor], Sequence[torch.Tensor]]", torch.unbind_copy)
_split_copy: Final = cast("Callable[[torch.Tensor, list[int]], Sequence[torch.Tensor]]", torch.split_with_sizes_copy)


def find_runs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]] | None:
    """The tensors in their order, as runs and lists of one.

    None if one of them is not dense on the CPU, has no elements or no memory, or shares memory with another: all that
    the headers of single tensors can say, and those of runs cannot.
    """
    if not all(map(_is_simple, tensors)) or not _DTYPES.issuperset([tensor.dtype for tensor in tensors]):
        return None
    try:
        starts = [tensor.data_ptr() for tensor in tensors]
        ends = [tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes() for tensor in tensors]
    except RuntimeError:  # functorch's wrappers and the like
        return None
    counts = [tensor.numel() for tensor in tensors]
    sizes = list(map(mul, counts, [tensor.itemsize for tensor in tensors]))
    behind = list(map(add, starts, sizes))
    if not all(starts) or not all(counts) or not all(map(le, behind, ends)):
        return None
    if not all(map(le, sorted(behind), islice(sorted(starts), 1, None))):  # else two of them overlap
        return None
    # The shape of a tensor costs more than all else; of one dimension, the number of elements is the shape.
    shapes = [count if tensor.dim() == 1 else tensor.shape for tensor, count in zip(tensors, counts, strict=True)]
    dtypes = [tensor.dtype for tensor in tensors]
    grads = [tensor.requires_grad for tensor in tensors]
    runs: list[list[torch.Tensor]] = []
    at = 0
    for _, same in groupby(zip(map(type, tensors), dtypes, grads, shapes, strict=True)):
        length = sum(1 for _ in same)
        run = tensors[at : at + length]
        if length < _MIN_RUN or sizes[at] > _MAX_TENSOR_BYTES:
            runs += [[tensor] for tensor in run]
        else:
            runs.append(list(run))
        at += length
    return runs


def _is_simple(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def join_run(run: list[torch.Tensor]) -> torch.Tensor:
    """The tensors of a run, one behind the other."""
    with torch.no_grad():
        return torch.stack(run)


def split_run(joined: torch.Tensor) -> list[torch.Tensor]:
    """What `join_run` joined: tensors that own their memory."""
    if joined.dim() == 1:
        return list(_unbind_copy(joined))
    length = joined.shape[1]
    return list(_split_copy(joined.flatten(0, 1), [length] * joined.shape[0]))
