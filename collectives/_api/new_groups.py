"""Groups beside the default one: `new_group` and its relatives."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch

from rpcdist.collectives._group.backend_contract import Backend as BackendBase
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import arrive
from rpcdist.collectives._group.registry import NON_GROUP_MEMBER, World, current_world, default_group, group_or_default
from rpcdist.collectives._operations.checks import check_timeout
from rpcdist.collectives._stores.prefix_store import PrefixStore
from rpcdist.collectives.backends import Backend, BackendConfig, make_backend
from rpcdist.collectives.constants import default_pg_nccl_timeout, default_pg_timeout
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError, RankLost

if TYPE_CHECKING:
    from rpcdist.collectives._stores.base import Store

__all__ = [
    "MakeBackend",
    "default_timeout",
    "hashed_name",
    "make_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "open_group",
]

logger = logging.getLogger(__name__)

MakeBackend = Callable[[Backend | str, GroupContext], BackendBase]


def default_timeout(backend: str) -> timedelta:
    """torch's: shorter for `nccl` alone."""
    return default_pg_nccl_timeout if backend == Backend.NCCL else default_pg_timeout


def open_group(
    name: str,
    rank: int,
    ranks: tuple[int, ...],
    store: Store,
    *,
    backend: str,
    timeout: timedelta,
    options: object | None,
    device: torch.device | None,
    description: str,
    make: MakeBackend = make_backend,
    check: Callable[[], None] | None = None,
) -> ProcessGroup:
    """Connects the backends of a group whose ranks have come; closes what was opened when one of them fails."""
    opened: dict[str, BackendBase] = {}
    by_device: dict[str, BackendBase] = {}
    try:
        names = BackendConfig(backend).device_backend_map
        for device_type, backend_name in names.items():
            if backend_name not in opened:
                context = GroupContext(
                    name, rank, ranks, PrefixStore(backend_name, store), timeout.total_seconds(), options, device, check
                )
                opened[backend_name] = make(backend_name, context)
            by_device[device_type] = opened[backend_name]
    except BaseException:
        for each in opened.values():
            each.abort("another backend of the group could not be made")
            each.close(0.0)
        raise
    return ProcessGroup(
        name,
        rank,
        ranks,
        store,
        by_device,
        backend_name=backend,
        names=names,
        timeout_s=timeout.total_seconds(),
        description=description,
        options=options,
        device=device,
    )


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
        ranks: of the world; all by default.
        timeout: limit of making it, and of each operation; 30 minutes by default, 10 for `nccl` alone.
        backend: as in `init_process_group`; that of the default group by default.
        pg_options: for the backend.
        use_local_synchronization: only the members need to call it.
        group_desc: for people.
        device_id: the device that the group is bound to; that of the default group by default.
        sort_ranks: whether the rank in the group follows the rank in the world, and not the order in `ranks`.

    Returns:
        The group. On a rank that is not in it `GroupMember.NON_GROUP_MEMBER` (-100), or None with
        `use_local_synchronization`; it is annotated as a group because every function takes it as one.

    Raises:
        ConfigError: wrong ranks, or no such backend.
        StoreTimeout: naming the ranks that did not come.
        CollectiveMismatch: another rank asked for another group.
    """
    world, parent = current_world(), default_group()
    backend = Backend(backend) if backend else parent.name()
    timeout = default_timeout(backend) if timeout is None else check_timeout(timeout)
    BackendConfig(backend)
    if use_local_synchronization and ranks is not None and parent.rank() not in ranks:
        return cast(ProcessGroup, None)
    members = _members(ranks, parent.size(), sort_ranks)
    name = hashed_name(world, members) if use_local_synchronization else _numbered_name(world)
    if parent.rank() not in members:
        return NON_GROUP_MEMBER
    return make_group(
        world,
        name,
        members,
        backend=backend,
        timeout=timeout,
        options=pg_options,
        device=_bound_device(device_id, parent),
        description=group_desc,
    )


def make_group(
    world: World,
    name: str,
    members: tuple[int, ...],
    *,
    backend: str,
    timeout: timedelta,
    options: object | None,
    device: torch.device | None,
    description: str | None,
    make: MakeBackend = make_backend,
) -> ProcessGroup:
    """Makes a group whose members, and nobody else, call this with one name; `world` gets to know it."""
    if world.store is None:
        raise ConfigError("Default process group has not been initialized, please call init_process_group first.")
    parent = default_group()
    rank = members.index(parent.rank())
    store = PrefixStore(f"group/{name}", world.store)

    def check() -> None:
        for lost, reason in parent.lost_ranks().items():
            if lost in members:
                raise RankLost(f"making group {name!r}", f"rank {lost} cannot come: {reason}", (members.index(lost),))

    shown = f"a group with backend {BackendConfig(backend)}"
    arrive(store, members[rank], members, f"group {name!r}", timeout.total_seconds(), shown, check)
    made = open_group(
        name,
        rank,
        members,
        store,
        backend=backend,
        timeout=timeout,
        options=options,
        device=device,
        description="undefined" if description is None else description,
        make=make,
        check=check,
    )
    world.groups[name] = made
    return made


def _members(ranks: Sequence[int] | None, world_size: int, sort_ranks: bool) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(world_size))
    members = tuple(sorted(ranks) if sort_ranks else ranks)
    if not members:
        raise ConfigError("ranks is empty; a group has at least one rank")
    if len(set(members)) != len(members):
        raise ConfigError(f"ranks list must not contain duplicate entries, got {list(members)}")
    if len(members) > world_size:
        raise ConfigError(
            "the new group's world size should be less or equal to the world size set by init_process_group"
        )
    for rank in members:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {world_size - 1} (world_size={world_size})"
            )
    return members


def _numbered_name(world: World) -> str:
    """Equal on all ranks, because all of them make the same groups in the same order."""
    number = world.num_created
    world.num_created += 1
    return str(number)


def hashed_name(world: World, members: tuple[int, ...]) -> str:
    """Equal on all members, whatever groups each of them is in besides: it counts those of exactly these ranks."""
    number = world.hashed.get(members, 0)
    world.hashed[members] = number + 1
    return hashlib.sha256(f"{members} {number}".encode()).hexdigest()[:40]


def _bound_device(device: torch.device | None, parent: ProcessGroup) -> torch.device | None:
    bound = parent.bound_device_id
    if device is not None and bound is not None and device != bound:
        raise ConfigError(f"Mismatched bound device between new pg and the default pg: {device} and {bound}.")
    return bound if device is None else device


# ---------------------------------------------------------------- several at once


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Cuts a group into groups of `group_size` neighbours; all ranks of the world call it.

    Args:
        group_size: the number of CUDA devices by default.
        group: what is cut; the default group by default.
        timeout, backend, pg_options, group_desc: as in `new_group`.

    Returns:
        This rank's group, and all of them.
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
    ranks = group_or_default(group).ranks
    if len(ranks) < group_size:
        raise ConfigError(f"The arg 'group_size' ({group_size}) must not exceed the world size ({len(ranks)})")
    if len(ranks) % group_size != 0:
        raise ConfigError(f"The world size ({len(ranks)}) must be divisible by 'group_size={group_size}'")
    parts = [list(ranks[begin : begin + group_size]) for begin in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(parts, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Makes groups that have no rank in common; all ranks of the world call it.

    Returns:
        This rank's group (None when it is in none of them), and all of them.
    """
    if ranks_per_subgroup_list is None or len(ranks_per_subgroup_list) == 0:
        raise ConfigError("The arg 'ranks_per_subgroup_list' cannot be empty")
    owner: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
        for rank in ranks:
            if rank in owner:
                raise ConfigError(f"Rank {rank} has appeared in both subgroup {owner[rank]} and {ranks}")
            owner[rank] = ranks
    mine: ProcessGroup | None = None
    made = []
    for ranks in ranks_per_subgroup_list:
        made.append(new_group(ranks, timeout, backend, pg_options, group_desc=group_desc))
        if isinstance(made[-1], ProcessGroup):
            mine = made[-1]
    return cast(ProcessGroup, mine), made
