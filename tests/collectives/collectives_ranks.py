"""Runs the ranks of a job as threads of this process, each with its own default group on the local backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar
from unittest.mock import patch

import collectives_local as collectives_local  # registers the backend

from rpcdist import collectives
from rpcdist.collectives import HashStore, Store
from rpcdist.collectives._group import registry

__all__ = ["LIMIT_S", "own_worlds", "run_ranks"]

T = TypeVar("T")

LIMIT_S = 20.0


class WorldOfThread(threading.local):
    """A world for each thread."""

    def __init__(self) -> None:
        self.world = registry.World()


@contextmanager
def own_worlds() -> Iterator[None]:
    """While it lasts, every thread is a process of its own as far as groups are concerned."""
    with patch.object(registry, "_process", WorldOfThread()):
        yield


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
    meeting = HashStore(timeout_s) if store is None else store

    def rank_main(rank: int) -> T:
        collectives.init_process_group(
            backend, store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        try:
            return function(rank)
        finally:
            collectives.destroy_process_group()

    with own_worlds(), ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
    return [future.result() for future in futures]
