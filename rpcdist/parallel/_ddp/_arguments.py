"""Checks and resolves arguments of the constructor of `DistributedDataParallel`."""

from __future__ import annotations

import sys

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = ["choose_sync", "default_group", "member_group", "refuse_unsupported"]


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
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return broadcast_buffers is not False


def refuse_unsupported(
    mixed_precision: object | None, device_mesh: object | None, process_group: ProcessGroup | None
) -> None:
    """Raises ConfigError, with an alternative, for arguments of torch that are not supported."""
    if process_group is not None and device_mesh is not None:
        raise ConfigError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        raise ConfigError("device_mesh is not supported: pass process_group=rpcdist.collectives.new_group(ranks)")
    if mixed_precision is not None:
        raise ConfigError(
            "mixed_precision is not supported: run the forward pass under torch.autocast, and halve the bytes on the "
            "wire with register_comm_hook(None, rpcdist.parallel.comm_hooks.bf16_compress_hook)"
        )
