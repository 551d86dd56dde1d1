"""Started by benchmarks/collectives.py under mpirun: the same cases through mpi4py's buffer operations."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from _collective_cases import SIZES, Runner, measure
from mpi4py import MPI


def make(name: str, size: int, world: Any) -> Runner:
    rank, ranks = world.Get_rank(), world.Get_size()
    whole = np.zeros(max(1, size // 4), np.float32)
    part = np.zeros(max(1, size // 4 // ranks), np.float32)
    spread, spread_other = np.zeros(part.size * ranks, np.float32), np.zeros(part.size * ranks, np.float32)

    def ping_pong() -> None:
        if rank == 0:
            world.Send(whole, 1)
            world.Recv(whole, 1)
        elif rank == 1:
            world.Recv(whole, 0)
            world.Send(whole, 0)

    runners: dict[str, Runner] = {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
        "broadcast": lambda: world.Bcast(whole, 0),
        "all_gather": lambda: world.Allgather(part, spread),
        "reduce_scatter": lambda: world.Reduce_scatter_block(spread, part),
        "all_to_all": lambda: world.Alltoall(spread, spread_other),
        "barrier": lambda: world.Barrier(),
        "ping-pong": ping_pong,
    }
    return runners[name]


def main() -> None:
    world = MPI.COMM_WORLD
    rows = []
    for name in sys.argv[1:]:
        for size in (0,) if name == "barrier" else SIZES:
            runner = make(name, size, world)
            estimate = world.bcast(measure(runner, world.Barrier, 3), 0)
            iterations = max(2, min(400, int(0.15 / max(estimate, 1e-9))))
            rows.append((name, size, measure(runner, world.Barrier, iterations)))
    if world.Get_rank() == 0:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
