"""`World`: the groups of one process and the state that they share, such as the store of the default group.

torch's functions act on the process that calls them, so each process has one world. Several ranks can live in one
process (tests, notebooks, simulations) if each runs in its own world: `use_world`.

[Note: the store stays] The store that `init_process_group` opens stays open in this process after
`destroy_process_group`, and the next initialisation with the same address uses it again. Other ranks may still be
reading it: if the serving rank closed it and served another store at the same port, they would talk to the wrong one.
It is closed when another address is initialised, by `close_stores`, and at exit.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Final, Self, cast

from rpcdist.collectives._group.flight_records import Record
from rpcdist.collectives._group.local_process import LocalProcess
from rpcdist.collectives._mpi.mpi_transport import load_mpi
from rpcdist.collectives._operations.operation import whole_number
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives._stores.tcp_store import TCPStore
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.collectives.rendezvous import rendezvous
from rpcdist.errors import ConfigError, DistStoreError
from rpcdist.inspection import GroupFacts, OperationFacts

MPI_ADDRESS = "mpi"
"""Takes the place of a URL: the ranks learn the address of the store through MPI."""

ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")

StoreAndRank = tuple[Store, int, int]
"""A store, the rank of this process, and the world size."""


def _open(url: str, rank: int, world_size: int, timeout: timedelta) -> StoreAndRank:
    if url == MPI_ADDRESS:
        return rendezvous_through_mpi(timeout)
    # Rank 0 does not wait for the others here: making the group waits, and can name the missing ranks.
    return next(rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False))


def rendezvous_through_mpi(timeout: timedelta) -> tuple[Store, int, int]:
    """Returns a store that MPI's rank 0 serves, this process's rank, and the world size.

    Every process of `mpirun` calls it. Rank 0 serves on MASTER_ADDR and MASTER_PORT if they are set, otherwise on
    loopback if all ranks share a host, otherwise on the address of its host name.

    Raises:
        ConfigError: MPI is missing or cannot be used.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    rank, size = int(world.Get_rank()), int(world.Get_size())
    on_host = world.Split_type(mpi.COMM_TYPE_SHARED)
    one_host = on_host.Get_size() == size
    on_host.Free()
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.gethostname())
        port = int(os.environ.get("MASTER_PORT") or 0)
        served = TCPStore(host, port, size, True, timeout, wait_for_workers=False, multi_tenant=True)
        world.bcast((host, served.port), root=0)
        return served, rank, size
    host, port = world.bcast(None, root=0)
    return TCPStore(host, port, size, False, timeout), rank, size


NON_GROUP_MEMBER: Final = cast(ProcessGroup, -100)
"""The value, torch's, that `new_group` returns on ranks outside the group; functions that get it do nothing.

Its annotation is a group because every function accepts it as one.
"""

Group = ProcessGroup | None
"""The `group` argument of functions: a group, `NON_GROUP_MEMBER`, or None for the default group."""


