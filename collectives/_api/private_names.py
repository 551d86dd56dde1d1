"""Names that are private in `torch.distributed.distributed_c10d`, and that programs use all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import torch

from rpcdist.collectives._api.default_group import destroy_process_group
from rpcdist.collectives._api.group_queries import get_global_rank
from rpcdist.collectives._api.operations import broadcast
from rpcdist.collectives._group.world import (
    NON_GROUP_MEMBER,
    Group,
    current_world,
    default_group,
    group_or_default,
)
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = [
    "_abort_process_group",
    "_broadcast_coalesced",
    "_get_all_pg_configs",
    "_get_default_group",
    "_get_default_store",
    "_get_global_rank",
    "_get_group_size",
    "_get_object_coll_device",
    "_get_pg_config",
    "_get_pg_default_device",
    "_get_process_group_name",
    "_pg_group_ranks",
    "_pg_map",
    "_pg_names",
    "_rank_not_in_group",
    "_register_process_group",
    "_resolve_process_group",
    "_world",
]

T = TypeVar("T")


def _get_default_group() -> ProcessGroup:
    """The group of all ranks. Raises ConfigError, a ValueError as in torch, before `init_process_group`."""
    return default_group()


def _get_default_store() -> Store:
    """The part of the store that belongs to this initialisation."""
    default_group()
    store = current_world().store
    assert store is not None  # it is set with the group
    return store


def _get_global_rank(group: ProcessGroup, rank: int) -> int:
    return get_global_rank(group, rank)


def _get_group_size(group: Group) -> int:
    return group_or_default(group).size()


def _rank_not_in_group(group: Group) -> bool:
    return group == NON_GROUP_MEMBER


def _get_process_group_name(pg: ProcessGroup) -> str:
    """The group's name; "None" once it is destroyed, as in torch."""
    return _pg_names.get(pg, "None")


def _get_pg_config(group: ProcessGroup | None = None) -> dict[str, object]:
    """The names of a group, its backends, its size, and its ranks in the world."""
    pg = group_or_default(group)
    return {
        "pg_name": pg.group_name,
        "pg_desc": pg.group_desc,
        "backend_config": pg.backend_config,
        "pg_size": pg.size(),
        "ranks": list(pg.ranks),
    }


def _get_all_pg_configs() -> list[dict[str, object]]:
    return [_get_pg_config(group) for group in _pg_map]


def _abort_process_group(group: Group = None) -> None:
    """Ends the operations of a group at once, and frees it; without a group, or with that of all ranks, all groups."""
    if group == NON_GROUP_MEMBER:
        return
    target = group_or_default(group)
    for each in [*_pg_map] if target is current_world().default else [target]:
        each.abort()
    destroy_process_group(target)


def _resolve_process_group(group_name: str) -> ProcessGroup:
    """The group of that name. Raises ConfigError if there is none."""
    group = current_world().groups.get(group_name)
    if group is None:
        known = ", ".join(map(repr, current_world().groups)) or "none"
        raise ConfigError(f"Could not resolve the process group registered under the name {group_name!r}, of {known}")
    return group


def _register_process_group(group_name: str, process_group: ProcessGroup) -> None:
    """Refused: a group has the one name that all its ranks know."""
    raise ConfigError(f"{process_group!r} cannot be registered as {group_name!r}: use its own name, `group_name`")


def _get_pg_default_device(group: Group = None) -> torch.device:
    """Where tensors for this group may be: on the CPU, unless only others have a backend."""
    return torch.device(group_or_default(group).object_device)


def _get_object_coll_device(group: Group = None) -> str:
    return group_or_default(group).object_device


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], buffer_size: int, src: int = 0
) -> None:
    """Copies the tensors of one rank of the group to the others. All are under way at once; none is packed."""
    works = [broadcast(each.detach(), group=process_group, group_src=src, async_op=True) for each in tensors]
    for work in works:
        if work is not None:
            work.wait()


class _OfGroups(Mapping[ProcessGroup, T]):
    """A value for each group of this process, which torch keeps in a dict; read from the groups that exist now."""

    def __init__(self, value_of: Callable[[ProcessGroup], T]) -> None:
        self._value_of = value_of

    def __getitem__(self, group: ProcessGroup) -> T:
        if group not in tuple(self):
            raise KeyError(group)
        return self._value_of(group)

    def __iter__(self) -> Iterator[ProcessGroup]:
        return iter(tuple(current_world().groups.values()))

    def __len__(self) -> int:
        return len(current_world().groups)


_pg_map: Final = _OfGroups(lambda group: (group.name(), group.get_group_store()))
_pg_names: Final = _OfGroups(lambda group: group.group_name)
_pg_group_ranks: Final = _OfGroups(lambda group: {rank: number for number, rank in enumerate(group.ranks)})
_pg_backend_config: Final = _OfGroups(lambda group: group.backend_config)


class _Tables:
    """torch's tables under one name."""

    pg_map = _pg_map
    pg_names = _pg_names
    pg_group_ranks = _pg_group_ranks
    pg_backend_config = _pg_backend_config

    @property
    def default_pg(self) -> ProcessGroup | None:
        return current_world().default

    @property
    def group_count(self) -> int:
        return current_world().num_created


_world: Final = _Tables()
