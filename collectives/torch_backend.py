"""torch on our collectives: after importing this module, `torch.distributed.init_process_group("rpcdist")` works.

    import torch.distributed as dist
    import rpcdist.collectives.torch_backend

    dist.init_process_group("rpcdist")

The functions of `torch.distributed`, its DistributedDataParallel and its FSDP then use our groups. CPU tensors go
through the backend `tcp`; CUDA tensors through `nccl` if it is usable, otherwise through CPU memory. The import also
replaces `torch.distributed.monitored_barrier`, which refuses our groups, and a method of torch's DDP; both work as
before with other groups.
"""

from __future__ import annotations

import _thread
import hashlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as torch_distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rpcdist.collectives._group.bootstrap import agree
from rpcdist.collectives._group.creation import GroupSettings, check_split, open_group, timeout_of_group
from rpcdist.collectives._operations.operation import barrier_timeout
from rpcdist.collectives._stores.derived_stores import PrefixStore, TorchStoreAdapter
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives._torch_side import TorchWork, hide_from_compiler, keep_what_torch_holds, serve_functional_ops
from rpcdist.collectives.backends import default_backend
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.collectives.rendezvous import job_attempt
from rpcdist.errors import ConfigError

__all__ = ["NAME", "TorchProcessGroup", "TorchWork", "as_torch_group", "register", "torch_group"]

if not torch_distributed.is_available():
    raise ConfigError("this torch was built without torch.distributed; call rpcdist.collectives directly")

NAME: Final = "rpcdist"
"""The value of `backend` for torch's `init_process_group` and `new_group`."""

_DEVICES: Final = ["cpu", "cuda"]
_LENT: Final = "rpcdist group "  # the first part of the names of groups that `as_torch_group` makes

_Split = Callable[..., Iterator[tuple[object, ...]]]

# torch's stubs describe overloads of its C++ classes, which no single Python method can have.
_ProcessGroup: Any = torch._C._distributed_c10d.ProcessGroup


def _forward(name: str, split: _Split | None = None) -> Callable[..., TorchWork]:
    """Makes a method that runs our group's method `name` with its arguments, or once for each part from `split`."""

    def method(self: TorchProcessGroup, *arguments: Any, **named: Any) -> TorchWork:
        run = getattr(self.group, name)
        if split is None:
            return TorchWork(run(*arguments, **named))
        return TorchWork(*(run(*part) for part in split(*arguments, **named)))

    method.__name__ = name
    return method


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: TorchProcessGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self.group, name)(*arguments, **named)

    method.__name__ = name
    return method


def _for_each_dtype(tensors: Sequence[torch.Tensor], opts: object = None) -> Iterator[tuple[object, ...]]:
    by_kind: dict[tuple[torch.dtype, str], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device.type), []).append(tensor)
    return ((same, opts) for same in by_kind.values())


def _for_each_input(
    output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: object = None
) -> Iterator[tuple[object, ...]]:
    """`output_lists[i][k]` gets `input_list[k]` of rank i."""
    return (([outputs[index] for outputs in output_lists], given, opts) for index, given in enumerate(input_list))


def _for_each_pair(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
) -> Iterator[tuple[object, ...]]:
    return ((output, given, opts) for output, given in zip(outputs, inputs, strict=True))


