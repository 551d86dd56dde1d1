"""Rank 0 dies and comes back: the others go on meanwhile, and the new one builds the list of workers from theirs."""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from typing import Any

import coordinator_functions as functions
import pytest
import rpc_victim_references as references
import torch
from full_sets import FULL_ONLY
from inside_agents import Agent
from peer_timeouts import CALM_S, LIMIT_S, UNIT_S
from rpc_functions import add

from rpcdist import autograd as dist_autograd
from rpcdist import rpc
from rpcdist.collectives import Store
from rpcdist.collectives._stores.store_base import SignedRecords
from rpcdist.errors import ActorNameTaken, CallRefused, CoordinatorLost, DuplicateName, UnknownActor, WorkerLost
from rpcdist.rpc import _start
from rpcdist.rpc._actors.actor_names import KEPT
from rpcdist.rpc._membership import coordinator as coordinator_module
from rpcdist.rpc._membership.coordinator import CoordinatorSearch
from rpcdist.testing import UNIT_S as SHORT_S
from rpcdist.testing import InProcessCluster, Program, WorkerPool, eventually, free_port
from rpcdist.time_limits import QUICK_ANSWER_LIMIT_S

RETURN_S = 2 * UNIT_S
"""The `peer_timeout` here. It is also the time in which survivors have to come to the next coordinator."""


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors look for the next coordinator well within `RETURN_S`, which is much shorter than users' 10 s."""
    monkeypatch.setattr(coordinator_module, "FIRST_PAUSE_S", SHORT_S / 2)
    monkeypatch.setattr(coordinator_module, "RETURN_LONGEST_PAUSE_S", SHORT_S)


class Value:
    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> int:
        return self.number


def knows_coordinator(agent: Agent, incarnation: int) -> bool:
    return agent.directory.is_living(0) and agent.directory.incarnation_of(0) == incarnation


def wait_until_taken_back(cluster: InProcessCluster, coordinator: str) -> None:
    with cluster.use(coordinator) as agent:
        incarnation = agent.identity.incarnation
    for name in cluster.names:
        with cluster.use(name) as agent:
            eventually(partial(knows_coordinator, agent, incarnation), f"{name} was taken back")


def but_for_the_start(changes: list[str]) -> list[str]:
    """The events that b has seen; that c has joined may come after b has begun to look."""
    return changes[1:] if changes[0] == "c joined" else changes


@pytest.mark.parametrize("elastic", [False, True])
def test_the_job_goes_on_with_another_coordinator(elastic: bool) -> None:
    with InProcessCluster("a", "b", "c", elastic=elastic, peer_timeout=RETURN_S) as cluster:
        held = cluster.run("b", rpc.remote, "c", Value, (7,))
        changes: list[str] = []
        with cluster.use("b"):
            rpc.on_membership_change(lambda change: changes.append(f"{change.worker.name} {change.kind}"))
        cluster.kill("a")
        with pytest.raises(WorkerLost):
            cluster.run("b", rpc.rpc_sync, "a", add, (1, 2))
        assert cluster.run("b", rpc.rpc_sync, "c", add, (1, 2)) == 3
        cluster.restart("a")
        wait_until_taken_back(cluster, "a")
        for caller in cluster.names:
            for callee in cluster.names:
                assert cluster.run(caller, rpc.rpc_sync, callee, add, (1, 2)) == 3
                assert cluster.run(caller, rpc.remote, callee, Value, (3,)).to_here().get() == 3
        assert cluster.run("b", lambda: held.rpc_sync().get()) == 7
        gathering = [cluster.begin(name, rpc.api._all_gather, name) for name in cluster.names]
        assert all(future.result(LIMIT_S) == {name: name for name in "abc"} for future in gathering)
        assert but_for_the_start(changes) == ["a lost", "a joined"]  # nobody else came or went


