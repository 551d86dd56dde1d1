"""`grow_group`: adds processes that were started later to the default group."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from rpcdist.collectives._api.objects import broadcast_object_list
from rpcdist.collectives._api.operations import barrier
from rpcdist.collectives._group.bootstrap import agree
from rpcdist.collectives._group.creation import GroupSettings, open_group
from rpcdist.collectives._group.world import World, current_world
from rpcdist.collectives._operations.operation import check_timeout, whole_number
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives._stores.store_base import SignedRecords, Store
from rpcdist.collectives.constants import default_pg_timeout
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError, RankLost, RendezvousError, StoreTimeout, described_error

__all__ = ["grow_group"]

DESCRIPTION = "the default group, grown to {} ranks"


@dataclass(frozen=True, slots=True)
class _Invitation:
    """The answer to a process that waits: its rank in the group that is about to be made."""

    number: int
    rank: int
    world_size: int
    name: str
    backend: str
    timeout_s: float

    @classmethod
    def from_json(cls, text: str) -> _Invitation:
        """The inverse of `json.dumps(asdict(...))`. Raises `ValueError` for invalid text."""
        values = json.loads(text)
        kinds = {"number": int, "rank": int, "world_size": int, "name": str, "backend": str, "timeout_s": float}
        if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != kinds:
            raise ValueError(f"it does not consist of {', '.join(kinds)}")
        invitation = cls(**values)
        if not 0 <= invitation.rank < invitation.world_size or not invitation.timeout_s > 0:
            raise ValueError("its rank is not a rank of the group, or its time limit is invalid")
        return invitation


def grow_group(
    store: Store,
    world_size: int | None = None,
    *,
    timeout: timedelta | None = None,
    device_id: torch.device | None = None,
) -> ProcessGroup:
    """Makes a new default group of the present ranks and of new processes, all of which call it and wait.

    Present ranks keep their numbers; new processes get the next numbers, in the order of their calls. The old groups
    are destroyed when the new group is open. Until then they stay usable, also if this call fails, and the call can be
    repeated. New processes have no state yet: broadcast the model, the optimizer and the step next.

    Args:
        store: the same part of a store on all processes; it must outlive the groups that use it.
        world_size: the new number of ranks; required on present ranks, optional in a new process.
        timeout: how long to wait for the others; by default the group's timeout, and in a new process
            `default_pg_timeout`.
        device_id: this process's device, in a new process; as in `init_process_group`.

    Returns:
        The default group.

    Raises:
        ConfigError: `world_size` is missing, or not larger than the group.
        RendezvousError: this new process could not join in time, or the present ranks want another size.
        StoreTimeout: some ranks did not join; names them. Later calls do not wait for a new process among them.
        RankLost: a rank of the group is gone; call `shrink_group` first.
        AuthenticationFailed: a process without the job's token writes to the store.
    """
    world = current_world()
    part = PrefixStore("grow", store)
    limit = None if timeout is None else check_timeout(timeout)
    old = world.default
    if old is None:
        limit_s = (limit or default_pg_timeout).total_seconds()
        return _join(world, part, world_size, limit_s, device_id)
    if world_size is not None:
        world_size = whole_number(world_size, "world_size")
    if world_size is None or world_size <= old.size():
        raise ConfigError(f"world_size must be more than the {old.size()} present ranks, not {world_size}")
    limit_s = old.timeout_s if limit is None else limit.total_seconds()
    return _grow(world, old, part, world_size, limit_s)


def _grow(world: World, old: ProcessGroup, part: PrefixStore, world_size: int, limit_s: float) -> ProcessGroup:
    """Runs `grow_group` on a present rank."""
    numbers: list[Any] = [_invite(world, old, part, world_size) if old.rank() == 0 else None]
    broadcast_object_list(numbers, 0)
    number: int = numbers[0]

    def check() -> None:
        for lost, reason in old.lost_ranks().items():
            raise RankLost(DESCRIPTION.format(world_size), f"rank {lost} is gone: {reason}", (lost,))

    invitation = _Invitation(number, old.rank(), world_size, old.group_name, old.name(), old.timeout_s)
    own = _agree(invitation, part, limit_s, check)
    group = _open(invitation, own, old.options, old.bound_device_id)
    for registered in reversed(list(world.groups.values())):
        registered.shutdown()
    world.begin(group, own)
    return group


def _invite(world: World, old: ProcessGroup, part: PrefixStore, world_size: int) -> int:
    """Gives ranks to the processes that have waited longest, then to the next that arrive."""
    number = int(part.add("rounds", 1))
    records = SignedRecords(part, world.process.credentials())
    for rank in range(old.size(), world_size):
        ticket = int(part.add("invited", 1))
        while part.check([f"left/{ticket}"]):
            records.get([f"left/{ticket}"])  # raises if a process without the token wrote it
            ticket = int(part.add("invited", 1))
        invitation = _Invitation(number, rank, world_size, old.group_name, old.name(), old.timeout_s)
        records.set(f"ticket/{ticket}", json.dumps(asdict(invitation)))
    return number


def _join(
    world: World, part: PrefixStore, world_size: int | None, limit_s: float, device: torch.device | None
) -> ProcessGroup:
    """Runs `grow_group` in a new process."""
    ticket = int(part.add("waiting", 1))
    records = SignedRecords(part, world.process.credentials())
    try:
        (text,) = records.get([f"ticket/{ticket}"], limit_s)
    except StoreTimeout as exc:
        records.set(f"left/{ticket}", "left")
        raise RendezvousError(
            f"this process could not join within {limit_s:.3g} s: the ranks of the job must call grow_group(store, "
            f"world_size) with {part.address}"
        ) from exc
    try:
        invitation = _Invitation.from_json(text)
    except ValueError as exc:
        raise RendezvousError(
            f"the invitation {part.full_key(f'ticket/{ticket}')!r} in {part.address} is invalid: {exc}. Start all "
            "processes with the same version of rpcdist"
        ) from exc
    if world_size not in (None, invitation.world_size):
        raise RendezvousError(f"the present ranks expect a group of {invitation.world_size} ranks, not of {world_size}")
    own = _agree(invitation, part, limit_s)
    group = _open(invitation, own, None, device)
    world.begin(group, own)
    return group


def _agree(
    invitation: _Invitation, part: PrefixStore, limit_s: float, check: Callable[[], None] | None = None
) -> Store:
    text = DESCRIPTION.format(invitation.world_size)
    store = PrefixStore(f"round/{invitation.number}", part)
    return agree(store, invitation.rank, range(invitation.world_size), text, limit_s, text, fresh=True, check=check)


def _open(invitation: _Invitation, own: Store, options: object | None, device: torch.device | None) -> ProcessGroup:
    limit = timedelta(seconds=invitation.timeout_s)
    settings = GroupSettings(invitation.backend, limit, "default_pg", options, device)
    ranks, part = tuple(range(invitation.world_size)), PrefixStore(f"group/{invitation.name}", own)
    group = open_group(invitation.name, invitation.rank, ranks, part, settings)
    try:
        barrier(group)  # no rank leaves the old group before all ranks have the new one
    except BaseException as exc:
        group.abort(f"it could not be made there: {described_error(exc)}")
        group.shutdown()
        raise
    return group
