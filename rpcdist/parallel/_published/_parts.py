"""Tensors by name, parts of larger tensors, and the words that a source and its readers share."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.nn.parameter import is_lazy

from rpcdist.errors import ConfigError

Value = Any
"""The value of a name: a `Tensor`, a `DTensor`, a `TensorPart`, or a list of `TensorPart`."""


class TensorPart(NamedTuple):
    """A tensor that is a part of a larger tensor: a range of indices in each dimension.

    A publisher that has rows 512 to 1023 of a weight of 1024 rows publishes
    `{"w": TensorPart(rows, offsets=(512, 0), whole=(1024, 256))}`; a consumer pulls its columns into
    `{"w": TensorPart(columns, offsets=(0, 64), whole=(1024, 256))}`. Several ranges are a list of parts. A `DTensor`
    contains all of this.

    Attributes:
        tensor: the values of the part.
        offsets: the start of the part in the larger tensor, in each dimension.
        whole: the shape of the larger tensor.
    """

    tensor: Tensor
    offsets: Sequence[int]
    whole: Sequence[int]


class Box(NamedTuple):
    """A part of a tensor's indices.

    Attributes:
        offsets: the first index in each dimension.
        sizes: the number of indices in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Returns the indices of this box in a tensor with the indices of `outer`."""
        return tuple(
            slice(start - begin, start - begin + size)
            for start, size, begin in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def common(one: Box, other: Box) -> Box | None:
    """Returns the common indices of two boxes, or None."""
    offsets, sizes = [], []
    for a, num_a, b, num_b in zip(*one, *other, strict=True):
        start, end = max(a, b), min(a + num_a, b + num_b)
        if end <= start:
            return None
        offsets.append(start)
        sizes.append(end - start)
    return Box(tuple(offsets), tuple(sizes))


def without(box: Box, hole: Box) -> Iterator[Box]:
    """Yields the parts of a box outside a smaller box inside it."""
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, size) in enumerate(zip(*hole, strict=True)):
        before, after = start - offsets[dim], offsets[dim] + sizes[dim] - start - size
        for first, num in ((offsets[dim], before), (start + size, after)):
            if num:
                yield Box((*offsets[:dim], first, *offsets[dim + 1 :]), (*sizes[:dim], num, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = start, size


def shown(box: Box) -> str:
    """Returns a box as users write it: "[0:2, 5:8]"."""
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(*box, strict=True)) + "]"


class Pieces(NamedTuple):
    """Tensors by name, with lists of parts flattened.

    Attributes:
        names: the names of the tensors; several parts of one tensor have the same name.
        parts: for parts of larger tensors, by index: the offsets, and the shape of the whole.
        seen: the same object for tensors with the same names, kinds, dtypes, shapes and strides, whose memory may
            differ; None if earlier tensors are unknown.
    """

    names: list[str]
    tensors: list[Tensor]
    parts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    seen: object = None


SeenTensors = list[tuple[list[str], TensorGuards]]
"""The names of the last call's plain tensors, and guards of torch's compiler, which recognise all of them in one call.
Empty if they are few."""

MANY_TENSORS: Final = 64

_PLAIN: Final = frozenset((Tensor, nn.Parameter))
_TEXT: Final = frozenset((str,))
_is_meta, _is_quantized, _is_nested = map(operator.attrgetter, ("is_meta", "is_quantized", "is_nested"))


def pieces_of(what: nn.Module | Mapping[str, Value], purpose: str, seen: SeenTensors) -> Pieces:
    """Returns the tensors of a module or a dictionary.

    Args:
        what: a module, whose `state_dict` is used, or tensors and parts of tensors by name.
        seen: the tensors of the last call; updated.

    Raises:
        ConfigError: `what` is another object, or has a value that is not a dense tensor.
    """
    if isinstance(what, nn.Module):
        what = what.state_dict()
    if not isinstance(what, Mapping):
        raise ConfigError(f"{purpose} are a {type(what).__name__}: pass a module, or a dictionary of tensors by name")
    names, tensors = list(what), list(what.values())
    if seen and seen[0][0] == names and seen[0][1].check(*tensors):
        return Pieces(names, tensors, {}, seen[0][1])
    seen.clear()
    if (
        _PLAIN.issuperset(map(type, tensors))
        and all(tensor.layout is torch.strided for tensor in tensors)
        and not any(map(_is_meta, tensors))
        and not any(map(_is_quantized, tensors))
        and not any(map(_is_nested, tensors))
        and all(map(Tensor.data_ptr, tensors))
        and _TEXT.issuperset(map(type, names))
    ):
        if len(tensors) >= MANY_TENSORS:
            seen.append((names, TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)))
        return Pieces(names, tensors, {}, seen[0][1] if seen else None)
    return _unusual_pieces(what, purpose)


def _unusual_pieces(what: Mapping[str, Value], purpose: str) -> Pieces:
    pieces = Pieces([], [], {})
    for name, value in what.items():
        if not isinstance(name, str):
            raise ConfigError(f"{purpose} have the name {name!r}, which is not a string")
        for each in value if type(value) is list and value else (value,):
            tensor, part = _taken_apart(name, each, purpose)
            if problem := _problem_of(tensor):
                raise ConfigError(f"{name!r} of {purpose} {problem}; only dense tensors with memory can be published")
            if part is not None:
                pieces.parts[len(pieces.names)] = part
            pieces.names.append(name)
            pieces.tensors.append(tensor)
    return pieces


def _taken_apart(
    name: str, value: Value, purpose: str
) -> tuple[Tensor, tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Returns the tensor of a value, with its offsets and the shape of the whole."""
    if isinstance(value, TensorPart):
        offsets, whole = tuple(value.offsets), tuple(value.whole)
        if not isinstance(value.tensor, Tensor):
            raise ConfigError(
                f"{name!r} of {purpose} is a part with a {type(value.tensor).__name__} instead of a tensor"
            )
        sizes = tuple(value.tensor.shape)
        numbers = (*offsets, *whole)
        if (
            any(isinstance(number, bool) or not isinstance(number, int) for number in numbers)
            or not len(offsets) == len(whole) == len(sizes)
            or any(o < 0 or o + s > w for o, s, w in zip(offsets, sizes, whole, strict=True))
        ):
            raise ConfigError(
                f"{name!r} of {purpose} is a part of shape {sizes} at {offsets}, which is not inside a tensor of "
                f"shape {whole}"
            )
        return value.tensor, (offsets, whole)
    module = sys.modules.get("torch.distributed.tensor")  # without DTensors, this module need not be imported
    if module is not None and isinstance(value, module.DTensor):
        return _of_dtensor(name, value, purpose)
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name!r} of {purpose} is a {type(value).__name__}, not a tensor; leave it out")
    return value, None


