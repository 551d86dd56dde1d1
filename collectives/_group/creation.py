"""How groups are made: the ranks wait for each other, the backends connect, then the world registers the group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final

import torch

from rpcdist.at_exit import ending_error, register_at_exit
from rpcdist.collectives._group.backend_contract import GroupBackend, GroupContext
from rpcdist.collectives._group.bootstrap import agree
from rpcdist.collectives._group.state import list_ranks
from rpcdist.collectives._group.world import World, current_world, default_group
from rpcdist.collectives._operations.operation import check_timeout
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives.backends import Backend, BackendConfig, make_backend
from rpcdist.collectives.constants import default_pg_nccl_timeout, default_pg_timeout
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, RankLost, RpcdistError, StoreTimeout, TransportError, raised_as
from rpcdist.freed_memory import keep_freed_memory
from rpcdist.own_shortage import names_shortage
from rpcdist.time_limits import MIN_WAIT_S, STORE_GRACE_S
from rpcdist.transport.shared_memory import SegmentError

logger = logging.getLogger(__name__)

MakeBackend = Callable[[Backend | str, GroupContext], GroupBackend]
"""Constructs the backend with a name; blocks until all ranks of the group can be reached."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a group, which its caller chooses, equal on all ranks.

    Attributes:
        backend: as the caller passed it, e.g. "cpu:gloo,cuda:nccl".
        timeout: limit of each operation.
        description: the purpose of the group, for people.
        options, device, outlives_ranks: see `GroupContext`.
    """

    backend: str
    timeout: timedelta
    description: str
    options: object | None = None
    device: torch.device | None = None
    outlives_ranks: bool = False

    @classmethod
    def like(cls, group: ProcessGroup, options: object | None) -> GroupSettings:
        """Returns the settings of a group, with its options if the caller has none."""
        options = group._options if options is None else options
        return cls(group.name(), group.timeout, group.group_desc, options, group.bound_device_id)


def timeout_of_group(backend: str, timeout: timedelta | None) -> timedelta:
    """Returns the caller's timeout, or torch's default, which is shorter for `nccl` alone."""
    if timeout is None:
        return default_pg_nccl_timeout if backend == Backend.NCCL else default_pg_timeout
    if check_timeout(timeout) < timedelta(0):
        raise ConfigError(f"the timeout of a group must not be negative, but is {timeout}")
    return timeout


def open_group(
    name: str,
    rank: int,
    ranks: tuple[int, ...],
    store: Store,
    settings: GroupSettings,
    make: MakeBackend = make_backend,
    check: Callable[[], None] | None = None,
) -> ProcessGroup:
    """Connects the backends of a group whose ranks have joined; if one backend fails, closes the others."""
    keep_freed_memory()
    opened: dict[str, GroupBackend] = {}
    by_device: dict[str, GroupBackend] = {}
    process, limit_s = current_world().process, settings.timeout.total_seconds()
    context = GroupContext(
        name, rank, ranks, store, limit_s, settings.options, settings.device, check, process, settings.outlives_ranks
    )
    try:
        names = BackendConfig(settings.backend).device_backend_map
        for device_type, backend_name in names.items():
            if backend_name not in opened:
                making = f"making group {name!r}"
                with raised_as(TransportError, f"{making} failed", SegmentError), names_shortage(making):
                    own = replace(context, store=PrefixStore(backend_name, store))
                    opened[backend_name] = make(backend_name, own)
            by_device[device_type] = opened[backend_name]
    except BaseException:
        for opened_backend in opened.values():
            opened_backend.abort("another backend of the group could not be made")
            opened_backend.close(0.0)
        raise
    return ProcessGroup(
        store,
        rank,
        ranks,
        name=name,
        backends=by_device,
        split=split_off,
        backend_name=settings.backend,
        names=names,
        timeout_s=limit_s,
        description=settings.description,
        options=settings.options,
        device=settings.device,
    )


def make_group(
    world: World, name: str, members: tuple[int, ...], settings: GroupSettings, make: MakeBackend = make_backend
) -> ProcessGroup:
    """Creates a group and registers it in `world`; all members call this with the same name, and no other ranks."""
    if world.store is None:
        raise ConfigError("Default process group has not been initialized, please call init_process_group first.")
    parent = default_group()
    rank = members.index(parent.rank())

    def check() -> None:
        for lost, reason in parent.lost_ranks().items():
            if lost in members:
                raise RankLost(f"making group {name!r}", f"rank {lost} cannot come: {reason}", (members.index(lost),))

    part, title = PrefixStore(f"group/{name}", world.store), f"group {name!r}"
    described, limit_s = f"a group with backend {BackendConfig(settings.backend)}", settings.timeout.total_seconds()
    own = agree(part, members[rank], members, title, limit_s, described, fresh=True, check=check)
    group = open_group(name, rank, members, own, settings, make, check)
    world.groups[name] = group
    if len(members) < parent.size():
        part.set(_MADE.format(parent.rank()), b"1")  # see `keep_store_for`
    return group


_MADE: Final = "made/{}"
"""The key of a rank that has made the group."""


def keep_store_for(world: World, name: str, members: tuple[int, ...]) -> None:
    """If this process serves the store, lets the members of another group make it before this process ends.

    In torch, `new_group` waits on all ranks. Here only the members wait, but they need the store, and the program of
    the rank that serves it may end at once.
    """
    if world.store is not None and world.store.is_served_here:
        if not world.groups_of_others:
            register_at_exit(partial(_until_made, world.groups_of_others))
        world.groups_of_others.append((PrefixStore(f"group/{name}", world.store), name, members))


def _until_made(groups: Sequence[tuple[Store, str, tuple[int, ...]]]) -> None:
    if ending_error() is not None:  # the members shall not make a group in which to wait for this rank
        return
    deadline = Deadline.after(STORE_GRACE_S)  # for all groups together
    for store, name, members in groups:
        try:
            store.wait([_MADE.format(rank) for rank in members], max(MIN_WAIT_S, deadline.remaining_s()))
        except StoreTimeout:
            missing = [rank for rank in members if not store.check([_MADE.format(rank)])]
            logger.warning(
                "%s did not make group %r within %g s after the end of the program of this rank, which serves the "
                "store; they cannot make it any more",
                list_ranks(missing), name, STORE_GRACE_S,
            )  # fmt: skip
        except RpcdistError as exc:
            logger.debug("the store was closed before its process ended: %s", exc)


def split_off(
    parent: ProcessGroup,
    ranks: Sequence[int],
    *,
    timeout: timedelta | None = None,
    options: object | None = None,
    name: str | None = None,
    description: str | None = None,
    backend: str | None = None,
    make: MakeBackend = make_backend,
) -> ProcessGroup | None:
    """Makes a group of some ranks of `parent`, which alone take part; returns None on the other ranks."""
    check_split(ranks, parent)
    if parent.rank() not in ranks:
        return None
    world = current_world()
    members = tuple(parent.world_rank(rank) for rank in sorted(ranks))
    backend = parent.name() if backend is None else Backend(backend)
    limit, name = timeout_of_group(backend, timeout), world.hashed_name(members) if name is None else name
    description = f"{parent.group_desc}:split" if description is None else description
    like_parent = GroupSettings.like(parent, options)
    settings = replace(like_parent, backend=backend, timeout=limit, description=description)
    return make_group(world, name, members, settings, make)


def check_split(part: Sequence[int], parent: ProcessGroup) -> None:
    if len(part) == 0:
        raise ConfigError("the split group cannot be empty")
    if len(part) > parent.size():
        raise ConfigError("the split group's size should be less or equal to the world_size set by init_process_group")
    if len(set(part)) != len(part):
        raise ConfigError("the split group cannot have duplicate ranks")
    for rank in part:
        parent.world_rank(rank)
