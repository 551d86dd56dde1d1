"""The rendezvous of ranks that one `mpirun` started, without MASTER_ADDR and the like: they ask MPI."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from rpcdist.collectives._mpi.mpi_library import load_mpi
from rpcdist.collectives._stores.tcp_store import TCPStore

if TYPE_CHECKING:
    from rpcdist.collectives._stores.store_base import Store


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
