"""Questions about groups and the ranks in them: `get_rank`, `get_world_size`, `get_backend` and the like."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch

from rpcdist.collectives._group.backend_contract import GroupBackend
from rpcdist.collectives._group.world import NON_GROUP_MEMBER, Group, current_world, group_or_default
from rpcdist.collectives._operations.operation import whole_number
from rpcdist.collectives.backends import Backend
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = [
    "GroupMember", "get_backend", "get_backend_config", "get_backend_impl", "get_global_rank", "get_group_rank",
    "get_pg_count", "get_process_group_ranks", "get_rank", "get_world_size", "group", "is_initialized",
    "set_timeout",
]  # fmt: skip


class _WorldProperty(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; None before `init_process_group`."""
        return current_world().default


class GroupMember(metaclass=_WorldProperty):
    """`GroupMember.WORLD` is the default group; `NON_GROUP_MEMBER` replaces a group in which this rank is not."""

    NON_GROUP_MEMBER: Final = NON_GROUP_MEMBER


group = GroupMember
"""torch's other name, for `group.WORLD`."""


def is_initialized() -> bool:
    """Whether the default group exists."""
    return current_world().default is not None


def get_rank(group: Group = None) -> int:
    """Returns this process's rank in the group; -1 if the process is not a member."""
    return -1 if group == NON_GROUP_MEMBER else group_or_default(group).rank()


def get_world_size(group: Group = None) -> int:
    """Returns the number of ranks in the group; -1 if this rank is not a member."""
    return -1 if group == NON_GROUP_MEMBER else group_or_default(group).size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Returns the rank in `group` of a rank in the world.

    Raises:
        ConfigError: the rank is not a member.
    """
    return group_or_default(group).group_rank(whole_number(global_rank, "global_rank"))


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Returns the rank in the world of a rank in `group`.

    Raises:
        ConfigError: the group has no such rank.
    """
    return group_or_default(group).world_rank(whole_number(group_rank, "group_rank"))


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Returns the ranks of the members in the world, by rank in the group."""
    return list(group_or_default(group).ranks)


def get_backend(group: Group = None) -> Backend:
    """Returns the name of the backend with which the group was made."""
    return Backend(group_or_default(group).name())


def get_backend_config(group: Group = None) -> str:
    """Returns the backend of each device type, e.g. "cpu:tcp,cuda:nccl"."""
    return group_or_default(group).backend_config


def get_backend_impl(group: Group | str = None, device: torch.device | str | None = None) -> GroupBackend:
    """Returns the object that runs a group's operations, for methods that only some backends have.

    Args:
        group: the default group by default; also a `group_name`.
        device: the device of the tensors; by default the device to which the group is bound, or any device if the
            group has only one backend.

    Raises:
        ConfigError: the group has several backends and `device` is missing, or no backend for that device, or this
            rank is not in the group.
    """
    if isinstance(group, str):
        if group not in current_world().groups:
            raise ConfigError(f"this process has no group with the name {group!r}")
        group = current_world().groups[group]
    pg = group_or_default(group)
    if device is None:
        device = pg.bound_device_id
    if device is not None:
        return pg.backend(device)
    first, *others = pg.device_types or ("cpu",)  # without a backend, the error for the CPU says so
    backend = pg.backend(first)
    if any(pg.backend(other) is not backend for other in others):
        raise ConfigError(
            f"Process group has multiple backend implementations ({pg.backend_config}); pass the device argument to "
            "select one."
        )
    return backend


def set_timeout(timeout: timedelta, group: Group = None) -> None:
    """Sets the limit of a group's later operations on this rank, for all its backends.

    Raises:
        ConfigError: this rank is not in the group.
        TypeError: `timeout` is not a `timedelta`.
    """
    group_or_default(group).set_timeout(timeout)


def get_pg_count() -> int:
    """Returns the number of groups made, with the default one, without those with `use_local_synchronization`."""
    return current_world().num_created