def _of_dtensor(name: str, value: Any, purpose: str) -> tuple[Tensor, tuple[tuple[int, ...], tuple[int, ...]]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise ConfigError(
            f"{name!r} of {purpose} is a DTensor with the placements {value.placements}, whose values are not summed "
            "yet; redistribute it to Shard or Replicate first"
        )
    with torch.no_grad():
        local = value.to_local()
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if not local.numel():  # torch's offset of an empty shard may be outside
        offsets = (0,) * value.dim()
    return local, (tuple(offsets), tuple(value.shape))


def _problem_of(tensor: Tensor) -> str:
    """Returns why a tensor cannot be copied, as the rest of a sentence; empty if it can."""
    if is_lazy(tensor):
        return "gets its shape in the first forward pass, which has not run"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.is_meta:
        return "is on the meta device"
    if tensor.is_nested:
        return "is nested"
    if tensor.layout is not torch.strided:
        return "is sparse"
    try:
        has_memory = not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:  # raised for fake tensors, and subclasses that consist of other tensors
        has_memory = False
    return "" if has_memory else f"has no memory of its own (it is a {type(tensor).__name__})"


def check_targets(targets: Pieces, purpose: str) -> None:
    """Raises `ConfigError` for a tensor that torch refuses to write, before any tensor is written."""
    tensors = targets.tensors
    if (
        all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(Tensor.is_conj, tensors))
    ):
        return
    for name, tensor in zip(targets.names, tensors, strict=True):
        kind = "expanded" if torch._debug_has_internal_overlap(tensor) == 1 else "a conjugate or negative view"
        if kind == "expanded" or tensor.is_neg() or tensor.is_conj():
            raise ConfigError(f"{name!r} of {purpose} is {kind}, which cannot be written; pass a clone of it")


# ---------------------------------------------------------------- words that a source and its readers share
#
# A source and its readers communicate through words of 8 bytes, without messages. The source has a page that its
# readers can only read; each reader shares one page, with two words, with the source. A version and its segment
# are one word, so both change at once.
#
# [Note: hazards] The source has one word for each segment: the version in it, or 0 while it is written. A reader
# writes the version and the segment that it wants into its own page, and then checks that the segment still has that
# version. A source that wants to overwrite a segment sets the segment's word to 0, and then checks the words of its
# readers. If no load moves before the store, one of the two sees the other. A source that finds a reader restores the
# word and takes another segment; a reader that finds another version starts again. Only a locked instruction prevents
# a processor from moving the load, and taking a lock contains one. The same applies to the word with which a source
# asks its readers for a byte that wakes it.
#
# Readers sleep on the word of the newest version (futex), so one system call of the source wakes all of them. If it
# sent each a byte, the first reader could take the source's core, and the others would sleep until it has its version.
#
# This relies on the store order of x86-64 ([Note: store order] in `collectives/_transports/shm/signals.py`). On other
# processors each process keeps its own versions, and only threads share words.

PAGE_BYTES: Final = 4096

NEWEST: Final = 0
"""A word of the source: the newest version and its segment; 0 for none."""
ASKED: Final = 1
"""A word of the source: not 0 while readers that finish should send it a byte."""
VERSION_IN: Final = 8
"""The first of the source's words for segments: the version in each segment; 0 while it is written."""

READING: Final = 0
"""A word of a reader: the version that it reads now, and its segment; 0 for none."""
HAVE: Final = 1
"""A word of a reader: the number of the version that it last read."""

MAX_SEGMENTS: Final = 8


def packed(version: int, segment: int) -> int:
    """Returns the word of a version and its segment."""
    return version * MAX_SEGMENTS + segment


def unpacked(word: int) -> tuple[int, int]:
    """Returns version and segment of a word that is not 0."""
    return divmod(word, MAX_SEGMENTS)
