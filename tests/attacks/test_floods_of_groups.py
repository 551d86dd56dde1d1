"""A member floods `new_group` and `call_each`: what others hold for it is bounded, and ends with its session."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from inside_agents import current_agent

from rpcdist import collectives, rpc
from rpcdist.errors import CallRefused, ConfigError, RpcdistError
from rpcdist.rpc._api import named_groups
from rpcdist.rpc._api.named_groups import _own_groups, _where_is
from rpcdist.testing import LIMIT_S, InProcessCluster, WorkerPool, eventually

NUM_CALLS = 1000


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", "evil", elastic=True, allow_pickle=False) as cluster:
        yield cluster


def incarnation_of(cluster: InProcessCluster, name: str) -> int:
    with cluster.use("a") as agent:
        found = agent.directory.living_incarnation(name)
        assert found is not None
        return found


def questions(members: list[list[object]], count: int) -> list[rpc.Future[Any]]:
    """Asks worker a, as `new_group` does, where the stores of groups are that it does not make."""
    found = []
    for number in range(count):
        asked = rpc.rpc_async("a", _where_is, (members, number), timeout=LIMIT_S)
        asked.is_quiet = True
        found.append(asked)
    return found


def test_questions_take_no_thread_each(cluster: InProcessCluster) -> None:
    """Each took a thread of the pool for a second, of 165 at a time."""
    members: list[list[object]] = [["a", incarnation_of(cluster, "a")], ["evil", incarnation_of(cluster, "evil")]]
    with cluster.use("a") as agent:
        before = agent.pool.facts().threads
        asked = cluster.run("evil", questions, members, NUM_CALLS)
        assert cluster.run("b", rpc.rpc_sync, "a", pow, (2, 5), timeout=LIMIT_S) == 32
        assert [each.exception(LIMIT_S) for each in asked] == [None] * NUM_CALLS
        assert not any(each.value() for each in asked)
        assert agent.pool.facts().threads < before + 40
        eventually(lambda: not num_questions(), "no question is left")
        assert not num_addresses()


def num_questions() -> int:
    """The questions that wait here for a group to be made."""
    return len(_own_groups()._questions)


def num_addresses() -> int:
    """The groups of which this process knows something."""
    groups = _own_groups()
    return len(groups._addresses) + len(groups._num_made)


def test_questions_end_with_the_session_of_the_member(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_groups, "QUICK_ANSWER_LIMIT_S", 10 * LIMIT_S)  # by themselves they end after a second
    members: list[list[object]] = [["a", incarnation_of(cluster, "a")], ["evil", incarnation_of(cluster, "evil")]]
    cluster.run("evil", questions, members, NUM_CALLS)
    with cluster.use("a") as agent:
        eventually(lambda: num_questions() == NUM_CALLS, "all wait")
        cluster.kill("evil")
        eventually(lambda: not agent.dispatcher.calls, "the calls of the dead member have ended")
        eventually(lambda: not num_questions(), "nothing waits for it")


def test_the_store_of_a_group_is_told_to_its_members_alone(cluster: InProcessCluster) -> None:
    others: list[list[object]] = [["a", incarnation_of(cluster, "a")], ["b", incarnation_of(cluster, "b")]]
    with cluster.use("evil"):
        for members in (others, [["evil", 99]], [], [["evil"]], 3, [["evil", "x"]]):
            with pytest.raises(CallRefused, match="members"):
                rpc.rpc_sync("a", _where_is, (members, 0), timeout=LIMIT_S)


# ---------------------------------------------------------------- call_each between processes of a host

kept: list[torch.Tensor] = []
made: list[collectives.ProcessGroup] = []


def flood_with_questions(count: int) -> int:
    """As `new_group` asks worker a for groups that it does not make; how many questions it answered."""
    directory = current_agent().directory
    members: list[list[object]] = [[name, directory.living_incarnation(name)] for name in ("a", "evil")]
    return sum(asked.exception(LIMIT_S) is None for asked in questions(members, count))


def sum_in_group() -> float:
    """The sum of both members of a new group."""
    made.append(rpc.new_group(["a", "b"]))
    one = torch.ones(())
    collectives.all_reduce(one, group=made[-1])
    return float(one)


def why_not_a_member() -> str:
    with pytest.raises(ConfigError) as caught:
        rpc.new_group(["a", "b"])
    return str(caught.value)


def leave() -> None:
    while made:
        collectives.destroy_process_group(made.pop())


def keep(tensor: torch.Tensor) -> int:
    """Keeps the memory that all receivers share."""
    kept.append(tensor)
    return len(kept)


def flood(workers: list[str], count: int) -> int:
    """Calls all of them, again and again, in several threads; how many calls were answered or refused."""
    data = torch.ones(300_000)
    num_ended = 0

    def call() -> None:
        nonlocal num_ended
        for _ in range(count):
            for each in rpc.call_each(workers, torch.sum, data, return_exceptions=True):
                assert isinstance(each, torch.Tensor | RpcdistError)
                num_ended += 1

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_ended


def slowest_call(worker: str, until_calls: int) -> float:
    found = []
    for _ in range(until_calls):
        began = time.monotonic()
        assert rpc.rpc_sync(worker, pow, (2, 5)) == 32
        found.append(time.monotonic() - began)
    return max(found)


@pytest.mark.multiproc
def test_a_member_that_floods_does_not_keep_others_from_a_group(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "evil", allow_pickle=False, rpc_timeout=LIMIT_S)
    flooding = world["evil"].begin(flood_with_questions, NUM_CALLS)
    for _ in range(3):
        making = [world[name].begin(sum_in_group) for name in ("a", "b")]
        assert [each.result(LIMIT_S) for each in making] == [2.0, 2.0]
    assert flooding.result(4 * LIMIT_S) == NUM_CALLS
    assert "'evil', is not among the workers of the group: a, b" in world["evil"].run(why_not_a_member)
    for name in ("a", "b"):
        world[name].run(leave)


@pytest.mark.multiproc
def test_call_each_goes_on_beside_a_flood_of_it_and_after_its_end(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "evil", allow_pickle=False, rpc_timeout=LIMIT_S)
    flooding = world["evil"].begin(flood, ["a", "b"], 50)
    assert world["b"].run(slowest_call, "a", 200) < LIMIT_S
    assert flooding.result(4 * LIMIT_S) == 400
    assert world["a"].run(rpc.call_each, ["evil", "b"], keep, torch.ones(300_000)) == [1, 1]
    for number in range(2, 20):
        assert world["a"].run(rpc.call_each, ["evil", "b"], keep, torch.ones(300_000)) == [number, number]
    world["evil"].kill()
    assert world["a"].run(rpc.call_each, ["b"], keep, torch.ones(300_000)) == [20]
    assert world["b"].run(slowest_call, "a", 10) < LIMIT_S
