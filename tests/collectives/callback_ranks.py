"""The functions that the ranks of `rank_pool` run in the tests of callbacks that communicate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from rpcdist import collectives
from rpcdist.collectives import Work
from rpcdist.errors import CollectiveError


@contextmanager
def world(rank: int, size: int, path: str) -> Iterator[None]:
    collectives.init_process_group(
        "tcp", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=40)
    )
    try:
        yield
    finally:
        collectives.destroy_process_group()


def start(tensor: torch.Tensor) -> Work:
    work = collectives.all_reduce(tensor, async_op=True)
    assert work is not None
    return work


def many_chains(rank: int, size: int, path: str) -> None:
    """Operations of the program and of callbacks, whose turns differ from rank to rank, with sizes of their own."""

    def doubled(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        [value] = done.value()
        result: torch.Tensor = start(value.clone()).get_future().wait()[0]
        entries = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,), check_invariants=True)
        collectives.all_reduce(entries)
        assert entries.to_dense().tolist() == [1.0] * size
        return result

    def again(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        total = done.value().clone()
        collectives.all_reduce(total)
        return total

    with world(rank, size, path):
        for turn in range(4):
            chains: list[torch.futures.Future[torch.Tensor]] = []
            for number in range(12):
                if chains and (number + rank + turn) % 3 == 0:  # other ranks go on before the callbacks have run
                    chains[-1].wait()
                work = start(torch.full((number + 1,), 1.0 + rank))
                chains.append(work.get_future().then(doubled).then(again))
            total = float(sum(range(1, size + 1))) * size * size
            for number, chain in enumerate(chains):
                assert chain.wait().tolist() == [total] * (number + 1)


def failing(rank: int, size: int, path: str) -> str:
    """Rank 0's callback waits for an operation that rank 1's callback does not call; then the group fails."""
    entered = threading.Event()

    def waits(_: object) -> None:
        if rank == 0:
            collectives.all_reduce(torch.ones(1))  # makes the second group, on both ranks
            entered.set()
            collectives.all_reduce(torch.ones(1))
        else:
            collectives.all_reduce(torch.ones(1))
            entered.set()

    with world(rank, size, path):
        future = start(torch.ones(1)).get_future().then(waits)
        entered.wait(30)
        try:
            collectives.barrier() if rank else collectives.all_reduce(torch.ones(2))
        except CollectiveError as exc:
            if rank:
                return str(exc)
        try:
            future.wait()
        except CollectiveError as exc:
            return str(exc)
    return "nothing failed"


def aborted(rank: int, size: int, path: str) -> str:
    """A callback waits for another rank while the group is aborted."""
    entered = threading.Event()

    def waits(_: object) -> None:
        collectives.all_reduce(torch.ones(1))
        entered.set()
        if rank == 0:
            collectives.barrier()

    with world(rank, size, path):
        future = start(torch.ones(1)).get_future().then(waits)
        entered.wait(30)
        group = collectives.group.WORLD
        assert isinstance(group, collectives.ProcessGroup)
        if rank == 0:
            group.abort()
        try:
            future.wait()
            collectives.barrier()
        except CollectiveError as exc:
            return type(exc).__name__
    return "nothing failed"
