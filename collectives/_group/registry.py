"""The groups of this process: the default one, all others by name, and whose rank is which."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from rpcdist.collectives.backends import Backend
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

if TYPE_CHECKING:
    from rpcdist.collectives._stores.base import Store

__all__ = [
    "NON_GROUP_MEMBER",
    "Group",
    "GroupMember",
    "World",
    "current_world",
    "default_group",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "group_or_default",
    "is_initialized",
    "member_group",
    "resolve_group_rank",
    "warn_not_in_group",
]

NON_GROUP_MEMBER: Final = cast(ProcessGroup, -100)
"""What `new_group` returns on ranks that are not in the group, with torch's value; functions that get it do nothing.

It is annotated as a group because every function takes it as one.
"""

Group = ProcessGroup | None
"""What functions take: a group, `NON_GROUP_MEMBER`, or None for the default group."""


@dataclass
class World:
    """The groups of one process.

    Attributes:
        default: the group of all ranks; None before `init_process_group`.
        groups: all groups by name, in the order of their creation.
        num_created: how many groups were numbered since `init_process_group`.
        hashed: how many groups were made of exactly these ranks with local synchronisation.
        store: the part of the store that belongs to this initialisation.
    """

    default: ProcessGroup | None = None
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    num_created: int = 0
    hashed: dict[tuple[int, ...], int] = field(default_factory=dict)
    store: Store | None = None

    def clear(self) -> None:
        """Forgets everything; the groups are shut down already."""
        self.default = None
        self.groups.clear()
        self.num_created = 0
        self.hashed.clear()
        self.store = None


class _Process:
    """Where this process's world is. Tests that run ranks as threads put an object in its place that has one each."""

    def __init__(self) -> None:
        self.world = World()


_process = _Process()


def current_world() -> World:
    """The groups of this process."""
    return _process.world


class _WorldProperty(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; None before `init_process_group`."""
        return _process.world.default


class group(metaclass=_WorldProperty):
    """`group.WORLD` is the default group."""


class GroupMember(metaclass=_WorldProperty):
    """`GroupMember.WORLD` is the default group; `NON_GROUP_MEMBER` stands for a group that this rank is not in."""

    NON_GROUP_MEMBER: Final = NON_GROUP_MEMBER


# ---------------------------------------------------------------- which group is meant


def is_initialized() -> bool:
    """Whether `init_process_group` was called, and `destroy_process_group` was not."""
    return _process.world.default is not None


def default_group() -> ProcessGroup:
    """The group of all ranks. Raises ConfigError before `init_process_group`."""
    found = _process.world.default
    if found is None:
        raise ConfigError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return found


def group_or_default(given: Group) -> ProcessGroup:
    """The group itself; the default one for None. Raises ConfigError for what is no group of this process."""
    if given is None:
        return default_group()
    if isinstance(given, ProcessGroup):
        return given
    raise ConfigError(f"Invalid process group specified: {given!r}")


def member_group(given: Group, what: str) -> ProcessGroup | None:
    """The group of a call; None, with torch's warning, when this rank is not in it."""
    if isinstance(given, ProcessGroup):
        return given
    if given == NON_GROUP_MEMBER:
        warn_not_in_group(what)
        return None
    return group_or_default(given)


def warn_not_in_group(what: str) -> None:
    """Says that the call does nothing."""
    world = _process.world.default
    rank = -1 if world is None else world.rank()
    warnings.warn(f"Running {what} on global rank {rank} which does not belong to the given group.", stacklevel=4)


def resolve_group_rank(found: ProcessGroup, world_rank: int | None, group_rank: int | None) -> int:
    """The rank in the group, from `src` or `group_src` (`dst` or `group_dst`); exactly one of them is given."""
    if group_rank is not None:
        if world_rank is not None:
            raise ConfigError("Can't specify both group_rank and global_rank")
        return _whole(group_rank)
    if world_rank is None:
        raise ConfigError("Must specify global_rank or group_rank")
    return found.group_rank(_whole(world_rank))


def _whole(rank: int) -> int:
    if not isinstance(rank, int):
        raise TypeError(f"a rank is a whole number, not {rank!r}")
    return rank


# ---------------------------------------------------------------- rank maths


def get_rank(group: Group = None) -> int:
    """This process's rank in the group; -1 when it is not in it."""
    return -1 if group == NON_GROUP_MEMBER else group_or_default(group).rank()


def get_world_size(group: Group = None) -> int:
    """How many ranks the group has; -1 when this one is not in it."""
    return -1 if group == NON_GROUP_MEMBER else group_or_default(group).size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """The rank in `group` of a rank in the world.

    Raises:
        ConfigError: it is not a member.
    """
    return group_or_default(group).group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The rank in the world of a rank in `group`.

    Raises:
        ConfigError: the group has no such rank.
    """
    return group_or_default(group).world_rank(group_rank)


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """The members' ranks in the world, by their rank in the group."""
    return list(group_or_default(group).ranks)


def get_backend(group: Group = None) -> Backend:
    """The backend's name, as it was given when the group was made."""
    return Backend(group_or_default(group).name())


def get_backend_config(group: Group = None) -> str:
    """Which backend carries which type of device, e.g. "cpu:tcp,cuda:nccl"."""
    return group_or_default(group).backend_config


def get_pg_count() -> int:
    """How many groups were made, the default one included, those with `use_local_synchronization` not."""
    return _process.world.num_created