@pytest.mark.parametrize("elastic", [False, True])
def test_a_worker_that_serves_ends_by_name_when_nobody_takes_the_place_of_rank_0(elastic: bool) -> None:
    options = {"peer_timeout": RETURN_S, "orphan_timeout": RETURN_S}
    with InProcessCluster("a", "b", "c", elastic=elastic, **options) as cluster:
        serving = [cluster.begin(name, rpc.serve) for name in "bc"]
        with cluster.use("b") as agent:
            eventually(lambda: agent.directory.knows(2), "b has heard of c")  # a joiner waits, but not for long
        cluster.kill("a")
        for ends in serving:
            with pytest.raises(CoordinatorLost, match=r"'a' was lost, and no process took .* Start its replacement"):
                ends.result(LIMIT_S)
        with pytest.raises(CoordinatorLost):  # also who begins to serve now
            cluster.run("b", rpc.serve)
        assert cluster.run("b", rpc.rpc_sync, "c", add, (1, 2)) == 3


def search_of(agent: Agent) -> CoordinatorSearch:
    """The part that finds the coordinator again."""
    return agent._search


def counts_its_time(agent: Agent) -> bool:
    """Whether it will end as an orphan, unless a coordinator comes."""
    return search_of(agent)._orphan_handle is not None


def test_a_worker_that_was_taken_back_goes_on_serving() -> None:
    with InProcessCluster("a", "b", peer_timeout=RETURN_S, orphan_timeout=4 * LIMIT_S) as cluster:
        serving = cluster.begin("b", rpc.serve)
        for _ in range(2):
            cluster.kill("a")
            with cluster.use("b") as agent:
                eventually(lambda: counts_its_time(agent), "b counts the time")
            cluster.restart("a")
            wait_until_taken_back(cluster, "a")
            with cluster.use("b") as agent:
                eventually(lambda: not counts_its_time(agent), "b counts no longer")
        cluster.run("a", rpc.stop_serving, "b")
        assert serving.result(LIMIT_S) == "worker 'a' asked for it"


@pytest.mark.parametrize("elastic", [False, True])
def test_who_has_not_noticed_is_asked_and_comes(elastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was declared lost: the new coordinator waited for no longer than it may take to notice the old one's death."""
    with InProcessCluster("a", "b", "c", elastic=elastic, peer_timeout=RETURN_S) as cluster:
        changes: list[str] = []
        with cluster.use("b") as agent:
            eventually(lambda: agent.directory.knows(2), "b has heard of c")  # a joiner waits, but not for long
            rpc.on_membership_change(lambda change: changes.append(f"{change.worker.name} {change.kind}"))
        with cluster.use("c") as agent:
            search: Any = search_of(agent)
            look = search._look
            # Its own detector changes nothing: it looks when somebody asks for it.
            monkeypatch.setattr(search, "_look", lambda: look() if search._wanted.is_set() else None)
        cluster.kill("a")
        with pytest.raises(WorkerLost):
            cluster.run("b", rpc.rpc_sync, "a", add, (1, 2))
        cluster.restart("a")
        wait_until_taken_back(cluster, "a")
        for caller in cluster.names:
            for callee in cluster.names:
                assert cluster.run(caller, rpc.rpc_sync, callee, add, (1, 2)) == 3
        assert but_for_the_start(changes) == ["a lost", "a joined"]


async def call_on_a_loop() -> int:
    return int(await rpc.rpc_async("a", add, (1, 2)))


def call_in_a_context() -> torch.Tensor:
    with dist_autograd.context() as context_id:
        leaf = torch.ones(3, requires_grad=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync("a", torch.mul, (leaf, 2.0)).sum()])
        return dist_autograd.get_gradients(context_id)[leaf]


def use_a_new_reference() -> int:
    return int(rpc.remote("a", Value, (3,)).to_here().get())


