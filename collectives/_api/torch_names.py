"""Undocumented and private names of `torch.distributed` that scripts use."""

from __future__ import annotations

import pdb
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, NewType, NoReturn, TypeVar

import torch

from rpcdist.collectives._api.default_group import destroy_process_group
from rpcdist.collectives._api.group_queries import get_global_rank
from rpcdist.collectives._api.operations import all_gather_single, barrier, broadcast, reduce_scatter_single
from rpcdist.collectives._group.creation import GroupSettings, open_group, timeout_of_group
from rpcdist.collectives._group.world import (
    NON_GROUP_MEMBER,
    Group,
    current_world,
    default_group,
    group_or_default,
    member_group,
)
from rpcdist.collectives._operations.operation import ReduceOp
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives.backends import default_backend
from rpcdist.collectives.constants import default_pg_timeout
from rpcdist.collectives.options import GlooOptions
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError
from rpcdist.time_limits import DEBUGGER_LIMIT_S

__all__ = [
    "GroupName", "ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy",
    "_abort_process_group", "_all_gather_base", "_broadcast_coalesced", "_coalescing_manager",
    "_get_all_pg_configs", "_get_default_group", "_get_default_store", "_get_global_rank", "_get_group_size",
    "_get_object_coll_device", "_get_pg_config", "_get_pg_default_device", "_get_process_group_name",
    "_new_process_group_helper", "_pg_group_ranks", "_pg_map", "_pg_names", "_rank_not_in_group",
    "_reduce_scatter_base", "_register_process_group", "_resolve_process_group", "_unregister_process_group",
    "_world", "breakpoint",
]  # fmt: skip

GroupName = NewType("GroupName", str)
"""The type of `ProcessGroup.group_name`."""


class _GlooNames(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroup) and instance.name() in ("gloo", "tcp")

    def __call__(
        cls, store: Store, rank: int, size: int, timeout: timedelta | GlooOptions = default_pg_timeout
    ) -> ProcessGroup:
        limit = timeout._timeout if isinstance(timeout, GlooOptions) else timeout
        settings = GroupSettings("gloo", limit, "made by its class")
        return open_group("ProcessGroupGloo", rank, tuple(range(size)), store, settings)


class ProcessGroupGloo(metaclass=_GlooNames):
    """torch's class: `ProcessGroupGloo(store, rank, size, timeout)` makes a group outside the world, on its own store.

    Groups of the backend `tcp`, which also has the name "gloo", are instances of it. End one with `shutdown()`.
    """

    Options = _Options = GlooOptions

    @staticmethod
    def create_device(hostname: str = "", interface: str = "", lazy_init: bool | None = None) -> str:
        """For `GlooOptions._devices`. The process keeps the address that RPCDIST_HOST or GLOO_SOCKET_IFNAME gives."""
        return hostname or interface

    create_default_device = create_device


def _new_process_group_helper(
    group_size: int, group_rank: int, global_ranks_in_group: Sequence[int], backend: str | None, store: Store,
    group_name: str, backend_options: object | None = None, timeout: timedelta | None = None, *_: object, **__: object,
) -> tuple[ProcessGroup, Store]:  # fmt: skip
    """Makes a group with its own store, independent of the default group, as trainers share with inference engines.

    Returns:
        The group and its part of the store.
    """
    if group_name in current_world().groups:
        raise ConfigError(f"The specified group name {group_name!r} has already been created; pass another name")
    own, name, ranks = PrefixStore(group_name, store), backend or default_backend(), global_ranks_in_group
    settings = GroupSettings(name, timeout_of_group(name, timeout), "of a helper", backend_options)
    group = open_group(group_name, group_rank, tuple(ranks or range(group_size)), own, settings)
    current_world().groups[group_name] = group
    return group, own


class _NcclNames(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__name__ == "ProcessGroupNCCL" and isinstance(instance, ProcessGroup) and instance.name() == "nccl"

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            f"rpcdist does not instantiate torch's class {cls.__name__}; create the group with "
            "init_process_group('nccl') or new_group(backend='nccl') (docs/nccl.md)"
        )

    @property
    def Options(cls) -> NoReturn:
        raise ConfigError(
            f"{cls.__name__}.Options are options of torch's communicator; pg_options of rpcdist are "
            "rpcdist.collectives.nccl.NcclOptions (docs/nccl.md)"
        )


class ProcessGroupNCCL(metaclass=_NcclNames):
    """torch's class, for `isinstance`: groups of the backend `nccl` are instances. It cannot be instantiated."""


class ProcessGroupNCCL2(metaclass=_NcclNames):
    """torch's class (2.14), for `isinstance`: no group is an instance of it."""


