"""The arguments of the constructor of `DistributedDataParallel`, and the options of its reducer."""

from __future__ import annotations

import sys
import warnings

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._bucket_assignment import BucketCaps
from rpcdist.parallel._ddp._due_gradients import DueRule
from rpcdist.parallel._ddp._finite_check import CheckFinite


class ReducerOptions:
    """The choices of the user that the reducer needs.

    Args:
        caps: size limits of the buckets.
        find_unused: whether parameters may stay without gradients, different ones in each iteration.
        static: whether every iteration uses the same parameters as the first one.
        view: whether gradients become views of the buckets.
        skip_unused: whether buckets without used parameters are not reduced; these must be the same on all ranks.
        check_finite: see [Note: probes].
    """

    def __init__(
        self,
        caps: BucketCaps,
        *,
        find_unused: bool = False,
        static: bool = False,
        view: bool = False,
        skip_unused: bool = False,
        check_finite: CheckFinite = "probes",
    ) -> None:
        self.caps = caps
        self.find_unused = find_unused
        self.static = static
        self.view = view
        self.skip_unused = skip_unused
        self.check_finite = check_finite

    @property
    def rule(self) -> DueRule:
        """Which parameters get gradients in an iteration."""
        if self.static:
            return DueRule.STATIC
        return DueRule.FOUND if self.find_unused else DueRule.EVERY

    @property
    def dynamic_unused(self) -> bool:
        """Whether each iteration determines its unused parameters."""
        return self.find_unused and not self.static


def member_group(given: ProcessGroup | None) -> ProcessGroup:
    """The group to train in: the given one, or the default one.

    A group of `torch.distributed` with the backend "rpcdist" stands for the group of ours that it is made of; so does
    torch's default group where we have none.

    Raises:
        ConfigError: there is none, or it is not a group of `rpcdist.collectives` with this rank in it.
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
    """The default group: ours, else torch's where it is made of one of ours."""
    ours = collectives.group.WORLD
    if isinstance(ours, ProcessGroup):
        return ours
    theirs = _behind(torch.distributed.group.WORLD) if torch.distributed.is_available() else None
    return theirs if isinstance(theirs, ProcessGroup) else None


def _behind(given: object) -> object:
    """The group that does the work of a group of torch's, where that is one of ours; else the given one."""
    torch_backend = sys.modules.get("rpcdist.collectives.torch_backend")  # without it, there are no such groups
    return given.group if torch_backend and isinstance(given, torch_backend.TorchProcessGroup) else given


def choose_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether buffers are synchronised before each forward pass: the new argument wins over the old one."""
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated: use `forward_sync_buffers`, which wins where both are given. "
            "`broadcast_buffers=False` also leaves the buffers out of the first synchronisation.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return broadcast_buffers is not False


def group_of_mesh(device_mesh: object, process_group: ProcessGroup | None) -> ProcessGroup | None:
    """The group of a mesh of one dimension, ours or torch's; without a mesh, the given group.

    Raises:
        ConfigError: there is a group as well, or the mesh has several dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise ConfigError("Cannot specify both process_group and device_mesh arguments.")
    get_group = getattr(device_mesh, "get_group", None)
    if get_group is None:
        raise ConfigError(f"device_mesh is a mesh, made by init_device_mesh, not {device_mesh!r}")
    if getattr(device_mesh, "ndim", 1) != 1:
        raise ConfigError(f'Only 1D device mesh is supported, but got {device_mesh}; pass one dimension, mesh["name"].')
    return member_group(get_group())
