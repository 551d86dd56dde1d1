"""The layout of a version's tensors in memory, fixed by the publisher's first version and equal on every host."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rpcdist.errors import ConfigError, TransportError, abridged, listed
from rpcdist.parallel._published._parts import Box, Pieces, common, shown, without
from rpcdist.transport import lending

_MAX_BYTES: Final = 1 << 46  # more than the address space, so a layout of this size is invalid

_MAX_DIMS: Final = 64  # as torch

PlainLayout = tuple[list[str], list[str], list[list[int]], list[list[list[int]]]]
"""A layout as plain values, which need no pickle: names, dtypes, shapes, parts."""

PlainSelection = tuple[str, list[list[list[int]]]]
"""A `Selection` as plain values."""

_DTYPES: Final = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")


def have_shapes(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether the tensors have these shapes. Makes no list: 2,000 shapes would start the garbage collector."""
    return len(tensors) == len(shapes) and all(map(operator.eq, map(_shape_of, tensors), shapes))


def have_dtypes(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the tensors have these dtypes."""
    return len(tensors) == len(dtypes) and all(map(operator.is_, map(_dtype_of, tensors), dtypes))


@functools.cache
def can_convert(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether torch can convert values; `can_cast` is also true for conversions that torch does not implement."""
    if not torch.can_cast(dtype, to):  # before the attempt, which warns about imaginary parts
        return False
    try:
        torch.zeros(1, dtype=dtype, device="cpu").to(to)
    except (RuntimeError, TypeError):
        return False
    return True


class VersionLayout(NamedTuple):
    """Names, dtypes and shapes of the tensors of a version.

    Attributes:
        names: the names of the tensors, in the order in memory; several parts of one tensor have the same name.
        parts: for parts of larger tensors, by index: the offsets, and the shape of the whole.
    """

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    parts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, pieces: Pieces, dtype: torch.dtype | None = None) -> VersionLayout:
        """Returns the layout of these tensors; floating-point tensors are published as `dtype`, if given."""
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(
                f"dtype={dtype}: pass a floating-point dtype, or leave it out to publish tensors with their own dtype"
            )
        if not pieces.names:
            raise ConfigError("the module or dictionary has no tensor to publish")
        values = pieces.tensors
        dtypes = [value.dtype if dtype is None or not value.is_floating_point() else dtype for value in values]
        for name, value, to in zip(pieces.names, values, dtypes, strict=True):
            if value.dtype is not to and not can_convert(value.dtype, to):
                raise ConfigError(f"tensor {name!r} is {value.dtype}, which torch cannot convert to {to}")
        return cls(pieces.names, dtypes, [tuple(value.shape) for value in values], pieces.parts)

    @classmethod
    def from_plain(cls, plain: PlainLayout) -> VersionLayout:
        """The inverse of `plain`, for a layout from a peer.

        Raises:
            TransportError: the value is not a layout.
        """
        try:
            names, dtypes, shapes, parts = plain
            layout = cls(
                [_text(name) for name in names],
                [_DTYPES[dtype] for dtype in dtypes],
                [_numbers(shape) for shape in shapes],
                {_numbers(first)[0]: (_numbers(offsets), _numbers(whole)) for first, offsets, whole in parts},
            )
            is_consistent = (
                0 < len(layout.names) == len(layout.dtypes) == len(layout.shapes)
                and sum(math.prod(shape) * 16 for shape in layout.shapes) < _MAX_BYTES
                and all(_is_part(layout.shapes[index], *part) for index, part in layout.parts.items())
            )
        except (TypeError, ValueError, KeyError, IndexError) as exc:
            raise TransportError(f"an invalid layout of published tensors arrived: {exc!r}") from exc
        if not is_consistent:
            raise TransportError("an invalid layout of published tensors arrived: its numbers do not fit")
        return layout

    def plain(self) -> PlainLayout:
        """Returns it as plain values."""
        return (
            self.names,
            [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            [list(shape) for shape in self.shapes],
            [[[index], list(offsets), list(whole)] for index, (offsets, whole) in self.parts.items()],
        )

    def size_bytes(self) -> int:
        """The size of a version in memory."""
        return self.offsets()[1]

    def offsets(self) -> tuple[list[int], int]:
        """The offset of each tensor, and the size of all tensors."""
        return lending.offsets(
            math.prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )

    def views(self, memory: Tensor) -> list[Tensor]:
        """Returns the tensors in the memory of a version, which is a tensor of bytes."""
        views = []
        for start, dtype, shape in zip(self.offsets()[0], self.dtypes, self.shapes, strict=True):
            num_bytes = math.prod(shape) * dtype.itemsize
            views.append(memory[start : start + num_bytes].view(dtype).view(shape))
        return views

    def in_order(self, pieces: Pieces, name: str) -> list[Tensor]:
        """Returns the tensors of a further version, in the order of the first version.

        Raises:
            ConfigError: the tensors differ from those of the first version.
        """
        tensors = pieces.tensors
        if pieces.names != self.names:
            if further := sorted(set(pieces.names) - set(self.names)):
                raise ConfigError(
                    f"the first version of {name!r} did not have {listed(further)}; publish them under another name"
                )
            numbers = {tensor_name: number for number, tensor_name in enumerate(pieces.names)}
            for tensor_name in self.names:
                if tensor_name not in numbers:
                    raise ConfigError(
                        f"tensor {tensor_name!r} of {name!r} is missing in this version; the first had it"
                    )
            if len(numbers) < len(pieces.names) or len(pieces.names) != len(self.names):
                raise ConfigError(f"{name!r} has other parts of its tensors in this version than in the first")
            indices = [numbers[tensor_name] for tensor_name in self.names]
            parts = {at: pieces.parts[index] for at, index in enumerate(indices) if index in pieces.parts}
            pieces = Pieces(self.names, [tensors[index] for index in indices], parts)
            tensors = pieces.tensors
        if not have_shapes(tensors, self.shapes) or pieces.parts != self.parts:
            for tensor_name, tensor, shape in zip(self.names, tensors, self.shapes, strict=True):
                if tuple(tensor.shape) != shape:
                    raise ConfigError(
                        f"tensor {tensor_name!r} of {name!r} has shape {tuple(tensor.shape)} in this version, but "
                        f"{shape} in the first; publish it under another name"
                    )
            raise ConfigError(f"{name!r} has other parts of its tensors in this version than in the first")
        pairs = list(zip(map(_dtype_of, tensors), self.dtypes, strict=True))
        for dtype, first in set(pairs):
            if dtype is not first and not can_convert(dtype, first):
                tensor_name = self.names[pairs.index((dtype, first))]
                raise ConfigError(
                    f"tensor {tensor_name!r} of {name!r} is {dtype} in this version, which cannot be converted to the "
                    f"{first} that is published since the first; publish it under another name"
                )
        return tensors

    def box(self, index: int) -> Box:
        """Returns the indices of a tensor in the larger tensor."""
        part = self.parts.get(index)
        shape = self.shapes[index]
        return Box((0,) * len(shape) if part is None else part[0], shape)

    def whole(self, index: int) -> tuple[int, ...]:
        """Returns the shape of the larger tensor of which a tensor is a part."""
        part = self.parts.get(index)
        return self.shapes[index] if part is None else part[1]


class Selection(NamedTuple):
    """The values of a shard that a consumer wants, unless it wants all of them unchanged.

    Attributes:
        dtype: the dtype to which floating-point tensors are converted; "" for their own.
        boxes: parts of published tensors, by index; empty for all.
    """

    dtype: str
    boxes: tuple[tuple[int, Box], ...]

    def layout_of(self, layout: VersionLayout) -> VersionLayout:
        """Returns the layout of the selected values."""
        dtypes = [self._dtype_of(dtype) for dtype in layout.dtypes]
        if not self.boxes:
            return layout._replace(dtypes=dtypes)
        selected = VersionLayout([], [], [], {})
        for index, box in self.boxes:
            if box.sizes != layout.whole(index):
                selected.parts[len(selected.names)] = (box.offsets, layout.whole(index))
            selected.names.append(layout.names[index])
            selected.dtypes.append(dtypes[index])
            selected.shapes.append(box.sizes)
        return selected

    def taken_from(self, layout: VersionLayout, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the selected parts of a version's tensors."""
        if not self.boxes:
            return tensors
        return [tensors[index][box.slices_in(layout.box(index))] for index, box in self.boxes]

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return _DTYPES[self.dtype] if self.dtype and dtype.is_floating_point else dtype

    def check_dtypes(self, layout: VersionLayout, purpose: str) -> None:
        """Raises `ConfigError`, which starts with `purpose`, for a tensor that torch cannot convert."""
        for dtype in dict.fromkeys(layout.dtypes):
            if not can_convert(dtype, self._dtype_of(dtype)):
                name = layout.names[layout.dtypes.index(dtype)]
                raise ConfigError(
                    f"{purpose}: tensor {name!r} is {dtype}, which torch cannot convert to torch.{self.dtype}"
                )

    def plain(self) -> PlainSelection:
        """Returns it as plain values."""
        return self.dtype, [[[index], list(box.offsets), list(box.sizes)] for index, box in self.boxes]

    @classmethod
    def from_plain(cls, plain: PlainSelection, layout: VersionLayout) -> Selection:
        """The inverse of `plain`, for a peer's selection from `layout`.

        Raises:
            TransportError: the value is not a selection.
        """
        try:
            dtype, boxes = plain
            found = cls(
                _text(dtype),
                tuple((_numbers(first)[0], Box(_numbers(start), _numbers(sizes))) for first, start, sizes in boxes),
            )
            is_consistent = (not dtype or _DTYPES[dtype].is_floating_point) and all(
                common(box, layout.box(index)) == box for index, box in found.boxes
            )
        except (TypeError, ValueError, KeyError, IndexError) as exc:
            raise TransportError(f"an invalid selection of published tensors arrived: {exc!r}") from exc
        if not is_consistent:
            raise TransportError("an invalid selection of published tensors arrived: its numbers do not fit")
        return found


def needed_boxes(layout: VersionLayout, earlier: Sequence[VersionLayout], wanted: Pieces) -> list[tuple[int, Box]]:
    """Returns the parts of a shard to copy into targets, without indices that earlier shards have."""
    of_name: dict[str, list[tuple[bool, int, Box]]] = {}
    for each in (*earlier, layout):
        for index, name in enumerate(each.names):
            of_name.setdefault(name, []).append((each is layout, index, each.box(index)))
    found = []
    for number, (name, target) in enumerate(zip(wanted.names, wanted.tensors, strict=True)):
        offsets, _ = wanted.parts.get(number, ((0,) * target.dim(), ()))
        left = [Box(offsets, tuple(target.shape))] if target.numel() else []
        for is_here, index, box in of_name.get(name, ()):
            if len(box.sizes) == target.dim():
                taken, left = _shared_and_left(left, box)
                found += [(index, shared) for shared in taken if is_here]
    return found


def _shared_and_left(boxes: Sequence[Box], other: Box) -> tuple[list[Box], list[Box]]:
    """Returns the indices of the boxes that are in another box, and those that are not."""
    taken: list[Box] = []
    left: list[Box] = []
    for box in boxes:
        shared = common(box, other)
        if shared is None:
            left.append(box)
        else:
            taken.append(shared)
            left.extend(without(box, shared))
    return taken, left


class ShardCopies(NamedTuple):
    """The copies from a shard when a version is pulled.

    Attributes:
        sources: indices of published tensors with the slices of them, None for all.
        is_whole: whether the targets are all published tensors, in order and with the same dtypes.
    """

    sources: list[tuple[int, tuple[slice, ...] | None]]
    targets: list[Tensor]
    is_whole: bool = False


def whole_copies(layout: VersionLayout, wanted: Pieces) -> ShardCopies | None:
    """Returns the copies if the targets are exactly the published tensors, as with equal models; otherwise None."""
    tensors = wanted.tensors
    if (
        wanted.names == layout.names
        and not wanted.parts
        and not layout.parts
        and have_shapes(tensors, layout.shapes)
        and have_dtypes(tensors, layout.dtypes)
    ):
        return ShardCopies([], tensors, True)
    return None


def copies_for(
    layouts: Sequence[VersionLayout], wanted: Pieces, is_whole: bool, name: str, publishers: Sequence[str], me: str
) -> list[ShardCopies]:
    """Returns the copies from each shard into the targets, each index once.

    Args:
        layouts: the layouts of the shards.
        wanted: the targets.
        is_whole: whether every published tensor must have a target.
        name: the name of the published tensors, for errors.
        publishers: the workers that publish the shards, for errors.

    Raises:
        ConfigError: a target is not published, has another shape, contains a part that no worker publishes, or has a
            dtype to which the values cannot be converted.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for shard, layout in enumerate(layouts):
        for index, tensor_name in enumerate(layout.names):
            found.setdefault(tensor_name, []).append((shard, index))
    by = " and ".join(map(repr, dict.fromkeys(publishers)))
    if unknown := [tensor_name for tensor_name in dict.fromkeys(wanted.names) if tensor_name not in found]:
        raise ConfigError(
            f"{me!r} wants {listed(map(repr, unknown))} in {name!r}, which {by} did not publish: "
            f"it has {listed(map(repr, found))}"
        )
    if is_whole and (missing := [tensor_name for tensor_name in found if tensor_name not in set(wanted.names)]):
        raise ConfigError(
            f"{by} publishes {listed(map(repr, missing))} in {name!r}, which the module of {me!r} does not have; pass "
            "a dictionary of the tensors that it wants"
        )
    copies = [ShardCopies([], []) for _ in layouts]
    for number, (tensor_name, target) in enumerate(zip(wanted.names, wanted.tensors, strict=True)):
        offsets, whole = wanted.parts.get(number, ((0,) * target.dim(), tuple(target.shape)))
        wanted_box = Box(offsets, tuple(target.shape))
        left = [wanted_box] if target.numel() else []
        for shard, index in found[tensor_name]:
            layout, publisher = layouts[shard], publishers[shard]
            if layout.whole(index) != whole:
                raise ConfigError(
                    f"tensor {tensor_name!r} of {name!r} has shape {layout.whole(index)} at its publisher "
                    f"{publisher!r}, but {whole} at {me!r}; both need the same model"
                )
            dtype = layout.dtypes[index]
            if target.dtype is not dtype and not can_convert(dtype, target.dtype):
                raise ConfigError(
                    f"tensor {tensor_name!r} of {name!r} is {dtype} at its publisher {publisher!r}, which cannot be "
                    f"converted to {target.dtype} at {me!r}"
                )
            box = layout.box(index)
            taken, left = _shared_and_left(left, box)
            for shared in taken:
                copies[shard].sources.append((index, None if shared == box else shared.slices_in(box)))
                copies[shard].targets.append(target if shared == wanted_box else target[shared.slices_in(wanted_box)])
        if left:
            raise ConfigError(
                f"no worker has {', '.join(map(shown, left))} of tensor {tensor_name!r} of {name!r}, which {me!r} "
                f"wants; {by} published {listed(shown(layouts[s].box(i)) for s, i in found[tensor_name])}"
            )
    return copies


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    numbers = tuple(values)
    if len(numbers) > _MAX_DIMS or any(type(number) is not int or not 0 <= number < _MAX_BYTES for number in numbers):
        raise ValueError(f"{abridged(numbers)} are not indices")
    return numbers


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{abridged(value)} is not a name")
    return value


def _is_part(shape: tuple[int, ...], offsets: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(offsets) == len(whole) and all(
        offset + size <= num for offset, size, num in zip(offsets, shape, whole, strict=True)
    )
