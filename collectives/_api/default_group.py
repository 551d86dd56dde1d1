"""`init_process_group` and `destroy_process_group`: how the default group is made and freed."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as torch_distributed

from rpcdist._counters import metrics_are_wanted
from rpcdist._launch.placement import launcher_variable
from rpcdist._upper_layers import load
from rpcdist.collectives._group.bootstrap import DEFAULT_GROUP, agree, wait_for_keys
from rpcdist.collectives._group.creation import GroupSettings, open_group, timeout_of_group
from rpcdist.collectives._group.state import LEFT, list_ranks
from rpcdist.collectives._group.world import (
    MPI_ADDRESS,
    NON_GROUP_MEMBER,
    Group,
    StoreAndRank,
    World,
    current_world,
    default_group,
)
from rpcdist.collectives._operations.operation import whole_number
from rpcdist.collectives._stores.derived_stores import PrefixStore, TorchStoreAdapter
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives.backends import Backend, BackendConfig, default_backend
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.collectives.rendezvous import job_attempt
from rpcdist.errors import (
    ConfigError,
    DistNetworkError,
    RankLost,
    RendezvousError,
    RpcdistError,
    StoreTimeout,
    described_error,
    text_of,
)

__all__ = ["close_stores", "destroy_process_group", "get_node_local_rank", "init_process_group"]

logger = logging.getLogger(__name__)

DEFAULT_NAME = "0"  # torch's; the other groups have the next numbers


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | torch_distributed.Store | None = None,
    group_name: str = "",
    pg_options: object | None = None,
    device_id: torch.device | int | None = None,
    _ranks: Sequence[int] | None = None,
    enable_reconfigure: bool = False,
) -> None:
    """Makes the default group, of all processes of the job; blocks until all of them have joined.

    Without arguments it reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as `torchrun` sets them. `init_rpc` may
    use the same host and port.

    Args:
        backend: "tcp" (also "gloo"), "nccl", "mpi", a registered name, or one per device type, e.g.
            "cpu:tcp,cuda:nccl". The default is the backend for `device_id`'s type; without a `device_id`,
            "cpu:tcp,cuda:nccl" on a machine with a GPU and CuPy, otherwise "tcp".
        init_method: `env://` (the default), `tcp://host:port` or `file:///path`; see `rendezvous`. With the backend
            "mpi" and neither RANK nor WORLD_SIZE in the environment, the default is to ask MPI.
        timeout: limit of making the group, and of each operation; 30 minutes by default, 10 for `nccl` alone.
        world_size: number of processes; required with `store`.
        rank: rank of this process; required with `store`.
        store: the store in which the ranks find each other, of this package or torch; replaces `init_method`.
        group_name: accepted for compatibility with torch and ignored.
        pg_options: options of the backend.
        device_id: the only device that this process uses.
        _ranks: accepted for compatibility with torch and ignored.
        enable_reconfigure: not supported; see `ProcessGroup.reconfigure`.

    Raises:
        ConfigError: a default group exists already, or an argument is wrong or missing.
        StoreTimeout: some ranks did not join in time; names them.
        ConnectFailed: the coordinator did not answer in time.
        CollectiveMismatch: another rank passed another backend or world size.
    """
    with current_world().beginning() as world:
        rank, world_size = whole_number(rank, "rank"), whole_number(world_size, "world_size")
        _check_rendezvous(init_method, store, rank, world_size)
        if enable_reconfigure:
            raise ConfigError(
                "enable_reconfigure is not supported: no backend of rpcdist can change a group's ranks. Leave it out, "
                "and call grow_group or shrink_group when ranks come or go"
            )
        device = _device(device_id)
        name = Backend(_backend_name(backend, device))
        config = BackendConfig(name)
        timeout = timeout_of_group(name, timeout)
        shared, rank, world_size = _open_store(world, name, init_method, store, rank, world_size, timeout)
        if world_size < 1:  # a store can be opened without a world size, but a group cannot
            raise ConfigError(
                f"the world size must be at least 1, but is {world_size}: check world_size, or WORLD_SIZE"
            )
        timeout_s = timeout.total_seconds()
        described = f"the default group of {world_size} ranks with backend {config}"
        ranks = tuple(range(world_size))
        base = PrefixStore(f"default_pg/{job_attempt()}", shared)
        default: ProcessGroup | None = None
        try:
            own = agree(base, rank, ranks, DEFAULT_GROUP, timeout_s, described, fresh=False)
            settings = GroupSettings(name, timeout, "default_pg", pg_options, device)
            default = open_group(DEFAULT_NAME, rank, ranks, PrefixStore(f"group/{DEFAULT_NAME}", own), settings)
            world.begin(default, own)
            _until_all_have_it(own, default, timeout_s)
        except BaseException as exc:
            if default is not None:
                world.end()
                default.abort(f"it could not be made there: {described_error(exc)}")
                default.shutdown()
            if isinstance(exc, RpcdistError):
                shared.note_failure(text_of(exc))
            raise
        shared.note_failure("")  # an earlier attempt may have failed
        if metrics_are_wanted():
            load("metrics")()


def _until_all_have_it(own: Store, default: ProcessGroup, timeout_s: float) -> None:
    """Waits until the default group is set on all ranks, so that code which one rank runs on another, such as a call by
    RPC, finds the group there."""

    def check() -> None:
        for lost, reason in default.lost_ranks().items():
            if reason != LEFT:  # a rank that has left had the group
                raise RankLost("making the default group", f"it is not set on rank {lost}: {reason}", (lost,))

    try:
        if any(backend.meet(timeout_s) for backend in default._distinct_backends()):
            return
    except RendezvousError as exc:
        raise StoreTimeout(f"Timed out making the default group: it is not set on all ranks. {exc}") from exc
    rank, world_size = default.rank(), default.size()
    if rank != 0:
        own.set(f"set/{rank}", b"1")
        try:
            wait_for_keys(own, ["all set"], timeout_s, check)
        except DistNetworkError as exc:  # rank 0 has ended: the group's operations will tell
            logger.debug("the store was lost at the end of init_process_group: %s", exc)
        return
    try:
        wait_for_keys(own, [f"set/{other}" for other in range(1, world_size)], timeout_s, check)
    except StoreTimeout as exc:
        missing = [other for other in range(1, world_size) if not own.check([f"set/{other}"])]
        raise StoreTimeout(
            f"Timed out making the default group: it is not set on {list_ranks(missing)} after {timeout_s:g} s. "
            "Check those processes, or pass a longer timeout."
        ) from exc
    own.set("all set", b"1")


def destroy_process_group(group: Group = None) -> None:
    """Waits for the group's operations, up to its timeout, and frees it; without a group, all groups.

    Raises:
        ConfigError: this process has no such group.
    """
    if group == NON_GROUP_MEMBER:
        return
    world = current_world()
    target = default_group() if group is None else group
    if not isinstance(target, ProcessGroup) or world.groups.get(target.group_name) is not target:
        raise ConfigError("Invalid process group specified")
    if target is not world.default:
        del world.groups[target.group_name]
        target.shutdown()
        return
    try:
        for registered in reversed(list(world.groups.values())):
            registered.shutdown()
    finally:
        world.end()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Returns this process's rank on its machine, from LOCAL_RANK or the engine, otherwise `fallback_rank`.

    Raises:
        ConfigError: all of them are missing.
    """
    if local := launcher_variable("LOCAL_RANK"):
        return int(local)
    if fallback_rank is not None:
        return int(fallback_rank)
    raise ConfigError(
        "LOCAL_RANK is not in the environment. Consider passing fallback_rank to allow `get_node_local_rank` to work, "
        "assuming you are not running in a multi-device context and want the code to run locally instead."
    )


