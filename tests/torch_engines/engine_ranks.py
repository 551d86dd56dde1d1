"""The functions of the ranks of `rank_pool`: an engine of torch on Gloo, the same on our backend, and every number
compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from engines import ENGINES, Numbers

import rpcdist.collectives.torch_backend

__all__ = ["compare"]

LIMIT = timedelta(seconds=40)

# A callback of PowerSGD's futures may hold the last reference to a group of Gloo, on a thread of that group. Its
# destructor then joins this thread with itself and ends the process ("Resource deadlock avoided"), so groups stay.
_groups_of_gloo: list[dist.ProcessGroup | None] = []


@contextmanager
def default_group(backend: str, rank: int, size: int, path: Path) -> Iterator[None]:
    """torch's own default group, by torch's own file store."""
    store = dist.FileStore(str(path / f"store of {backend}"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT)
    if backend == "gloo":
        _groups_of_gloo.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compare(rank: int, size: int, name: str, folder: str) -> int:
    """Asserts that every number is the same, to the bit; returns how many tensors that are.

    Args:
        rank: this rank.
        size: the number of ranks.
        name: of the engine.
        folder: empty; all ranks see it.
    """
    found: dict[str, Numbers] = {}
    for backend in ("gloo", rpcdist.collectives.torch_backend.NAME):
        own = Path(folder, backend)
        own.mkdir(parents=True, exist_ok=True)
        with default_group(backend, rank, size, Path(folder)):
            assert dist.get_backend() == backend
            found[backend] = ENGINES[name][1](rank, size, str(own))
    wanted, got = found.values()
    assert got.keys() == wanted.keys()
    different = [each for each in wanted if not torch.equal(got[each], wanted[each])]
    assert not different, f"differ between Gloo and our backend: {different}"
    return len(wanted)
