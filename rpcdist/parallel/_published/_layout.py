"""How the tensors of a version lie in memory: the same on every host, from the publisher's first version on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from rpcdist.errors import ConfigError, listed

__all__ = ["PlainLayout", "VersionLayout", "tensors_of"]

_ALIGNMENT: Final = 64

PlainLayout = tuple[list[str], list[str], list[list[int]]]
"""A layout as plain values, which travel without pickle: names, dtypes, shapes."""


def tensors_of(what: nn.Module | Mapping[str, Tensor], purpose: str) -> dict[str, Tensor]:
    """The tensors of a module, or of a dictionary, by name.

    Args:
        what: a module, whose `state_dict` counts, or tensors by name.
        purpose: what they are for, for the error.

    Raises:
        ConfigError: it is something else, or has a value that is no dense tensor.
    """
    if isinstance(what, nn.Module):
        what = what.state_dict()
    if not isinstance(what, Mapping):
        raise ConfigError(f"{purpose} are a {type(what).__name__}: give a module, or a dictionary of tensors by name")
    tensors = dict(what)
    for name, tensor in tensors.items():
        if (
            type(name) is str
            and isinstance(tensor, Tensor)
            and tensor.layout is torch.strided
            and not (tensor.is_meta or tensor.is_quantized)
        ):
            continue  # as nearly always
        if not isinstance(name, str):
            raise ConfigError(f"{purpose} have the name {name!r}, which is no text")
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name!r} of {purpose} is a {type(tensor).__name__}, not a tensor; leave it out")
        kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else "sparse"
        if kind != "sparse" or tensor.layout is not torch.strided:
            raise ConfigError(f"{name!r} of {purpose} is {kind}; only dense tensors with memory can be published")
    return tensors


class VersionLayout(NamedTuple):
    """Names, dtypes and shapes of the tensors of a version.

    Attributes:
        names: of the tensors, in the order in which they lie in memory.
        dtypes: of the published values.
        shapes: of the tensors.
    """

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> VersionLayout:
        """The layout of these tensors; those of floating point are published as `dtype`, if one is given."""
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype={dtype}: tensors are published as their own dtype, or as one of floating point")
        if not tensors:
            raise ConfigError("there is no tensor to publish: the module or dictionary is empty")
        values = tensors.values()
        dtypes = [value.dtype if dtype is None or not value.is_floating_point() else dtype for value in values]
        return cls(list(tensors), dtypes, [tuple(value.shape) for value in values])

    @classmethod
    def from_plain(cls, plain: PlainLayout) -> VersionLayout:
        """The inverse of `plain`."""
        names, dtypes, shapes = plain
        return cls(list(names), [getattr(torch, dtype) for dtype in dtypes], [tuple(shape) for shape in shapes])

    def plain(self) -> PlainLayout:
        """The same as plain values."""
        return self.names, [str(dtype).removeprefix("torch.") for dtype in self.dtypes], [list(s) for s in self.shapes]

    def offsets(self) -> tuple[list[int], int]:
        """Where each tensor begins, and how many bytes all of them take up."""
        starts, end = [], 0
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            starts.append(start)
            end = start + torch.Size(shape).numel() * dtype.itemsize
        return starts, end

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors on the memory of a version, which is given as bytes."""
        views = []
        for start, dtype, shape in zip(self.offsets()[0], self.dtypes, self.shapes, strict=True):
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            views.append(memory[start : start + num_bytes].view(dtype).view(shape))
        return views

    def check_published(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """Raises `ConfigError` if the tensors of a further version are not those of the first one."""
        if list(tensors) == self.names and [tensor.shape for tensor in tensors.values()] == self.shapes:
            return
        for tensor_name, shape in zip(self.names, self.shapes, strict=True):
            if tensor_name not in tensors:
                raise ConfigError(f"tensor {tensor_name!r} of {name!r} is missing in this version; the first had it")
            if tuple(tensors[tensor_name].shape) != shape:
                raise ConfigError(
                    f"tensor {tensor_name!r} of {name!r} has shape {tuple(tensors[tensor_name].shape)} in this "
                    f"version, and {shape} in the first; publish it under another name"
                )
        if further := tensors.keys() - set(self.names):
            raise ConfigError(
                f"{name!r} was published first without {listed(sorted(further))}; publish them under another name"
            )

    def matched(
        self, targets: Mapping[str, Tensor], is_whole: bool, name: str, publisher: str, me: str
    ) -> Sequence[int]:
        """The index of the published tensor for each target.

        Args:
            targets: where the values will be copied to.
            is_whole: whether every published tensor has to have a target.
            name: under which they are published, for errors.
            publisher: the worker that publishes them, for errors.
            me: this worker, for errors.

        Raises:
            ConfigError: a target has no published tensor, another shape, or a dtype that its values do not fit into.
        """
        values = targets.values()
        if list(targets) == self.names:
            indices: Sequence[int] = range(len(self.names))
            if [value.shape for value in values] == self.shapes and [value.dtype for value in values] == self.dtypes:
                return indices
        else:
            numbers = {tensor_name: number for number, tensor_name in enumerate(self.names)}
            if unknown := [tensor_name for tensor_name in targets if tensor_name not in numbers]:
                raise ConfigError(
                    f"{publisher!r} does not publish {listed(map(repr, unknown))} in {name!r}, as {me!r} wants; it "
                    f"publishes {listed(map(repr, self.names))}"
                )
            if is_whole and (missing := [tensor_name for tensor_name in self.names if tensor_name not in targets]):
                raise ConfigError(
                    f"{publisher!r} publishes {listed(map(repr, missing))} in {name!r}, which the module of {me!r} "
                    "does not have; give a dictionary of the tensors that it wants"
                )
            indices = [numbers[tensor_name] for tensor_name in targets]
        for index, target in zip(indices, values, strict=True):
            if target.shape != self.shapes[index]:
                raise ConfigError(
                    f"tensor {self.names[index]!r} of {name!r} has shape {self.shapes[index]} at its publisher "
                    f"{publisher!r}, and {tuple(target.shape)} at {me!r}; both need the same model"
                )
            if target.dtype is not self.dtypes[index] and not torch.can_cast(self.dtypes[index], target.dtype):
                raise ConfigError(
                    f"tensor {self.names[index]!r} of {name!r} is {self.dtypes[index]} at its publisher {publisher!r}, "
                    f"which cannot be converted to {target.dtype} at {me!r}"
                )
        return indices
