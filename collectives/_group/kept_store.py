"""The store of the default group, which stays open between two initialisations.

[Note: the store stays] The store that `init_process_group` opens stays open in this process after
`destroy_process_group`, and the next initialisation with the same address uses it again: other ranks may still be
reading it, and if the rank that serves it closed it and served another at the same port, they would talk to the wrong
one. It closes when another address is initialised, by `close_stores`, and at exit.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from rpcdist.collectives._mpi.mpi_library import load_mpi
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives._stores.tcp_store import TCPStore
from rpcdist.collectives.rendezvous import rendezvous
from rpcdist.errors import DistStoreError

MPI_ADDRESS = "mpi"
"""Stands for a URL: MPI tells the ranks where the store is."""

ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")

StoreAndRank = tuple[Store, int, int]
"""A store, the rank of this process, and the world size."""


class KeptStore:
    """The store that was opened last; see [Note: the store stays]."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._opened: StoreAndRank | None = None

    def open(self, url: str, rank: int, world_size: int, timeout: timedelta) -> StoreAndRank:
        """The store at an address: the one that is open already, or a new one."""
        names = ENVIRONMENT if url.startswith("env://") else ()
        key = (url, rank, world_size, *(os.environ.get(name) for name in names))
        if self._opened is None or key != self._key:
            self._opened = self._replace(url, rank, world_size, timeout)
            self._key = key
        self._opened[0].set_timeout(timeout)
        return self._opened

    def _replace(self, url: str, rank: int, world_size: int, timeout: timedelta) -> StoreAndRank:
        """Opens the new store first, as it may share the server of the old; if that fails, closes the old one first."""
        old = self._opened
        try:
            opened = _open(url, rank, world_size, timeout)
        except DistStoreError:
            if old is None:
                raise
            self.close()
            return _open(url, rank, world_size, timeout)
        if old is not None:
            old[0].close()
        return opened

    def close(self) -> None:
        """Closes it; idempotent, bounded."""
        if self._opened is not None:
            opened, self._opened, self._key = self._opened, None, ()
            opened[0].close()


def _open(url: str, rank: int, world_size: int, timeout: timedelta) -> StoreAndRank:
    if url == MPI_ADDRESS:
        return rendezvous_through_mpi(timeout)
    # Rank 0 does not wait for the others: those who make the group do, and can say who is missing.
    return next(rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False))


def rendezvous_through_mpi(timeout: timedelta) -> tuple[Store, int, int]:
    """A store that MPI's rank 0 serves, this process's rank, and how many there are.

    Every process that `mpirun` started calls it. Rank 0 serves on MASTER_ADDR and MASTER_PORT where they are set, else
    on loopback when all ranks share a host, else on the address of its host name.

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
