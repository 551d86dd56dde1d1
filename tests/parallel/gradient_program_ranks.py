"""The functions that the ranks of `rank_pool` run with random programs; see `gradient_programs`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed
from gradient_programs import Gradients, Program, draw, problem, reference
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from rpcdist import collectives
from rpcdist.parallel import DistributedDataParallel

LIMIT_S = 60.0  # the machine may have other work
TORCH_LIMIT_S = 3.0  # torch waits so long where ranks disagree

Found = tuple[int, str, str | None]


class _Groups:
    """The groups of a run: ours is made again after an error, torch's for each program."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        self._rank, self._size = rank, size
        self._store = collectives.FileStore(path, size)
        self._torch_store = torch.distributed.FileStore(f"{path}-torch", size)

    def begin(self, seed: int) -> None:
        collectives.init_process_group(
            "tcp",
            store=collectives.PrefixStore(f"ours {seed}", self._store),
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=LIMIT_S),
        )

    def any_failed(self, seed: int, mine: bool) -> bool:
        """Whether this program failed on some rank."""
        key = f"end {seed}"
        self._store.add(f"{key} failed", int(mine))
        if self._store.add(f"{key} done", 1) == self._size:
            self._store.set(key, str(self._store.add(f"{key} failed", 0)))
        return self._store.get(key) != b"0"

    def begin_torch(self, seed: int) -> None:
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.PrefixStore(f"torch {seed}", self._torch_store),
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=TORCH_LIMIT_S),
        )


def try_programs(rank: int, size: int, path: str, seeds: Sequence[int], num_with_torch: int) -> list[Found]:
    """(seed, our problem, the peer's) of each program that one process can run.

    Args:
        num_with_torch: so many of them run under torch's class on Gloo, too; the others' third item is None. Where the
            program ends iterations itself, the peer is our class that ends them.
    """
    groups = _Groups(rank, size, path)
    groups.begin(-1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _results(groups, rank, size, seeds, num_with_torch)
    finally:
        if collectives.is_initialized():
            collectives.destroy_process_group()


def _results(groups: _Groups, rank: int, size: int, seeds: Sequence[int], num_with_torch: int) -> list[Found]:
    results = list[Found]()
    for seed in seeds:
        program = draw(seed, size)
        try:
            wanted = reference(program, size)
        except RuntimeError:
            continue  # reentrant checkpoints do not go with torch.autograd.grad, for instance
        ours, theirs = problem(program, size, rank, DistributedDataParallel, wanted), None
        if groups.any_failed(seed, bool(ours)):
            collectives.destroy_process_group()
            groups.begin(seed)
        if len(results) < num_with_torch:
            theirs = _of_peer(groups, program, rank, size, wanted)
        results.append((seed, ours, theirs))
    return results


def _of_peer(groups: _Groups, program: Program, rank: int, size: int, wanted: Sequence[Gradients]) -> str | None:
    if program.ends in ("after", "hook"):
        theirs = problem(replace(program, ends="backward"), size, rank, DistributedDataParallel, wanted)
        if groups.any_failed(-2 - program.seed, bool(theirs)):
            collectives.destroy_process_group()
            groups.begin(-2 - program.seed)
        return theirs
    if program.ends != "backward":
        return None
    groups.begin_torch(program.seed)
    try:
        return problem(program, size, rank, TorchDataParallel, wanted)
    finally:
        torch.distributed.destroy_process_group()