class World:
    """The groups of one process, by name, and the state that they share.

    Attributes:
        default: the group of all ranks; None before `init_process_group`.
        groups: all groups by name, in order of creation.
        registered: groups by other names that the program has registered.
        num_created: number of groups that got a number since `init_process_group`.
        store: the part of the store that belongs to this initialisation; None before it.
        process: the state that the backends of all groups share.
        groups_of_others: for each group without this rank that needs the store here: its part of it, name and ranks.
    """

    def __init__(self) -> None:
        self.default: ProcessGroup | None = None
        self.groups: dict[str, ProcessGroup] = {}
        self.registered: dict[str, ProcessGroup] = {}
        self.num_created = 0
        self.store: Store | None = None
        self.process = LocalProcess()
        self.groups_of_others: list[tuple[Store, str, tuple[int, ...]]] = []
        self._beginning = threading.Lock()  # held by the thread that makes the default group
        self._kept_key: tuple[object, ...] = ()
        self._kept: StoreAndRank | None = None  # the store that was last opened
        self._num_hashed: dict[tuple[int, ...], int] = {}

    @contextmanager
    def beginning(self) -> Iterator[Self]:
        """Within this context, only this thread makes the default group. Raises ConfigError if it exists already."""
        if not self._beginning.acquire(blocking=False):
            raise ConfigError("another thread of this process is in init_process_group: call it in one of them")
        try:
            if self.default is not None:
                raise ConfigError("trying to initialize the default process group twice!")
            yield self
        finally:
            self._beginning.release()

    def begin(self, default: ProcessGroup, store: Store) -> None:
        """Makes a group the default group and the only one; earlier groups are already shut down."""
        self.end()
        self.default, self.store, self.num_created = default, store, 1
        self.groups[default.group_name] = default

    def end(self) -> None:
        """Forgets all groups, which are already shut down."""
        self.default = self.store = None
        self.groups.clear()
        self.registered.clear()
        self.num_created = 0
        self._num_hashed.clear()

    # ------------------------------------------------------------ [Note: the store stays]

    def open_store(self, url: str, rank: int, world_size: int, timeout: timedelta) -> StoreAndRank:
        names = ENVIRONMENT if url.startswith("env://") else ()
        key = (url, rank, world_size, *(os.environ.get(name) for name in names))
        if self._kept is None or key != self._kept_key:
            self._kept = self._replace_store(url, rank, world_size, timeout)
            self._kept_key = key
        self._kept[0].set_timeout(timeout)
        return self._kept

    def _replace_store(self, url: str, rank: int, world_size: int, timeout: timedelta) -> StoreAndRank:
        """Opens the new store first, as it may share the server of the old; if that fails, closes the old one first."""
        old = self._kept
        try:
            opened = _open(url, rank, world_size, timeout)
        except DistStoreError:
            if old is None:
                raise
            self.close_store()
            return _open(url, rank, world_size, timeout)
        if old is not None:
            old[0].close()
        return opened

    def close_store(self) -> None:
        if self._kept is not None:
            kept, self._kept, self._kept_key = self._kept, None, ()
            kept[0].close()

    # ------------------------------------------------------------ facts and names

    def facts(self, time_ns: int) -> list[GroupFacts]:
        """Returns the groups with their operations in flight, from the flight recorder. Any thread may call it."""
        newest: dict[str, Record] = {}
        in_flight: dict[str, list[OperationFacts]] = {}
        for record in self.process.recorder.entries():
            if record.family == "collective":
                newest[record.group] = record
            if record.state in ("queued", "running"):
                age_s = (time_ns - record.queued_ns) / 1e9
                operation = OperationFacts(record.sequence, record.operation, record.state, age_s, record.detail)
                in_flight.setdefault(record.group, []).append(operation)
        found = []
        for name, group in list(self.groups.items()):
            last = newest.get(name)
            found.append(
                GroupFacts(
                    name,
                    group.rank(),
                    group.ranks,
                    group.backend_config,
                    0 if last is None else last.sequence,
                    "" if last is None else last.operation,
                    tuple(in_flight.get(name, ())),
                )
            )
        return found

    def numbered_name(self) -> str:
        """Returns a name for a new group, equal on all ranks, as all of them make the same groups in the same order."""
        number = self.num_created
        self.num_created += 1
        return str(number)

    def hashed_name(self, members: tuple[int, ...]) -> str:
        """Returns a name for a new group, equal on all members: it counts only the groups of the same ranks."""
        number = self._num_hashed.get(members, 0)
        self._num_hashed[members] = number + 1
        return hashlib.sha256(f"{members} {number}".encode()).hexdigest()[:40]


_world: ContextVar[World] = ContextVar("rpcdist_world", default=World())  # noqa: B039  (the process's own, by design)


def current_world() -> World:
    """Returns the world of this process, or of the rank that runs here under `use_world`."""
    return _world.get()


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Within this context, this thread or task has its own groups, as if it were another process."""
    token = _world.set(world)
    try:
        yield world
    finally:
        _world.reset(token)


def default_group() -> ProcessGroup:
    """Returns the group of all ranks. Raises ConfigError before `init_process_group`."""
    default = _world.get().default
    if default is None:
        text = "Default process group has not been initialized, please make sure to call init_process_group."
        raise ConfigError(text)
    return default


def group_or_default(given: Group) -> ProcessGroup:
    """Returns the given group, or the default group for None. Raises ConfigError for any other value."""
    if given is None:
        return default_group()
    if isinstance(given, ProcessGroup):
        return given
    if given == NON_GROUP_MEMBER:
        raise ConfigError("Invalid process group specified: this rank is not in the group")
    raise ConfigError(f"Invalid process group specified: {given!r}")


def member_group(given: Group, what: str, stacklevel: int = 4) -> ProcessGroup | None:
    """Returns the group of a call; None, with torch's warning, if this rank is not in it."""
    if given is None:
        return default_group()
    if isinstance(given, ProcessGroup):
        return given
    if given == NON_GROUP_MEMBER:
        default = current_world().default
        rank = -1 if default is None else default.rank()
        text = f"Running {what} on global rank {rank} which does not belong to the given group."
        warnings.warn(text, stacklevel=stacklevel)
        return None
    return group_or_default(given)


def resolve_group_rank(group: ProcessGroup, world_rank: int | None, group_rank: int | None) -> int:
    """Returns the rank in the group, from either `src` or `group_src` (`dst` or `group_dst`)."""
    if group_rank is not None:
        if world_rank is not None:
            raise ConfigError("Can't specify both group_rank and global_rank")
        return whole_number(group_rank, "group_rank")
    if world_rank is None:
        raise ConfigError("Must specify global_rank or group_rank")
    return group.group_rank(world_rank if type(world_rank) is int else whole_number(world_rank, "rank"))


def resolve_root(group: ProcessGroup, world_rank: int | None, group_rank: int | None) -> int:
    """Returns the root's rank in the group. As in torch, the default is rank 0 of the world."""
    if world_rank is None and group_rank is None:
        world_rank = 0
    return resolve_group_rank(group, world_rank, group_rank)