# ---------------------------------------------------------------- arguments


def _check_rendezvous(
    init_method: str | None, store: Store | torch_distributed.Store | None, rank: int, world_size: int
) -> None:
    if store is None:
        return
    if init_method is not None:
        raise ConfigError("Cannot specify both init_method and store.")
    if not isinstance(store, Store | torch_distributed.Store):
        raise TypeError(f"`store` must be a store of this package or of torch, not {store!r}")
    if world_size <= 0:
        raise ConfigError("world_size must be positive if using store")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be non-negative and below the world size if using store; it is {rank}")


def _device(device_id: torch.device | int | None) -> torch.device | None:
    if device_id is None:
        return None
    if isinstance(device_id, int):
        if not torch.cuda.is_available():
            raise ConfigError("device_id is an int, but this machine has no CUDA device; leave it out or pass a device")
        device_id = torch.device("cuda", device_id)
    if device_id.type == "cpu":
        return None
    if device_id.index is None:
        raise ConfigError(f"Please use a device_id with index, not {device_id}.")
    if device_id.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"device_id {device_id} does not match the accelerators of this machine")
    if device_id.index >= torch.cuda.device_count():
        raise ConfigError(f"device_id {device_id} is out of range: the machine has {torch.cuda.device_count()} devices")
    return device_id


def _backend_name(backend: str | None, device: torch.device | None) -> str:
    if backend is not None and str(backend) != Backend.UNDEFINED:
        return backend
    if device is not None and device.type in Backend.default_device_backend_map:
        return Backend.default_device_backend_map[device.type]
    return default_backend()


# ---------------------------------------------------------------- the store


def _open_store(
    world: World,
    name: str,
    init_method: str | None,
    store: Store | torch_distributed.Store | None,
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> StoreAndRank:
    if store is not None:
        return (store if isinstance(store, Store) else TorchStoreAdapter(store)), rank, world_size
    if name == Backend.MPI and init_method is None and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return world.open_store(MPI_ADDRESS, -1, -1, timeout)
    return world.open_store(init_method or "env://", rank, world_size, timeout)


def close_stores() -> None:
    """Closes the store that `init_process_group` opened, after the default group is destroyed. Idempotent, bounded.

    Raises:
        ConfigError: the default group still exists.
    """
    world = current_world()
    if world.default is not None:
        raise ConfigError("the default process group still uses the store; call destroy_process_group first")
    world.close_store()
