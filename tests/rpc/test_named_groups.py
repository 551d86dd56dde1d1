"""Process groups of workers by their names, of which the other workers know nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch

from rpcdist import collectives, rpc, testing
from rpcdist.errors import CollectiveError, ConfigError, RankLost, RpcdistError, StoreTimeout, UnknownWorker
from rpcdist.testing import LIMIT_S, InProcessCluster, RpcWorld, WorkerPool

made: list[collectives.ProcessGroup] = []


def join(workers: str | list[str]) -> tuple[int, int]:
    """Makes the group; rank and size."""
    made.append(rpc.new_group(workers, timeout=timedelta(seconds=60)))
    group = made[-1]
    assert collectives.get_rank(group) == group.rank()
    return group.rank(), group.size()


def total(value: float) -> float:
    """The sum over the last group."""
    tensor = torch.tensor([value])
    collectives.all_reduce(tensor, group=made[-1])
    return tensor.item()


def total_until_error() -> str:
    """Adds up until it fails; returns the error."""
    while True:
        try:
            total(1.0)
        except CollectiveError as exc:
            return f"{type(exc).__name__}: {exc}"


def leave() -> None:
    """Frees all groups."""
    while made:
        collectives.destroy_process_group(made.pop())


def why_no_group() -> str:
    """The error of the last group after it has ended."""
    try:
        total(1.0)
    except RpcdistError as exc:
        return str(exc)
    return "no error"


@pytest.mark.multiproc
def test_members_make_a_group_and_another_one_of_the_survivors(worker_pool: WorkerPool) -> None:
    world: RpcWorld = worker_pool.world("a", "b", "c", "d", world_size=None)
    joining = [world[name].begin(join, ["c", "a", "d"]) for name in ("a", "c", "d")]
    assert [pending.result() for pending in joining] == [(1, 3), (0, 3), (2, 3)]
    adding = [world[name].begin(total, value) for name, value in (("a", 1.0), ("c", 2.0), ("d", 4.0))]
    assert [pending.result() for pending in adding] == [7.0] * 3
    joining = [world[name].begin(join, ["a", "c"]) for name in ("a", "c")]  # beside it
    assert [pending.result() for pending in joining] == [(0, 2), (1, 2)]
    joining = [world[name].begin(join, ["c", "a", "d"]) for name in ("a", "c", "d")]  # the same members once more
    assert [pending.result() for pending in joining] == [(1, 3), (0, 3), (2, 3)]
    adding_up = [world[name].begin(total_until_error) for name in ("a", "d")]
    world["c"].kill()
    for pending in adding_up:
        error = pending.result()
        assert "of group 'workers 0: c, 1: a, 2: d (" in error, error
        assert "rank 0 was lost" in error or "worker 'c', rank 0 of it, is lost" in error, error
    assert [world[name].run(why_no_group) != "no error" for name in ("a", "d")] == [True, True]
    for name in ("a", "d"):
        world[name].run(leave)
    joining = [world[name].begin(join, ["a", "d"]) for name in ("a", "d")]
    assert [pending.result() for pending in joining] == [(0, 2), (1, 2)]
    adding = [world[name].begin(total, 3.0) for name in ("a", "d")]
    assert [pending.result() for pending in adding] == [6.0] * 2
    assert world["b"].run(rpc.get_worker_info).name == "b"


@pytest.fixture
def cluster() -> InProcessCluster:
    return InProcessCluster("a", "b", "c")


def test_wrong_members_are_named(cluster: InProcessCluster) -> None:
    with cluster, cluster.use("a"):
        with pytest.raises(ConfigError, match="'a', is not among the workers of the group: b, c"):
            rpc.new_group(["b", "c"])
        with pytest.raises(ConfigError, match="the workers of a group must be distinct: a, b, a"):
            rpc.new_group(["a", "b", "a"])
        with pytest.raises(UnknownWorker, match="x"):
            rpc.new_group(["a", "x"])
        with pytest.raises(ConfigError, match="no worker has the role 'trainer'"):
            rpc.new_group("trainer")
        with pytest.raises(RpcdistError, match="the group of a, b"):
            rpc.new_group(["a", "b"], timeout=timedelta(seconds=0.2))


def test_a_member_that_dies_before_it_comes_is_named(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", world_size=None)
    waiting = world["a"].begin(join, ["a", "b"])
    world["b"].kill()
    assert "worker 'b' is lost" in str(waiting.error(RankLost))


def give_up(workers: list[str], by_timeout: bool) -> None:
    """Begins to make the group, and gives up before another member has begun."""
    limit_s = 2 * testing.UNIT_S
    if by_timeout:
        with pytest.raises(StoreTimeout):
            rpc.new_group(workers, timeout=timedelta(seconds=limit_s))
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(rpc.new_group_async(workers), limit_s))


@pytest.mark.multiproc
@pytest.mark.parametrize("by_timeout", [False, True], ids=["by a cancellation", "by a timeout"])
def test_members_that_gave_up_make_the_group_later(worker_pool: WorkerPool, by_timeout: bool) -> None:
    """Neither the number of attempts nor a thread that goes on keeps them apart."""
    world = worker_pool.world("a", "b", world_size=None)
    names = ["a", "b"]
    for name, num_attempts in (("a", 2), ("b", 1)):
        for _ in range(num_attempts):
            world[name].run(give_up, names, by_timeout)
    joining = [world[name].begin(join, names) for name in names]
    assert [pending.result() for pending in joining] == [(0, 2), (1, 2)]
    for leaving in [world[name].begin(leave) for name in names]:
        leaving.result()


def test_all_that_wait_for_a_member_learn_who_it_is() -> None:
    """Those that wait longer than the first member were told only that its store had been closed."""
    with InProcessCluster("a", "b", "c") as cluster:
        members = ["a", "b", "c"]
        follows = cluster.begin("b", rpc.new_group, members, timeout=timedelta(seconds=60))
        leads = cluster.begin("a", rpc.new_group, members, timeout=timedelta(seconds=2))
        for pending in (leads, follows):
            with pytest.raises(RpcdistError, match="rank 2 has not come"):
                pending.result(LIMIT_S)