class TorchProcessGroup(_ProcessGroup):  # type: ignore[misc]  # see _ProcessGroup
    """A group of rpcdist as a group of torch, with torch's lower-case methods.

    Args:
        store: a store of torch, for this group alone.
        group: the group of rpcdist, which runs the operations.
        name: torch's name for the group, by which torch's functional collectives find it.
    """

    # torch's C++ code and Python functions read these; the latter expect one backend for each device.
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_window = False
    use_pg_for_symm_mem_rendezvous = False

    def __init__(self, store: torch_distributed.Store, group: ProcessGroup, name: str) -> None:
        super().__init__(group.rank(), group.size())  # this overload lets C++ call the methods that we override
        self._store = store
        self._group = group
        self._names = [name, ""]  # and a description
        self._parts: Counter[tuple[int, ...]] = Counter()
        _open_groups.difference_update([known for known in list(_open_groups) if not known.group.device_types])
        _open_groups.add(self)

    def __repr__(self) -> str:
        return f"<TorchProcessGroup of {self._group!r}>"

    @property
    def group(self) -> ProcessGroup:
        """The group of rpcdist, which runs the operations."""
        return self._group

    # ------------------------------------------------------------ who it is

    def get_group_store(self) -> torch_distributed.Store:
        return self._store

    def name(self) -> str:
        return NAME

    # torch's C++ code calls these four methods; its Python code reads the two properties.

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupDesc(self) -> str:
        return self._names[1]

    def setGroupDesc(self, description: str) -> None:
        self._names[1] = description

    group_name = property(getGroupName)
    _set_group_name = setGroupName
    group_desc = property(getGroupDesc)
    _set_group_desc = setGroupDesc

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = getBackendName

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._group.device_types]

    def _get_backend(self, device: torch.device) -> TorchProcessGroup:
        self._group.binding(torch.device(device).type)  # raises for a device that the group does not carry
        return self

    get_backend = _get_backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._group.monitored_barrier(timeout, wait_all_ranks)

    # ------------------------------------------------------------ operations on many tensors; for the others see below

    allreduce_coalesced = _forward("allreduce_coalesced", _for_each_dtype)
    allgather_coalesced = _forward("allgather", _for_each_input)
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _forward("all_gather_single", _for_each_pair)
    reduce_scatter_single_coalesced = _forward("reduce_scatter_single", _for_each_pair)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    supports_abort_hooks = property(lambda self: self.group.supports_abort_hooks)

    # ------------------------------------------------------------ groups from this one, which C++ would make of nothing

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object | None = None,
    ) -> TorchProcessGroup | None:
        """Makes a group of some ranks of this one, which alone call it. Ends like a group of `torch_group`."""
        check_split(ranks, self._group)
        if self.rank() not in ranks:
            return None
        members = tuple(sorted(ranks))
        self._parts[members] += 1
        name = group_name or f"{self.getGroupName()}:split:{'_'.join(map(str, members))}"
        store = torch_distributed.PrefixStore(f"{name}/{self._parts[members]}", self._store)
        limit = timedelta(seconds=self._group.timeout_s) if timeout is None else timeout
        part = torch_group(store, members.index(self.rank()), len(members), timeout=limit)
        part._names = [name, group_desc or name]
        return part

    def merge_remote_group(
        self,
        store: torch_distributed.Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> TorchProcessGroup:
        """Makes a group of all processes that join at `store`, like `torch_group`, with ranks in order of arrival."""
        name = group_name or f"{self.getGroupName()}:merge"
        merged = torch_group(store, store.add("mergeGroupRank", 1) - 1, size, timeout=timeout)
        merged._names = [name, group_desc or name]
        return merged

    # ------------------------------------------------------------ the end

    def abort(self) -> None:
        _open_groups.discard(self)
        self._group.abort()

    def shutdown(self) -> None:
        _open_groups.discard(self)
        self._group.shutdown()


for _name in (
    "allreduce", "reduce", "broadcast", "allgather", "all_gather_single", "_allgather_base", "gather", "gather_single",
    "gather_into_tensor", "scatter", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "alltoall",
    "all_to_all_single", "alltoall_base", "send", "recv", "recv_anysource", "barrier",
):  # fmt: skip
    setattr(TorchProcessGroup, _name, _forward(_name))

for _name in (
    "register_pre_hook", "unregister_pre_hook", "register_post_hook", "unregister_post_hook", "register_abort_hook",
    "unregister_abort_hook", "get_reconfigure_handle", "reconfigure", "new_window",
):  # fmt: skip
    setattr(TorchProcessGroup, _name, _delegate(_name))

_open_groups: Final[set[TorchProcessGroup]] = set()
"""The open groups, since torch's C++ code that holds a group does not hold its Python object; see [Note: halves]."""


def _make_group(
    given: torch._C._distributed_c10d._DistributedBackendOptions, options: object | None = None
) -> TorchProcessGroup:
    ranks = tuple(given.global_ranks_in_group) or tuple(range(given.group_size))
    # torch gives groups of one name the same keys, also in the next initialisation and start, and if the members of two
    # parents make groups at the same time.
    members = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
    store = PrefixStore(f"attempt_{job_attempt()}/{members}", TorchStoreAdapter(given.store))
    group = _open(f"torch {given.group_id}", given.group_rank, ranks, store, given.timeout, options)
    return TorchProcessGroup(given.store, group, str(given.group_id))


def torch_group(
    store: torch_distributed.Store, rank: int, size: int, *, timeout: timedelta | None = None
) -> TorchProcessGroup:
    """Makes a group of rpcdist as a group of torch, for libraries that make groups from a store.

    All ranks call it, and it blocks until all have. torch's default group need not exist, and the group is not
    registered anywhere: end it with `shutdown()`, or with `abort()` if ranks may hang. A group without references from
    Python code ends as by `shutdown()`, on a separate thread, because libraries drop torch's groups in this way.

    Args:
        store: torch's, for this group alone: the group that replaces it needs a `PrefixStore` with another prefix.
        rank: the rank of this process, from 0.
        size: the number of ranks.
        timeout: the limit until all ranks have called it, and of each operation; torch's default of 30 minutes.

    Raises:
        ConfigError: the rank, the size, the timeout or the store is wrong.
        RankLost, DistError: a rank did not join.
    """
    limit = timeout_of_group(default_backend(), timeout)
    group = _open("torch_group", rank, tuple(range(size)), TorchStoreAdapter(store), limit, None)
    made = TorchProcessGroup(store, group, "")
    _open_groups.discard(made)  # a library that passes it to C++ code of torch, such as DDP, keeps it as well
    weakref.finalize(made, _end_dropped, os.getpid(), group).atexit = False
    return made


def _end_dropped(pid: int, group: ProcessGroup) -> None:
    """Runs in a finalizer, which may interrupt a thread that holds a lock, so it must not use `threading`."""
    if pid == os.getpid():
        _thread.start_new_thread(group.shutdown, ())


def _open(
    name: str, rank: int, ranks: tuple[int, ...], store: Store, timeout: timedelta, options: object | None
) -> ProcessGroup:
    if not 0 <= rank < len(ranks):
        raise ConfigError(f"{name} got rank {rank} of {len(ranks)}: ranks count from 0, and the size is their number")
    backend, limit_s = default_backend(), timeout.total_seconds()
    own = agree(store, ranks[rank], ranks, f"group {name!r}", limit_s, f"backend {backend}", fresh=False)
    return open_group(name, rank, ranks, own, GroupSettings(backend, timeout, "of torch.distributed", options))


def _monitored_barrier(
    group: torch_distributed.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """See `torch.distributed.monitored_barrier`, which refuses every backend except Gloo."""
    own = torch_distributed.group.WORLD if group is None else group
    if isinstance(own, TorchProcessGroup):
        own.monitored_barrier(barrier_timeout(timeout), wait_all_ranks)
    else:
        _torch_monitored_barrier(group, timeout, wait_all_ranks)


_torch_monitored_barrier: Final = torch_distributed.distributed_c10d.monitored_barrier


def _register_builtin_comm_hook(self: DistributedDataParallel, comm_hook_type: Any) -> None:
    """See torch's DDP. Its C++ hook FP16_COMPRESS needs a future that only C++ can make; this uses the Python hook."""
    if isinstance(self.process_group, TorchProcessGroup) and comm_hook_type.name == "FP16_COMPRESS":
        self.register_comm_hook(self.process_group, fp16_compress_hook)
        assert self.logger is not None
        self.logger._set_comm_hook_name(str(comm_hook_type))
    else:
        _torch_builtin_comm_hook(self, comm_hook_type)  # type: ignore[no-untyped-call]


_torch_builtin_comm_hook: Final = DistributedDataParallel._register_builtin_comm_hook


def as_torch_group(group: ProcessGroup) -> TorchProcessGroup:
    """Returns a group of rpcdist for functions of `torch.distributed` that take a group, such as communication hooks.

    torch's default group need not exist. Destroy the group with rpcdist, not with torch.
    """
    world = torch_distributed.distributed_c10d._world
    tables: tuple[Any, ...] = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config)
    for known in [known for known in world.pg_map if isinstance(known, TorchProcessGroup)]:
        if known.group is group:
            return known
        if not known.group.device_types and world.pg_names.get(known, "").startswith(_LENT):
            for table in tables:  # rpcdist destroyed its group, which torch does not know
                table.pop(known, None)
    name = f"{_LENT}{group.group_name}"
    store = torch_distributed.HashStore()  # torch requires one, but does not use it
    made = TorchProcessGroup(store, group, name)
    ranks = {world_rank: rank for rank, world_rank in enumerate(group.ranks)}
    devices = ",".join(f"{device}:{NAME}" for device in _DEVICES)
    for table, entry in zip(tables, ((NAME, store), name, ranks, devices), strict=True):
        table[made] = entry
    return made


def register() -> None:
    """Registers the name with torch, as importing this module does. Idempotent."""
    torch_distributed.Backend.register_backend(NAME, _make_group, extended_api=True, devices=_DEVICES)
    hide_from_compiler(TorchProcessGroup, TorchWork)
    keep_what_torch_holds()
    serve_functional_ops(TorchProcessGroup, _DEVICES)
    # Since 2.15 torch attaches its recorder to all backends except these; it needs a C++ backend, which ours lacks.
    exempt: set[str] = getattr(torch_distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    exempt.add(NAME)
    for module in (torch_distributed, torch_distributed.distributed_c10d):
        module.monitored_barrier = _monitored_barrier  # type: ignore[attr-defined]  # the stub of a module has no names
    DistributedDataParallel._register_builtin_comm_hook = _register_builtin_comm_hook  # type: ignore[method-assign]


register()
