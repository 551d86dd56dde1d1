"""Several RPC workers in one process, and the faults of the network between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import kit_functions as functions
import pytest
import torch
from inside_agents import node_of

from rpcdist import rpc
from rpcdist.errors import ConfigError, ConnectFailed, DeadlineExceeded, DuplicateName, WorkerLost
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport.session import NullHandler

PEER_TIMEOUT_S = 0.4
PROMPT_S = 5.0
HEARD_S = 1.5  # for tests in which nobody may seem silent for so long, and six times as long passes


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", "c", peer_timeout=PEER_TIMEOUT_S) as cluster:
        yield cluster


def my_name() -> str:
    return rpc.get_worker_info().name


def test_each_worker_is_itself(cluster: InProcessCluster) -> None:
    for name in cluster.names:
        assert cluster.run(name, my_name) == name
        for other in cluster.names:
            assert cluster.run(name, rpc.rpc_sync, other, my_name) == other


def test_large_tensors_and_remote_references(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        large = torch.arange(3_000_000.0)
        assert torch.equal(rpc.rpc_sync("b", torch.add, (large, 1)), large + 1)
        rref = rpc.remote("c", torch.add, (torch.ones(2), 1))
        assert rref.to_here().tolist() == [2, 2] and rref.owner_name() == "c"
        del rref


def test_a_cut_breaks_connections_and_heals(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        assert rpc.rpc_sync("b", functions.add, (1, 2)) == 3
        cluster.network.cut("a", "b")
        with pytest.raises(WorkerLost, match=r"'b'.*connection refused"):
            rpc.rpc_sync("b", functions.add, (1, 2))
        assert rpc.rpc_sync("c", functions.add, (1, 2)) == 3
        cluster.network.heal("a", "b")
        eventually(lambda: answers("b"), "b is reached again")


def test_a_cut_ends_connections_that_are_being_made(cluster: InProcessCluster) -> None:
    """One that was made all the same answered calls, and the shutdown waited for ever for others that were refused."""
    a, b = node_of(cluster, "a"), node_of(cluster, "b")
    b.expect_role("probe")

    async def cut_before_it_stands() -> None:
        connecting = asyncio.ensure_future(a.connect(str(b.address), "probe", 2 * PEER_TIMEOUT_S))
        for _ in range(5):
            await asyncio.sleep(0)  # it waits for the role now
        cluster.network.refuse("a", "b")
        b.handle_role("probe", NullHandler())
        await connecting

    with pytest.raises(ConnectFailed):
        a.run(cut_before_it_stands(), PROMPT_S)
    cluster.network.heal("a", "b")
    b.handle_role("probe", None)


def test_a_shutdown_needs_nobody_but_its_host_in_reach() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=HEARD_S) as cluster:
        assert cluster.run("b", rpc.rpc_sync, "c", my_name) == "c"
        cluster.network.refuse("b", "c")
        with pytest.raises(WorkerLost, match="although it lives"):
            cluster.run("c", rpc.rpc_sync, "b", my_name)
        cluster.shutdown()


OUT_OF_REACH = (
    r"'a'.*connection refused, although it lives.*firewall.* s ago\)\. The call was not sent, so it did not run\.$"
)


def refuse_one_way(cluster: InProcessCluster) -> None:
    """From now on "a" reaches "b", and "b" does not reach "a"."""
    assert cluster.run("a", rpc.rpc_sync, "b", my_name) == "b"
    cluster.network.refuse("a", "b")
    for _ in range(2):  # the second time by a new attempt, for as long as for anybody else
        with pytest.raises(WorkerLost, match=OUT_OF_REACH):
            cluster.run("b", rpc.rpc_sync, "a", my_name)
    assert cluster.run("a", rpc.rpc_sync, "b", my_name) == "b"


def test_a_shutdown_that_a_worker_out_of_reach_hosts_fails_by_name() -> None:
    """It did not return: two led, and each waited for those of the other one. The others end when this one does."""
    with InProcessCluster("a", "b", "c", peer_timeout=HEARD_S) as cluster:
        refuse_one_way(cluster)
        with pytest.raises(WorkerLost, match=r"during the shutdown of 'b', which 'a' hosts: .*although it lives"):
            cluster.run("b", rpc.shutdown)
        cluster.kill("b")


def test_somebody_else_at_the_address_of_a_worker_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a NAT that leads to another one; where nothing is heard of a worker any more, it has ended."""
    with InProcessCluster("a", "b", "c", peer_timeout=HEARD_S) as cluster:
        assert cluster.run("a", rpc.rpc_sync, "b", my_name) == "b"
        real, a, c = cluster.network.node_at, node_of(cluster, "a"), node_of(cluster, "c")
        b = node_of(cluster, "b")
        monkeypatch.setattr(
            cluster.network, "node_at", lambda who, at: c if (who, at) == (b, a.address) else real(who, at)
        )
        with pytest.raises(WorkerLost, match="is c now, not a as it was, although it lives"):
            cluster.run("b", rpc.rpc_sync, "a", my_name)
        with pytest.raises(WorkerLost, match=r"the shutdown of 'b', which 'a' hosts"):
            cluster.run("b", rpc.shutdown)
        cluster.kill("b")