FIRST_CALLS = {
    "a call": lambda: rpc.rpc_sync("a", add, (1, 2)),
    "a reference": use_a_new_reference,
    "a call on an event loop": lambda: asyncio.run(call_on_a_loop()),
    "a call in a context": lambda: call_in_a_context().sum().item() / 2,
}


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "unnoticed"])
@pytest.mark.parametrize("elastic", [False, True], ids=["static", "elastic"])
def test_the_first_call_reaches_the_new_coordinator(
    elastic: bool, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed with `WorkerLost` until the caller had found the new process by itself, up to 2 s later."""
    if elastic:  # where `init_rpc` of the new one does not wait for those who look, they do not look by themselves here
        monkeypatch.setattr(coordinator_module, "FIRST_PAUSE_S", CALM_S)
        monkeypatch.setattr(coordinator_module, "RETURN_LONGEST_PAUSE_S", CALM_S)
    with InProcessCluster("a", "b", "c", "d", "e", elastic=elastic, peer_timeout=RETURN_S) as cluster:
        cluster.kill("a")
        for name in "bcde":
            with cluster.use(name) as agent:
                # A call that was written into a connection that has not yet broken may have run: such a call fails.
                eventually(agent.router.coordinator_may_be_lost, f"the connection of {name} has broken")
                if noticed:
                    eventually(partial(lambda agent: not agent.directory.is_living(0), agent), f"{name} has noticed")
        cluster.restart("a")
        if not elastic:  # the coordinator's answer may be on its way, and a call on an event loop does not wait for it
            with cluster.use("a") as coordinator, cluster.use("d") as agent:
                taken_back = partial(knows_coordinator, agent, coordinator.identity.incarnation)
                eventually(taken_back, "d was taken back")
        on_a_loop = cluster.begin("d", FIRST_CALLS["a call on an event loop"])
        if elastic:  # likewise: the others find the new one, which then asks for d
            assert on_a_loop.result(LIMIT_S) == 3
        others = [call for what, call in FIRST_CALLS.items() if what != "a call on an event loop"]
        calls = [on_a_loop, *(cluster.begin(name, call) for name, call in zip("bce", others, strict=True))]
        assert [call.result(LIMIT_S) for call in calls] == [3, 3, 3, 3]


@pytest.mark.parametrize("kind", ["a call", "a call on an event loop"])
@pytest.mark.parametrize("elastic", [False, True], ids=["static", "elastic"])
def test_a_call_that_waits_for_a_connection_goes_to_a_coordinator_that_is_heard_of_meanwhile(
    elastic: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was compared with the successor instead of its own receiver, and failed: another process took its place."""
    with InProcessCluster("a", "b", "c", elastic=elastic, peer_timeout=RETURN_S) as cluster:
        with cluster.use("b") as agent:
            assert rpc.rpc_sync("a", add, (1, 2)) == 3
        connect, first = agent.network.connect, agent.directory.member(0).identity

        async def connect_to_others(*arguments: Any, **options: Any) -> Any:
            if options.get("expected") == first:
                await asyncio.Event().wait()
            return await connect(*arguments, **options)

        monkeypatch.setattr(agent.network, "connect", connect_to_others)
        cluster.kill("a")
        eventually(agent.router.coordinator_may_be_lost, "the connection has broken")
        waiting = cluster.begin("b", FIRST_CALLS[kind])
        eventually(lambda: any(call.session is None for call in agent.caller.calls), "the call waits for a connection")
        cluster.restart("a")  # c finds it, and names b
        assert waiting.result(LIMIT_S) == 3


def test_calls_to_a_coordinator_that_stays_away_fail_soon() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        cluster.kill("a")
        for call in (*FIRST_CALLS.values(), *FIRST_CALLS.values()):
            with pytest.raises(WorkerLost, match="'a'"):
                cluster.run("b", call)
        cluster.close()


def test_a_store_that_fails_meanwhile_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, failures = _start._look_up, iter([OSError("no such device"), UnicodeError("no text"), MemoryError()])

    def failing(store: Store, records: SignedRecords, before: str) -> str:
        if (failure := next(failures, None)) is not None:
            raise failure
        return look_up(store, records, before)

    monkeypatch.setattr(_start, "_look_up", failing)
    with InProcessCluster("a", "b", peer_timeout=UNIT_S) as cluster:
        cluster.kill("a")
        cluster.restart("a")
        wait_until_taken_back(cluster, "a")
        assert next(failures, None) is None
        assert cluster.run("b", rpc.rpc_sync, "a", add, (1, 2)) == 3


def test_the_new_list_is_as_good_as_the_old_one() -> None:
    """Workers that die after the return are replaced, and everybody hears of it."""
    with InProcessCluster("a", "b", "c", peer_timeout=RETURN_S) as cluster:
        for _ in range(2):
            cluster.kill("a")
            cluster.restart("a")
            wait_until_taken_back(cluster, "a")
            cluster.kill("c")
            with pytest.raises(WorkerLost):
                cluster.run("b", rpc.rpc_sync, "c", add, (1, 2))
            cluster.restart("c")
            assert cluster.run("b", rpc.rpc_sync, "c", add, (1, 2)) == 3


def test_who_died_with_the_coordinator_is_lost_and_can_be_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessCluster("a", "b", "c", "d", peer_timeout=RETURN_S) as cluster, caplog.at_level(logging.WARNING):
        cluster.kill("a")
        cluster.kill("d")
        cluster.restart("a")
        assert cluster.run("a", rpc.rpc_sync, "b", add, (1, 2)) == 3
        wait_until_taken_back(cluster, "a")
        with cluster.use("c") as agent:
            eventually(lambda: "d" in agent.directory.losses(), "c knows that d is lost")
        cluster.restart("d")
        for caller in ("a", "b", "c"):
            assert cluster.run(caller, rpc.rpc_sync, "d", add, (1, 2)) == 3


def test_replacements_may_come_before_the_survivors() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=RETURN_S) as cluster:
        cluster.kill("a")
        cluster.kill("b")
        threads = [threading.Thread(target=cluster.restart, args=(name,)) for name in ("b", "a")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        wait_until_taken_back(cluster, "a")
        for caller in ("a", "b", "c"):
            for callee in ("a", "b", "c"):
                assert cluster.run(caller, rpc.rpc_sync, callee, add, (1, 2)) == 3


def test_no_living_worker_is_evicted_from_the_new_list() -> None:
    with InProcessCluster("a", "b", peer_timeout=RETURN_S) as cluster:
        cluster.kill("a")
        cluster.restart("a")
        wait_until_taken_back(cluster, "a")
        with pytest.raises(DuplicateName, match="'b'"):
            cluster.restart("b")
        del cluster._nodes["b"]


def test_with_the_coordinator_dead_a_call_to_a_lost_worker_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before anybody has declared the coordinator lost: it waited for the answer for 5 s."""
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        with cluster.use("b") as agent:
            assert rpc.rpc_sync("c", add, (1, 2)) == 3
            cluster.kill("c")
            eventually(lambda: agent.router.peer(2).state == "lost", "b has given c up")
            asked: list[float | None] = []
            monkeypatch.setattr(agent.directory, "refresh", asked.append)
            with pytest.raises(WorkerLost, match="'c'"):
                rpc.rpc_sync("c", add, (1, 2))
            assert asked == [QUICK_ANSWER_LIMIT_S]
            cluster.kill("a")
            with pytest.raises(WorkerLost, match="'c'"):
                rpc.rpc_sync("c", add, (1, 2))
            assert len(asked) == 1
        cluster.close()


# ---------------------------------------------------------------- real processes


@pytest.mark.multiproc
@pytest.mark.parametrize("where", ["the coordinator's own store", pytest.param("a file", marks=FULL_ONLY)])
def test_a_coordinator_that_is_killed_is_replaced(worker_pool: WorkerPool, where: str) -> None:
    """In the first case the next one has another address; in the second, the store dies with the coordinator."""
    url = worker_pool.new_url() if where == "a file" else f"tcp://127.0.0.1:{free_port()}"
    world = worker_pool.world("a", "b", "c", url=url, peer_timeout=6 * UNIT_S)  # silence of a busy machine is no death
    world["b"].run(references.hold_remote, "c")
    before = world["b"].run(functions.incarnation_of, 0)
    calling = world["b"].begin(functions.call_until_another_coordinator_answers, "c", "a", before)
    world["a"].kill()
    world.join("a", 0)
    assert calling.result() > 0
    for caller in "abc":
        for callee in "abc":
            eventually(partial(world[caller].run, functions.answers, callee), f"{callee} is reached by {caller}")
            world[caller].run(references.hold_remote, callee)
    assert world["b"].run(references.use_held) is not None
    gathering = [world[name].begin(functions.gather, name) for name in "abc"]
    assert [pending.result() for pending in gathering] == [{name: name for name in "abc"}] * 3
    leaving = [world[name].begin(functions.leave) for name in "abc"]
    assert [pending.result() for pending in leaving] == [{}] * 3


OUTSIDE = """
import signal, sys
from rpcdist.__main__ import main
sys.exit(main(["store", "127.0.0.1:0"]))
"""


@pytest.mark.multiproc
def test_with_a_store_outside_rank_0_comes_back_at_another_address(worker_pool: WorkerPool) -> None:
    """The store is that of `python -m rpcdist store`; no variable names an address of rank 0."""
    with Program(OUTSIDE) as store:
        variable, _, address = store.line().partition("=")
        assert variable == "RPCDIST_STORE"
        worker_pool.environment.update({variable: address, "MASTER_ADDR": None, "MASTER_PORT": None})
        world = worker_pool.world("a", "b", url="env://", peer_timeout=6 * UNIT_S)
        assert world["b"].run(functions.answers, "a")
        before = world["b"].run(functions.address_of, 0)
        world["a"].kill()
        worker_pool.environment["RPCDIST_HOST"] = "127.0.0.2"
        world.join("a", 0)
        eventually(partial(world["b"].run, functions.answers, "a"), "b reaches the next one")
        assert (before.rpartition(":")[0], world["b"].run(functions.address_of, 0).rpartition(":")[0]) == (
            "127.0.0.1",
            "127.0.0.2",
        )
        world.shutdown()


def value_of(name: str) -> int:
    return int(rpc.get_actor(name).rpc_sync().get())


@pytest.mark.parametrize("elastic", [False, True])
def test_actors_are_found_by_their_names_after_the_coordinator_was_replaced(elastic: bool) -> None:
    with InProcessCluster("a", "b", "c", elastic=elastic, peer_timeout=RETURN_S) as cluster:
        for number, owner in enumerate("bc"):
            cluster.run("b", partial(rpc.remote, owner, Value, (number,), serial=True, name=f"at {owner}")).to_here()
        cluster.run("b", partial(rpc.remote, "a", Value, (2,), serial=True, name="at a"))
        cluster.kill("a")
        cluster.restart("a")
        wait_until_taken_back(cluster, "a")
        for caller in cluster.names:
            assert [cluster.run(caller, value_of, name) for name in ("at b", "at c")] == [0, 1]
        with pytest.raises(UnknownActor, match="'at c'"):  # it ended with its worker
            cluster.run("b", rpc.get_actor, "at a")
        with pytest.raises(ActorNameTaken, match="worker 'c'"):
            cluster.run("a", partial(rpc.remote, "a", Value, (3,), serial=True, name="at c"))
        cluster.run("c", partial(rpc.remote, "a", Value, (4,), serial=True, name="at a"))
        assert cluster.run("b", value_of, "at a") == 4


@pytest.mark.parametrize("answer", [None, 7, [None, 3, "", "x" * 2000, "at b"]], ids=["none", "number", "list"])
def test_a_worker_that_lies_about_its_actors_harms_nobody(answer: object) -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=RETURN_S) as cluster:
        cluster.run("b", partial(rpc.remote, "b", Value, (1,), serial=True, name="at b")).to_here()

        async def lie() -> object:
            return answer

        with cluster.use("c") as agent:
            always: Any = agent.dispatcher.callables._always
            always[KEPT] = lie
        cluster.kill("a")
        cluster.restart("a")
        wait_until_taken_back(cluster, "a")
        assert cluster.run("c", value_of, "at b") == 1


def test_only_the_coordinator_asks_for_all_names() -> None:
    with InProcessCluster("a", "b", "c") as cluster:
        cluster.run("a", partial(rpc.remote, "b", Value, (1,), serial=True, name="of a")).to_here()
        with cluster.use("c") as agent, pytest.raises(CallRefused, match="'c' cannot speak for worker 'a'"):
            agent.caller.gather(1, KEPT, (), LIMIT_S)
        with cluster.use("a") as agent:
            assert agent.caller.gather(1, KEPT, (), LIMIT_S) == ["of a"]


def test_a_device_map_may_name_who_is_not_back_yet() -> None:
    """Of a whole world every name is known, so a wrong one is an error; of a part it cannot be told."""
    with InProcessCluster("a", "b", "c", peer_timeout=RETURN_S, device_maps={"c": {"cpu": "cuda:1"}}) as cluster:
        cluster.kill("a")
        cluster.kill("c")
        cluster.restart("a")
        wait_until_taken_back(cluster, "a")
        cluster.restart("c")
        assert cluster.run("a", rpc.rpc_sync, "b", add, (1, 2)) == 3
