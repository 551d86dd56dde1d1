"""`new_group` and related functions, which make groups in addition to the default group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch

from rpcdist.collectives._group.creation import GroupSettings, keep_store_for, make_group, timeout_of_group
from rpcdist.collectives._group.world import NON_GROUP_MEMBER, current_world, default_group, group_or_default
from rpcdist.collectives._operations.operation import whole_number
from rpcdist.collectives.backends import Backend, BackendConfig
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = ["new_group", "new_subgroups", "new_subgroups_by_enumeration"]


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup:
    """Makes a group of some ranks of the world. All ranks of the world call it, in the same order of groups.

    Only the members connect, and they wait for each other.

    Args:
        ranks: ranks in the world; all by default.
        timeout: limit of making the group, and of each operation; as in torch, 30 minutes by default, 10 for `nccl`
            alone, independent of the default group. After 10 s a rank logs the ranks for which it waits.
        backend: as in `init_process_group`; that of the default group by default.
        pg_options: options of the backend.
        use_local_synchronization: whether only the members call it.
        group_desc: the purpose of the group, for people.
        device_id: the device to which the group is bound; that of the default group by default.
        sort_ranks: whether ranks in the group follow the ranks in the world instead of the order in `ranks`.

    Returns:
        The group. On a rank outside the group `GroupMember.NON_GROUP_MEMBER` (-100), or None with
        `use_local_synchronization`; the annotation is a group because every function accepts it as one.

    Raises:
        ConfigError: wrong ranks, or an unknown backend.
        StoreTimeout: some ranks did not join; names them.
        CollectiveMismatch: another rank asked for another group.
    """
    world, parent = current_world(), default_group()
    settings = _settings(timeout, backend, pg_options, group_desc, device_id)
    if use_local_synchronization and ranks is not None and parent.rank() not in ranks:
        return cast(ProcessGroup, None)
    name_of = world.hashed_name if use_local_synchronization else lambda _: world.numbered_name()
    return _make(name_of, ranks, settings, sort_ranks)


def _settings(
    timeout: timedelta | None,
    backend: str | None,
    pg_options: object | None,
    group_desc: str | None,
    device_id: torch.device | None = None,
) -> GroupSettings:
    parent = default_group()
    name = Backend(backend) if backend else parent.name()
    limit = timeout_of_group(name, timeout)
    BackendConfig(name)  # checks the name
    bound = parent.bound_device_id
    if device_id is not None and bound is not None and device_id != bound:
        raise ConfigError(f"Mismatched bound device between new pg and the default pg: {device_id} and {bound}.")
    described = "undefined" if group_desc is None else group_desc
    return GroupSettings(name, limit, described, pg_options, bound if device_id is None else device_id)


def _make(
    name_of: Callable[[tuple[int, ...]], str],
    ranks: Sequence[int] | None,
    settings: GroupSettings,
    sort_ranks: bool = True,
) -> ProcessGroup:
    parent = default_group()
    members = _members(ranks, parent.size(), sort_ranks)
    name = name_of(members)
    if parent.rank() not in members:
        keep_store_for(current_world(), name, members)
        return NON_GROUP_MEMBER
    return make_group(current_world(), name, members, settings)


def _members(ranks: Sequence[int] | None, world_size: int, sort_ranks: bool) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(world_size))
    members = tuple(whole_number(rank, "rank") for rank in ranks)
    if sort_ranks:
        members = tuple(sorted(members))
    if not members:
        raise ConfigError("ranks is empty; a group needs at least one rank")
    if len(set(members)) != len(members):
        raise ConfigError(f"ranks list must not contain duplicate entries, got {list(members)}")
    if len(members) > world_size:
        text = "the new group's world size should be less or equal to the world size set by init_process_group"
        raise ConfigError(text)
    for rank in members:
        if not 0 <= rank < world_size:
            text = f"Rank {rank} is out of range. Valid ranks are 0 to {world_size - 1} (world_size={world_size})"
            raise ConfigError(text)
    return members


# ---------------------------------------------------------------- several at once


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Splits a group into groups of `group_size` consecutive ranks; all ranks of the group call it.

    Args:
        group_size: the number of CUDA devices by default.
        group: the group to split; the default group by default.
        timeout, backend, pg_options, group_desc: as in `new_group`.

    Returns:
        This rank's group, and all groups.
    """
    if group_size is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "Default group size only takes effect when CUDA is available. If your subgroup using a backend that "
                "does not depend on CUDA, please pass in 'group_size' correctly."
            )
        group_size = torch.cuda.device_count()
    if group_size <= 0:
        raise ConfigError(f"The arg 'group_size' ({group_size}) must be positive")
    parent = group_or_default(group)
    ranks = parent.ranks
    if len(ranks) < group_size:
        raise ConfigError(f"The arg 'group_size' ({group_size}) must not exceed the world size ({len(ranks)})")
    if len(ranks) % group_size != 0:
        raise ConfigError(f"The world size ({len(ranks)}) must be divisible by 'group_size={group_size}'")
    parts = [list(ranks[begin : begin + group_size]) for begin in range(0, len(ranks), group_size)]
    return _enumerated(parent, parts, _settings(timeout, backend, pg_options, group_desc))


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Makes groups without common ranks; all ranks of the world call it.

    Returns:
        This rank's group (None if it is in none), and all groups.
    """
    settings = _settings(timeout, backend, pg_options, group_desc)
    return _enumerated(default_group(), ranks_per_subgroup_list, settings)


def _enumerated(
    parent: ProcessGroup, ranks_per_subgroup_list: Sequence[Sequence[int]], settings: GroupSettings
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Makes the groups on all ranks of `parent`; ranks of other groups may make groups at the same time."""
    world = current_world()

    def name_of(_: tuple[int, ...]) -> str:
        if parent is default_group():
            return world.numbered_name()
        return f"{parent.group_name}.{parent.next_number('subgroup')}"

    if ranks_per_subgroup_list is None or len(ranks_per_subgroup_list) == 0:
        raise ConfigError("The arg 'ranks_per_subgroup_list' cannot be empty")
    owner: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
        for rank in (whole_number(rank, "rank") for rank in ranks):
            if rank in owner:
                raise ConfigError(f"Rank {rank} has appeared in both subgroup {owner[rank]} and {ranks}")
            owner[rank] = ranks
    own_group: ProcessGroup | None = None
    groups = []
    for ranks in ranks_per_subgroup_list:
        groups.append(_make(name_of, ranks, settings))
        if isinstance(groups[-1], ProcessGroup):
            own_group = groups[-1]
    return cast(ProcessGroup, own_group), groups
