"""The arguments of the constructor of `DistributedDataParallel`, and the options of its reducer.

With mixed precision, the module keeps its parameters in full precision. Each forward pass runs with copies in
`param_dtype` that autograd derives from the parameters. So gradients arrive in full precision, with values that
`param_dtype` can hold, and optimizers and checkpoints see only full precision.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._buckets import BucketCaps
from rpcdist.parallel._ddp._finite_check import CheckFinite
from rpcdist.parallel._ddp._iteration_state import DueRule
from rpcdist.parallel._ddp._tensor_tree import map_tensors

_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True)
class MixedPrecision:
    """The argument `mixed_precision` of `DistributedDataParallel`; only tensors of floating-point numbers are cast.

    Attributes:
        param_dtype: the dtype of parameters and inputs in the forward pass; None leaves them unchanged.
        reduce_dtype: the dtype in which gradients are sent and summed; `param_dtype` by default.
        buffer_dtype: the dtype of buffers, which are cast once; None leaves them unchanged.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, given: object | None) -> MixedPrecision:
        """Converts the user's argument: a `MixedPrecision`, torch's `_MixedPrecision`, or None.

        Raises:
            ConfigError: the argument is another object, or a dtype is not a floating-point dtype.
        """
        if given is None:
            return cls()
        dtypes: list[Any] = [getattr(given, field, given) for field in _FIELDS]
        for dtype in dtypes:
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigError(
                    "mixed_precision must be an rpcdist.parallel.MixedPrecision of floating-point dtypes, not "
                    f"{given!r}"
                )
        return cls(*dtypes)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced; None for their own."""
        return self.reduce_dtype or self.param_dtype

    def cast_buffers(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Casts the buffers that are not ignored, in place."""
        for name, buffer in module.named_buffers():
            if self.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(self.buffer_dtype)

    def mark_parameters(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Sets torch's attributes on each parameter that forward passes cast, since programs read them.

        These are `_fp_param`, its values in full precision, and `_mp_param`, a tensor of its shape in `param_dtype`.
        The latter has no values, as with torch outside a pass: a copy lives as long as the pass that made it.
        """
        if self.param_dtype is None:
            return
        for _, parameter in self._cast_parameters(module, ignored):
            marked: Any = parameter
            marked._fp_param = parameter.data
            marked._mp_param = parameter.new_zeros((), dtype=self.param_dtype).expand(parameter.shape)

    @staticmethod
    def _cast_parameters(module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in module.named_parameters():
            if name not in ignored and parameter.is_floating_point():
                yield name, parameter

    def run(
        self, module: nn.Module, ignored: Collection[str], inputs: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """Runs the module's forward pass with cast inputs and cast copies of the parameters that are not ignored."""
        dtype = self.param_dtype
        if dtype is None:
            return module(*inputs, **keywords)
        copies = {name: parameter.to(dtype) for name, parameter in self._cast_parameters(module, ignored)}
        cast = [map_tensors(value, self._cast) for value in (tuple(inputs), dict(keywords))]
        return functional_call(module, copies, *cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor


@dataclass(slots=True)
class ReducerOptions:
    """The user's options for the reducer.

    Attributes:
        find_unused: whether parameters may stay without gradients, different ones in each iteration.
        static: whether every iteration uses the same parameters as the first one.
        skip_unused: whether buckets without used parameters are not reduced; they must be the same on all ranks.
        check_finite: see [Note: probes].
    """

    caps: BucketCaps
    find_unused: bool = False
    static: bool = False
    view: bool = False
    skip_unused: bool = False
    check_finite: CheckFinite = "probes"

    @property
    def rule(self) -> DueRule:
        """The rule for which parameters get gradients in an iteration."""

        if self.static:
            return DueRule.STATIC
        return DueRule.FOUND if self.find_unused else DueRule.EVERY

    @property
    def dynamic_unused(self) -> bool:
        """Whether each iteration determines its unused parameters."""
        return self.find_unused and not self.static


def member_group(given: ProcessGroup | None) -> ProcessGroup:
    """Returns the group for the training: the given one, or the default group.

    A group of `torch.distributed` with the backend "rpcdist" is replaced by the group of rpcdist inside it; so is
    torch's default group if rpcdist has no default group.

    Raises:
        ConfigError: no group exists, or it is not a group of `rpcdist.collectives` that contains this rank.
    """
    group = default_group() if given is None else _behind(given)
    if group is None:
        raise ConfigError(
            "Default process group has not been initialized, please make sure to call "
            "rpcdist.collectives.init_process_group."
        )
    if not isinstance(group, ProcessGroup):
        raise ConfigError(
            f"process_group is a {type(group).__module__}.{type(group).__name__}; make groups with "
            "rpcdist.collectives.new_group, or with torch.distributed and its backend 'rpcdist' (import "
            "rpcdist.collectives.torch_backend), and only wrap models on ranks that are in them"
        )
    return group


def default_group() -> ProcessGroup | None:
    """Returns our default group, or the group inside torch's default group."""
    ours = collectives.group.WORLD
    if isinstance(ours, ProcessGroup):
        return ours
    theirs = _behind(torch.distributed.group.WORLD) if torch.distributed.is_available() else None
    return theirs if isinstance(theirs, ProcessGroup) else None


def _behind(given: object) -> object:
    """Returns the group of rpcdist inside a group of torch, or the given object."""
    torch_backend = sys.modules.get("rpcdist.collectives.torch_backend")  # without it, no such groups exist
    return given.group if torch_backend and isinstance(given, torch_backend.TorchProcessGroup) else given


def choose_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Returns whether buffers are synchronised before each forward pass: the new argument overrides the old one."""
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated: use `forward_sync_buffers`, which takes precedence if both are "
            "given. `broadcast_buffers=False` also leaves the buffers out of the first synchronisation.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return broadcast_buffers is not False


def group_of_mesh(device_mesh: object, process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group of a mesh of one dimension, ours or torch's; without a mesh, the given group.

    Raises:
        ConfigError: both are given, or the mesh has several dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise ConfigError("Cannot specify both process_group and device_mesh arguments.")
    get_group = getattr(device_mesh, "get_group", None)
    if get_group is None:
        raise ConfigError(f"device_mesh must be a mesh that init_device_mesh made, not {device_mesh!r}")
    if getattr(device_mesh, "ndim", 1) != 1:
        raise ConfigError(f'Only 1D device mesh is supported, but got {device_mesh}; pass one dimension, mesh["name"].')
    return member_group(get_group())