class ProcessGroupNCCLLazy(metaclass=_NcclNames):
    """torch's class (2.14), for `isinstance`: no group is an instance of it."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = DEBUGGER_LIMIT_S) -> None:
    """Starts the debugger on one rank, in the caller's frame; the others wait until it continues. All ranks call it.

    Args:
        rank: the rank in the world that stops.
        skip: how many calls from this line to ignore first.
        timeout_s: the new limit of operations of all groups, so that none times out during debugging; None leaves the
            limits unchanged.
    """
    caller = sys._getframe(1)
    group = default_group()
    if group.next_number(f"breakpoint at {caller.f_code.co_filename}:{caller.f_lineno}") <= skip:
        return
    if timeout_s is not None:
        for known in current_world().groups.values():
            known.set_timeout(timedelta(seconds=timeout_s))
    if group.rank() == rank:
        print(f"rank {rank} stops here; the other ranks wait for it", file=sys.stderr)
        _Debugger().set_trace(caller)
    barrier()


class _Debugger(pdb.Pdb):
    """A debugger for processes whose `sys.stdin` is not the terminal, such as those of `multiprocessing`."""

    def interaction(self, *args: object, **kwargs: object) -> None:
        before = sys.stdin
        try:
            with open("/dev/stdin") as sys.stdin:
                super().interaction(*args, **kwargs)  # type: ignore[arg-type]  # its arguments differ between versions
        finally:
            sys.stdin = before


class _CoalescedWorks:
    """The works that `_coalescing_manager` yields."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None) -> None:
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Waits for the added operations; those without `async_op` are already done."""
        for work in self.works:
            work.wait()


@contextmanager
def _coalescing_manager(
    group: Group = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[_CoalescedWorks]:
    """Runs each operation when it is called, so it coalesces nothing; for scripts written for torch.

    Small operations are cheap with rpcdist; `all_reduce_coalesced` joins several into one.
    """
    member_group(group, "_coalescing_manager")
    yield _CoalescedWorks()


def _all_gather_base(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    _renamed("_all_gather_base", "all_gather_into_tensor")
    return all_gather_single(output_tensor, input_tensor, group, async_op)


def _reduce_scatter_base(
    output: torch.Tensor, input: torch.Tensor, op: object = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    _renamed("_reduce_scatter_base", "reduce_scatter_tensor")
    return reduce_scatter_single(output, input, op, group, async_op)


def _renamed(name: str, instead: str) -> None:
    warnings.warn(f"`{name}` is deprecated; please use `{instead}`", FutureWarning, stacklevel=3)


T = TypeVar("T")


_get_default_group = default_group
_get_global_rank = get_global_rank


def _get_default_store() -> Store:
    default_group()
    store = current_world().store
    assert store is not None  # it is set with the group
    return store


def _get_group_size(group: Group) -> int:
    return group_or_default(group).size()


def _rank_not_in_group(group: Group) -> bool:
    return group == NON_GROUP_MEMBER


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Returns the group's name; "None" after it is destroyed, as in torch."""
    return _pg_names.get(pg, "None")


def _get_pg_config(group: ProcessGroup | None = None) -> dict[str, object]:
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
    """Aborts the operations of a group and frees it; without a group or with the default one, those of all groups."""
    if group == NON_GROUP_MEMBER:
        return
    target = group_or_default(group)
    for each in [*_pg_map] if target is current_world().default else [target]:
        each.abort()
    destroy_process_group(target)


def _resolve_process_group(group_name: str) -> ProcessGroup:
    """Returns the group with that name. Raises ConfigError if it does not exist."""
    named = current_world().groups | current_world().registered
    group = named.get(group_name)
    if group is None:
        known = ", ".join(map(repr, named)) or "none"
        raise ConfigError(f"Could not resolve the process group registered under the name {group_name!r}, of {known}")
    return group


def _register_process_group(group_name: str, process_group: ProcessGroup) -> None:
    """Makes `_resolve_process_group` also find a group by this name, until `destroy_process_group()`.

    Raises:
        ConfigError: another group has the name.
    """
    named = current_world().groups | current_world().registered
    if named.get(group_name, process_group) is not process_group:
        raise ConfigError(f"{named[group_name]!r} is registered under the name {group_name!r}; choose another name")
    current_world().registered[group_name] = process_group


def _unregister_process_group(group_name: str) -> None:
    current_world().registered.pop(group_name, None)


def _get_pg_default_device(group: Group = None) -> torch.device:
    """Returns the device for tensors of this group: the CPU, if the group has a backend for it."""
    return torch.device(group_or_default(group).object_device)


def _get_object_coll_device(group: Group = None) -> str:
    return group_or_default(group).object_device


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], buffer_size: int, src: int = 0
) -> None:
    """Copies the tensors of one rank of the group to the others, all at once, without packing them."""
    works = [broadcast(each.detach(), group=process_group, group_src=src, async_op=True) for each in tensors]
    for work in works:
        if work is not None:
            work.wait()


class _OfGroups(Mapping[ProcessGroup, T]):
    """Maps each group of this process to a value, like a dict of torch, but reads the groups that exist now."""

    def __init__(self, value_of: Callable[[ProcessGroup], T]) -> None:
        self._value_of = value_of

    def __getitem__(self, group: ProcessGroup) -> T:
        if group not in tuple(self):
            raise KeyError(group)
        return self._value_of(group)

    def __setitem__(self, group: ProcessGroup, value: T) -> None:
        """Accepts the group's own value, from programs that register their group; raises ConfigError for others."""
        if self[group] != value:
            raise ConfigError(f"{group} has {self[group]!r}, not {value!r}; new_group makes groups of other ranks")

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
