"""`grow_group`: processes that come later take part in the default group."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from collectives_ranks import LIMIT_S, run_ranks
from inside_groups import World, current_world, use_world

import rpcdist.collectives as c
from rpcdist.collectives import HashStore
from rpcdist.collectives._stores.store_base import SignedRecords
from rpcdist.collectives.store import PrefixStore
from rpcdist.errors import AuthenticationFailed, ConfigError, RankLost, RendezvousError, StoreTimeout

T = TypeVar("T")
Seen = tuple[tuple[int, int, list[float], float], float]
"""The view of a rank on the first group, and the sum in the second one."""
SOON = timedelta(seconds=0.3)


def total() -> float:
    tensor = torch.tensor(2.0 ** c.get_rank())
    c.all_reduce(tensor)
    return tensor.item()


def in_new_process(function: Callable[[], T]) -> T:
    """Calls it in a process without groups, as far as groups can tell."""
    with use_world(World()):
        try:
            return function()
        finally:
            if c.is_initialized():
                c.destroy_process_group()


@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_new_processes_get_what_the_others_have(backend: str) -> None:
    store, grown = HashStore(LIMIT_S), threading.Event()

    def train(weights: torch.Tensor) -> tuple[int, int, list[float], float]:
        c.broadcast(weights, 0)
        return c.get_rank(), c.get_world_size(), weights.tolist(), total()

    def on_rank(rank: int) -> Seen:
        part = c.new_group([0, 1])
        group = c.grow_group(store, 4)
        assert group is c.group.WORLD and group.name() == group._get_backend_name() == backend
        with pytest.raises(ValueError, match="destroyed"):
            c.barrier(part)
        trained = train(torch.full((2,), 7.0))
        grown.set()
        c.grow_group(store, 5)
        return trained, total()

    def newcomer() -> Seen:
        c.grow_group(store, timeout=timedelta(seconds=LIMIT_S))
        trained = train(torch.zeros(2))
        c.grow_group(store, 5)
        return trained, total()

    def last() -> float:
        c.grow_group(store, 5)
        return total()

    with ThreadPoolExecutor(4) as pool:
        later = [pool.submit(in_new_process, newcomer) for _ in range(2)]
        there = pool.submit(run_ranks, 2, on_rank, backend=backend)
        assert grown.wait(LIMIT_S), "the first ranks did not come together"
        assert in_new_process(last) == 31
        every = [*there.result(), *(each.result() for each in later)]
    assert sorted(every) == [((rank, 4, [7.0, 7.0], 15.0), 31.0) for rank in range(4)]


def test_who_does_not_come_is_named_and_the_group_stays() -> None:
    store = HashStore(LIMIT_S)
    with pytest.raises(
        RendezvousError, match=r"could not join within 0.3 s: the ranks .* grow_group\(store, world_size\)"
    ):
        in_new_process(lambda: c.grow_group(store, timeout=SOON))
    store.add("grow/waiting", 1)  # this one dies while it waits

    def on_rank(rank: int) -> float:
        with pytest.raises(
            StoreTimeout, match=r"the default group, grown to 2 ranks: rank 1 has not come within 0.3 s"
        ):
            c.grow_group(store, 2, timeout=SOON)
        assert total() == 1
        c.grow_group(store, 2)
        return total()

    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(run_ranks, 1, on_rank)
        assert in_new_process(lambda: (c.grow_group(store), total())[1]) == 3
        assert later.result() == [3]


def test_sizes_that_differ_are_refused() -> None:
    store = HashStore(LIMIT_S)

    def on_rank(rank: int) -> None:
        for size in (None, 0, 1):
            with pytest.raises(ConfigError, match=f"more than the 1 present ranks, not {size}"):
                c.grow_group(store, size)
        with pytest.raises(TypeError, match="`world_size` must be a whole number"):
            c.grow_group(store, 2.0)  # type: ignore[arg-type]
        with pytest.raises(StoreTimeout):
            c.grow_group(store, 2, timeout=SOON)

    def newcomer() -> None:
        with pytest.raises(RendezvousError, match="expect a group of 2 ranks, not of 3"):
            c.grow_group(store, 3)

    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(in_new_process, newcomer)
        run_ranks(1, on_rank)
        later.result()


def test_a_lost_rank_is_named() -> None:
    store = HashStore(LIMIT_S)

    def on_rank(rank: int) -> None:
        if rank == 0:
            with pytest.raises(RankLost, match="rank 1"):
                c.grow_group(store, 3)

    run_ranks(2, on_rank, backend="tcp")


INVITATION = {"number": 1, "rank": 0, "world_size": 1, "name": "0", "backend": "tcp", "timeout_s": 1.0}


def test_an_invitation_of_a_stranger_is_refused() -> None:
    store = HashStore(LIMIT_S)
    store.set("grow/ticket/1", json.dumps(INVITATION))
    with pytest.raises(AuthenticationFailed):
        in_new_process(lambda: c.grow_group(store))


@pytest.mark.parametrize(
    "change", [{"rank": "0"}, {"rank": 1}, {"timeout_s": -1.0}, {"number": None}, {"more": 1}, None], ids=str
)
def test_an_invitation_that_makes_no_sense_is_named(change: dict[str, object] | None) -> None:
    store = HashStore(LIMIT_S)
    text = "[]" if change is None else json.dumps(INVITATION | change)

    def newcomer() -> None:
        SignedRecords(PrefixStore("grow", store), current_world().process.credentials()).set("ticket/1", text)
        c.grow_group(store)

    with pytest.raises(RendezvousError, match=r"the invitation .* is invalid"):
        in_new_process(newcomer)


def test_a_stranger_cannot_say_that_a_new_process_has_left() -> None:
    store = HashStore(LIMIT_S)
    store.set("grow/left/1", b"left")

    def on_rank(rank: int) -> None:
        with pytest.raises(AuthenticationFailed):
            c.grow_group(store, 2)

    run_ranks(1, on_rank)
