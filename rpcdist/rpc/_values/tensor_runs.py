"""Runs: many small tensors of one kind that follow each other in the table of a value.

A header, a buffer and a pass through Python code for each tensor would cost 10 us at either end. A run has one header
and one buffer; torch joins its tensors at the sender, and splits them at the receiver, where each tensor has its own
memory again, so that a tensor that is kept does not keep the others.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import groupby, islice
from operator import add, attrgetter, le, mul, or_, sub
from typing import Final, NamedTuple, cast

import torch

RUNS_FROM: Final = 64
"""Values with fewer tensors are not searched for runs: they gain less than the search costs."""

_MIN_RUN: Final = 8
_MAX_TENSOR_BYTES: Final = 1024  # copying larger tensors would cost more than a run saves

_ALIGNMENT_BYTES: Final = 64
_SMALLEST_ALLOCATION_BYTES: Final = 16
"""torch's allocations begin at a multiple of the alignment, and the C library never allocates less than this. So a
small tensor at the beginning of a storage at such an address lies within its memory, even if the storage was shrunk;
only an empty storage has no memory."""

_DTYPES: Final = frozenset((
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
))  # fmt: skip

# torch's stubs describe these two only with `out=`, where they return None.
_unbind_copy: Final = cast("Callable[[torch.Tensor], Sequence[torch.Tensor]]", torch.unbind_copy)
_split_copy: Final = cast("Callable[[torch.Tensor, list[int]], Sequence[torch.Tensor]]", torch.split_with_sizes_copy)


class TensorRun(NamedTuple):
    """Tensors of one kind.

    Attributes:
        first: one of them; the others have the same kind.
        length: the number of tensors.
        memory: all of them, one after the other; the tensor itself if there is only one.
    """

    first: torch.Tensor
    length: int
    memory: torch.Tensor


def find_runs(tensors: Sequence[torch.Tensor]) -> list[TensorRun] | None:
    """The tensors in their order, as runs and runs of one.

    None if one of them is not dense on the CPU, has no elements or no memory, or shares memory with another: the
    headers of single tensors can express that, and those of runs cannot.
    """
    try:
        whole = _single_run(tensors)
        return _mixed_runs(tensors) if whole is None else [whole]
    except RuntimeError:  # functorch's wrappers and the like; and shapes that differ
        return None


def _single_run(tensors: Sequence[torch.Tensor]) -> TensorRun | None:
    """Returns all tensors as one run; None if they seem to differ. Reads few properties, because for 100,000 tensors
    one property takes 10 ms, and a shape or a storage 130 ms.
    """
    first = tensors[0]
    size, last = first.nbytes, tensors[-1]
    if size > _MAX_TENSOR_BYTES or not _is_simple(first) or first.dtype not in _DTYPES or last.shape != first.shape:
        return None
    for what in (type, attrgetter("dtype"), attrgetter("requires_grad")):
        if len(set(map(what, tensors))) > 1:
            return None
    if not size or (first.numel() > 1 and not all(map(torch.Tensor.is_contiguous, tensors))):
        return None
    starts = list(map(torch.Tensor.data_ptr, tensors))
    is_apart = size <= _SMALLEST_ALLOCATION_BYTES and not reduce(or_, starts) % _ALIGNMENT_BYTES
    if not is_apart or any(map(torch.Tensor.storage_offset, tensors)):
        ends = [tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes() for tensor in tensors]
        if not all(start + size <= end for start, end in zip(starts, ends, strict=True)):
            return None
    starts.sort()
    if not starts[0] or min(map(sub, islice(starts, 1, None), starts)) < size:  # two of them overlap
        return None
    try:
        memory = _joined(tensors)
    except RuntimeError:  # their shapes differ
        return None
    return TensorRun(first, len(tensors), memory) if _is_simple(memory) else None


def _mixed_runs(tensors: Sequence[torch.Tensor]) -> list[TensorRun] | None:
    if not all(map(_is_simple, tensors)) or not _DTYPES.issuperset([tensor.dtype for tensor in tensors]):
        return None
    starts = [tensor.data_ptr() for tensor in tensors]
    ends = [tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes() for tensor in tensors]
    counts = [tensor.numel() for tensor in tensors]
    sizes = list(map(mul, counts, [tensor.itemsize for tensor in tensors]))
    behind = list(map(add, starts, sizes))
    if not all(starts) or not all(counts) or not all(map(le, behind, ends)):
        return None
    if not all(map(le, sorted(behind), islice(sorted(starts), 1, None))):  # two of them overlap
        return None
    # Reading the shape of a tensor is the slowest step; with one dimension, the number of elements is the shape.
    shapes = [count if tensor.dim() == 1 else tensor.shape for tensor, count in zip(tensors, counts, strict=True)]
    dtypes = [tensor.dtype for tensor in tensors]
    grads = [tensor.requires_grad for tensor in tensors]
    runs: list[TensorRun] = []
    at = 0
    for _, same in groupby(zip(map(type, tensors), dtypes, grads, shapes, strict=True)):
        length = sum(1 for _ in same)
        run = tensors[at : at + length]
        if length < _MIN_RUN or sizes[at] > _MAX_TENSOR_BYTES:
            runs += [TensorRun(tensor, 1, tensor) for tensor in run]
        else:
            runs.append(TensorRun(run[0], length, _joined(run)))
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


def _joined(run: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(list(run))


def split_run(joined: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a run, which own their memory, from the joined tensor."""
    if joined.dim() == 1:
        return list(_unbind_copy(joined))
    length = joined.shape[1]
    return list(_split_copy(joined.flatten(0, 1), [length] * joined.shape[0]))


PAUSED_FROM: Final = 10_000
"""From this number of tensors on, Python's collector pauses while a value is made. None of the new objects is garbage,
but the collector would examine all objects of the process repeatedly, which for 100,000 tensors takes as long as making
them."""

_PAUSED: Final = 100_000_007
"""A threshold that no other code sets. If the threshold is changed during a pause, the new one stays."""


_before: tuple[int, ...] = gc.get_threshold()  # when the last pause began


@contextmanager
def paused_collections() -> Iterator[None]:
    """Starts no automatic collection meanwhile, on any thread, unless other code sets thresholds; `gc.disable` and
    `gc.enable` keep their effect. If two pauses overlap, the collector resumes at the end of the first one.
    """
    global _before
    before = gc.get_threshold()
    if before[0] == _PAUSED:
        yield
        return
    _before = before
    gc.set_threshold(_PAUSED, *before[1:])
    try:
        yield
    finally:
        _end(before)


def _end(before: tuple[int, ...]) -> None:
    if gc.get_threshold()[0] == _PAUSED:
        gc.set_threshold(*before)


# A child that was forked during a pause may have no thread that ends it.
os.register_at_fork(after_in_child=lambda: _end(_before))
