"""`split_group`, which splits a group, and `shrink_group`, which removes ranks that died."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from rpcdist.collectives._group import creation
from rpcdist.collectives._group.backend_contract import GroupBackend, GroupContext
from rpcdist.collectives._group.bootstrap import agree
from rpcdist.collectives._group.world import World, current_world, group_or_default
from rpcdist.collectives._operations.operation import whole_number
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives.backends import Backend, BackendConfig, make_backend
from rpcdist.collectives.nccl import NcclBackend
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = ["shrink_group", "split_group"]

SHRINK_DEFAULT: Final = 0
SHRINK_ABORT: Final = 1


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Splits a group into groups without common ranks; all ranks of the parent call it, and no others.

    If the parent and the new groups have an `nccl` backend, they share its connections and memory (`ncclCommSplit`).
    Then every rank takes part, even one that will be in no group, and waits until the others have called it.

    Args:
        parent_pg: the default group by default.
        split_ranks: for each new group, the ranks in the parent.
        timeout, pg_options, group_desc: as in `new_group`; `pg_options` are the parent's by default.
        backend: some of the parent's backends, e.g. "cpu:tcp"; all by default.

    Returns:
        This rank's group; None if it is in none.
    """
    parent = group_or_default(parent_pg)
    nccl = _nccl_backend(parent, parent.name() if backend is None else backend)
    if not split_ranks:
        raise ConfigError("split_ranks cannot be None or empty")
    if backend is not None:
        _check_subset(backend, parent)
    make = make_backend if nccl is None else _by_splitting(nccl)
    own_part: Sequence[int] = ()
    for ranks in split_ranks:
        part = [whole_number(rank, "rank") for rank in ranks]
        creation.check_split(part, parent)
        if parent.rank() in part:
            own_part = own_part or part
    if not own_part:
        if nccl is not None:
            nccl.split(None)
        return None
    return creation.split_off(
        parent, own_part, timeout=timeout, options=pg_options, description=group_desc, backend=backend, make=make
    )


def _nccl_backend(parent: ProcessGroup, wanted: str) -> NcclBackend | None:
    """Returns the `nccl` backend of the parent, if the new groups will have one."""
    if Backend.NCCL not in BackendConfig(wanted).device_backend_map.values():
        return None
    backends = (parent.backend(device_type) for device_type in parent.device_types)
    return next((backend for backend in backends if isinstance(backend, NcclBackend)), None)


def _by_splitting(nccl: NcclBackend) -> creation.MakeBackend:
    def make(name: Backend | str, context: GroupContext) -> GroupBackend:
        made = nccl.split(context) if name == Backend.NCCL else make_backend(name, context)
        assert made is not None, "a split with a context makes a backend"
        return made

    return make


def _check_subset(backend: str, parent: ProcessGroup) -> None:
    own = BackendConfig(parent.name()).device_backend_map
    for device_type, name in BackendConfig(backend).device_backend_map.items():
        if own.get(device_type) != name:
            raise ConfigError(
                f"Backend mismatch for device '{device_type}': the parent has '{own.get(device_type)}', requested "
                f"'{name}'"
            )


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object | None = None,
) -> ProcessGroup:
    """Makes a group of the remaining ranks, and destroys the old group; the remaining ranks call it, and no others.

    Call it to continue without ranks that died, after which the old group's operations have failed.

    Args:
        ranks_to_exclude: ranks in the group.
        group: the default group by default, which the new one then replaces; all other groups are destroyed as well.
        shrink_flags: 1 aborts running operations, 0 waits for them.
        pg_options: the old group's by default.

    Raises:
        TypeError, ConfigError: wrong ranks or flags.
        StoreTimeout: some ranks did not join; names them.
    """
    if not isinstance(ranks_to_exclude, list):
        raise TypeError(f"ranks_to_exclude must be a list, but got {type(ranks_to_exclude).__name__}. Example: [1, 3]")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ConfigError(f"Invalid shrink_flags value: {shrink_flags}. Must be 0 (default) or 1 (abort first).")
    old = group_or_default(group)
    members = _remaining([whole_number(rank, "rank") for rank in ranks_to_exclude], old)
    if shrink_flags == SHRINK_ABORT:
        old.abort()
    settings, world = creation.GroupSettings.like(old, pg_options), current_world()
    if old is world.default:
        return _shrink_world(world, old, members, settings)
    world.groups.pop(old.group_name, None)
    old.shutdown()
    name = f"{old.group_name}-without-{'-'.join(map(str, ranks_to_exclude))}"
    return creation.make_group(world, name, members, settings)


def _shrink_world(
    world: World, old: ProcessGroup, members: tuple[int, ...], settings: creation.GroupSettings
) -> ProcessGroup:
    """Renumbers the ranks from 0, since in the default group the rank in the group is the rank in the world."""
    assert world.store is not None
    store: Store = PrefixStore(f"of/{'-'.join(map(str, members))}", world.store)
    for group in reversed(list(world.groups.values())):
        group.shutdown()
    rank, ranks = members.index(old.rank()), tuple(range(len(members)))
    described = f"the default group, shrunk to ranks {list(members)}"
    store = agree(store, rank, ranks, described, old.timeout_s, described, fresh=True)
    shrunk = creation.open_group(old.group_name, rank, ranks, PrefixStore("group/0", store), settings)
    world.begin(shrunk, store)
    return shrunk


def _remaining(excluded: list[int], old: ProcessGroup) -> tuple[int, ...]:
    if not excluded:
        raise ConfigError("ranks_to_exclude cannot be empty. Name at least one rank to exclude, e.g. [failed_rank].")
    for rank in excluded:
        if not 0 <= rank < old.size():
            raise ConfigError(f"Rank {rank} is out of bounds for group size {old.size()}.")
    if len(set(excluded)) != len(excluded):
        raise ConfigError(f"Duplicate rank in ranks_to_exclude: {excluded}. Each rank can only be excluded once.")
    if len(excluded) >= old.size():
        raise ConfigError(f"Cannot exclude all {old.size()} ranks from process group. At least one rank must remain.")
    if old.rank() in excluded:
        raise ConfigError(
            f"Current rank {old.rank()} is in the exclusion list and should not call shrink_group(). Only the "
            "remaining ranks call it; excluded ones should end."
        )
    return tuple(world_rank for rank, world_rank in enumerate(old.ranks) if rank not in excluded)