def test_a_worker_that_can_be_reached_again_is_found_without_a_call() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=HEARD_S) as cluster:
        refuse_one_way(cluster)
        with cluster.use("b") as agent:
            assert [member.identity.name for member in agent.directory.living()] == ["b", "c"]
            cluster.network.heal("a", "b")
            eventually(lambda: len(agent.directory.living()) == 3, "'b' has found 'a'")


def answers(name: str) -> bool:
    try:
        return rpc.rpc_sync(name, functions.add, (1, 2)) == 3
    except WorkerLost:
        return False


def test_silence_ends_calls_after_the_peer_timeout(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        assert rpc.rpc_sync("b", functions.add, (1, 2)) == 3
        cluster.network.drop("a", "b")
        began = time.monotonic()
        with pytest.raises(WorkerLost, match="'b'"):
            rpc.rpc_sync("b", functions.add, (1, 2))
        assert PEER_TIMEOUT_S / 2 < time.monotonic() - began < PROMPT_S
        cluster.network.heal("a", "b")
        eventually(lambda: answers("b"), "b is reached again")


def test_delay(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        assert rpc.rpc_sync("b", functions.add, (1, 2)) == 3
        cluster.network.delay("a", "b", PEER_TIMEOUT_S / 4)
        began = time.monotonic()
        assert rpc.rpc_sync("b", functions.add, (1, 2)) == 3
        assert time.monotonic() - began >= PEER_TIMEOUT_S / 2
        with pytest.raises(DeadlineExceeded):
            rpc.rpc_sync("b", functions.add, (1, 2), timeout=PEER_TIMEOUT_S / 8)
        cluster.network.heal("a", "b")


def test_a_killed_worker_is_lost_and_replaced(cluster: InProcessCluster) -> None:
    functions.released.clear()
    with cluster.use("a"):
        hanging = rpc.rpc_async("b", functions.wait_for_release)
        assert rpc.rpc_sync("b", my_name) == "b"
    threading.Timer(PEER_TIMEOUT_S, functions.released.set).start()  # threads cannot be killed: the handler has to end
    cluster.kill("b")
    with cluster.use("c"), pytest.raises(WorkerLost, match="'b'"):
        rpc.rpc_sync("b", my_name)
    cluster.restart("b")
    for name in ("a", "c"):
        eventually(lambda name=name: cluster.run(name, answers, "b"), f"{name} reaches it")  # type: ignore[misc]
    assert isinstance(hanging.exception(PROMPT_S), WorkerLost)


def test_workers_come_and_go() -> None:
    with InProcessCluster("a", "b", elastic=True, peer_timeout=PEER_TIMEOUT_S) as cluster:
        cluster.join("c", 2)
        assert cluster.run("c", rpc.rpc_sync, "a", my_name) == "a"
        cluster.shutdown("b")
        assert cluster.names == ("a", "c")
        with pytest.raises(DuplicateName):
            cluster.join("c", 5)


def test_two_jobs_beside_each_other() -> None:
    with InProcessCluster("a", "b") as one, InProcessCluster("a", "b") as other:
        for cluster in (one, other):
            assert cluster.run("a", rpc.rpc_sync, "b", my_name) == "b"


def test_names_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="different names"):
        InProcessCluster("a", "a")
    with InProcessCluster("a", "b") as cluster:
        with pytest.raises(ConfigError, match="no worker 'z' lives in this cluster; these do: a, b"):
            cluster.use("z")
