"""Runs the ranks of a job as threads of this process, each with its own default group on the local backend."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import collectives_local as collectives_local  # registers the backend
from inside_groups import World, use_world

from rpcdist import collectives
from rpcdist.collectives import HashStore, Store

__all__ = ["LIMIT_S", "run_ranks"]

T = TypeVar("T")

LIMIT_S = 20.0


def run_ranks(
    size: int,
    function: Callable[[int], T],
    *,
    backend: str = "local",
    store: Store | None = None,
    timeout_s: float = LIMIT_S,
) -> list[T]:
    """Calls `function(rank)` on as many threads, with a default group; returns what they return, by rank.

    The first rank's error, if any has one, is raised when all have ended.
    """
    shared_store = HashStore(timeout_s) if store is None else store

    def rank_main(rank: int) -> T:
        with use_world(World()):
            collectives.init_process_group(
                backend, store=shared_store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
            try:
                return function(rank)
            finally:
                collectives.destroy_process_group()

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
    return [future.result() for future in futures]
