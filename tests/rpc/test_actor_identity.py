"""One object is one actor, and keeps one thread, however it is reached."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import actor_functions as there
import pytest
from actor_functions import LIMIT_S, Bound, Counter, Journal, new_gate
from inside_agents import current_agent, turn_queues

from rpcdist import rpc
from rpcdist.errors import PoolExhausted, RRefError
from rpcdist.rpc import RRef
from rpcdist.rpc._actors.serial_actor import SerialActor, Turn
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.testing import InProcessCluster, eventually

ADDITIONS = 15


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", "c") as cluster:
        yield cluster


# ---------------------------------------------------------------- however it is reached

WAYS: dict[str, Callable[[RRef[Counter]], RRef[Counter]]] = {
    "a method returns it": lambda actor: actor.remote().itself(),
    "a method returns a reference to it": lambda actor: actor.rpc_sync().reference(),
    "a reference to a reference": lambda actor: actor.remote().reference().to_here(),
    "a container that holds it": lambda actor: actor.remote().in_a_list().remote().__getitem__(0),
    "a method of what a method returned": lambda actor: actor.remote().itself().remote().itself(),
    "a function that gets the reference": lambda actor: rpc.remote("b", there.the_object_of, (actor,)),
    "the same object once more": lambda actor: rpc.remote("b", there.the_object_of, (actor,), serial=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_the_object_lead_to_the_actor(cluster: InProcessCluster, way: str) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Counter, serial=True)
        other = WAYS[way](actor)
        elsewhere = [rpc.rpc_async(worker, there.add_through, (other, ADDITIONS)) for worker in ("b", "c")]
        calls: list[Any] = []
        for _ in range(ADDITIONS):
            calls += [actor.rpc_async().add_one(), other.rpc_async().add_one(), other.rpc_async().add_later()]
        made = [other.remote().add() for _ in range(ADDITIONS)]
        rpc.wait_all([*calls, *elsewhere])
        assert made[-1].rpc_sync().add_one() > ADDITIONS
        assert actor.rpc_sync().outcome() == (6 * ADDITIONS + 1, 1)


def test_a_method_that_an_actor_returned_takes_turns(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Counter, serial=True)
        method = actor.remote().method()
        rpc.wait_all([each() for _ in range(ADDITIONS) for each in (actor.rpc_async().add_one, method.rpc_async())])
        assert actor.rpc_sync().outcome() == (2 * ADDITIONS, 1)


def test_a_reference_to_an_actor_that_is_made_again(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Counter, serial=True, max_restarts=1)
        other = actor.rpc_sync().reference()
        assert isinstance(other, RRef), "a method gives its result, and not what awaiting that would give"
        rpc.wait_all([each.rpc_async().add_one() for _ in range(ADDITIONS) for each in (actor, other)])
        assert actor.rpc_sync().outcome() == (2 * ADDITIONS, 1)


def test_a_reference_that_the_constructor_gave_away(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Counter, ("a",), serial=True)
        assert actor.rpc_sync().add_one() == 1
        other: RRef[Counter] = rpc.rpc_sync("a", there.take_kept)
        rpc.wait_all([each.rpc_async().add_one() for _ in range(ADDITIONS) for each in (actor, other)])
        assert actor.rpc_sync().outcome() == (2 * ADDITIONS + 1, 1)


@pytest.mark.parametrize("way", ["a method returns it", "a method returns a reference to it"])
def test_the_order_of_the_calls_through_another_reference(cluster: InProcessCluster, way: str) -> None:
    with cluster.use("a"):
        journal = rpc.remote("b", Counter, serial=True)
        other = WAYS[way](journal)
        rpc.wait_all([other.rpc_async().note(i) for i in range(200)])
        rpc.rpc_sync("c", there.note_in_order, (other, 100))
        assert journal.rpc_sync().friends() == [*range(200), *range(100)]


def test_other_results_of_an_actor_are_no_actors(cluster: InProcessCluster) -> None:
    """Calls of them run at the same time, as of any object."""
    with cluster.use("a"):
        journal = rpc.remote("b", Journal, serial=True)
        new_gate("held")
        plain = journal.remote().note_elsewhere("c", "x")
        assert plain.to_here() == 3
        made: RRef[Journal] = rpc.remote("b", Holder, serial=True).remote().make()
        holding = made.rpc_async().hold("held")
        assert there.entered["held"].wait(LIMIT_S)
        assert made.rpc_sync().note("meanwhile") == 1
        assert list(made.rpc_sync().items()) == ["meanwhile"]  # a generator, which actors refuse
        there.gates["held"].set()
        assert holding.wait() == "held"


class Holder:
    def make(self) -> Journal:
        return Journal()


def test_objects_that_many_share_are_no_actors(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        nothing = rpc.remote("b", print, serial=True)
        assert nothing.to_here() is None
        assert rpc.remote("b", print).rpc_sync().__bool__() is False


@pytest.mark.parametrize("way", WAYS)
def test_an_actor_that_waits_for_itself_is_told(cluster: InProcessCluster, way: str) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Counter, serial=True)
        other = WAYS[way](actor)
        assert other.rpc_sync().add_one() == 1  # it is there: else it may have to wait for a later turn
        with pytest.raises(RRefError, match=r"calls add_one\(\) of the same actor and waits"):
            actor.rpc_sync().wait_for_itself(other)
        assert actor.rpc_sync().add_one() == 2


def test_an_actor_ends_with_the_last_reference_to_it_that_was_made_as_one(cluster: InProcessCluster) -> None:
    with cluster.use("b"):
        agent = current_agent()
    with cluster.use("a"):
        actor = rpc.remote("b", Counter, serial=True)
        again: RRef[Counter] = rpc.remote("b", there.the_object_of, (actor,), serial=True)
        assert again.rpc_sync().add_one() == 1
        assert len(agent.actors) == 2
        del actor
        current_agent().rrefs.drain()
        eventually(lambda: len(agent.actors) == 1)
        assert again.rpc_sync().add_one() == 2
        del again
        current_agent().rrefs.drain()
        eventually(lambda: len(agent.actors) == 0 and agent.pool.num_reserved == 0)


# ---------------------------------------------------------------- one thread


def keep_busy() -> list[rpc.Future[Any]]:
    return [rpc.rpc_async("b", time.sleep, (0.005,)) for _ in range(3)]


def test_an_actor_keeps_its_thread(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor, second = (rpc.remote("b", Bound, serial=True) for _ in range(2))
        for i in range(1, 30):
            others = keep_busy()
            actor.rpc_sync().take()
            if i % 2:  # the call comes by another way each time: from a thread that waits, in a burst, from elsewhere
                assert actor.rpc_sync().add(i) == i
            else:
                assert actor.rpc_async().add(i).wait() == i
            assert actor.rpc_sync().release() == 1
            rpc.wait_all(others)
        assert rpc.wait_all([actor.rpc_async().add(0) for _ in range(50)]) == list(range(30, 80))
        assert actor.rpc_sync().name() != second.rpc_sync().name()
        assert actor.rpc_sync().later() != actor.rpc_sync().name()
        assert actor.rpc_sync().ask(second) == 1
        assert rpc.rpc_sync("c", there.the_name_of, (actor,)) == actor.rpc_sync().name()


def test_an_actor_that_is_made_again_keeps_its_thread(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Bound, serial=True, max_restarts=1)
        for i in range(1, 20):
            others = keep_busy()
            actor.rpc_sync().take()
            assert actor.rpc_sync().add(i) == i
            assert actor.rpc_sync().release() == 1
            rpc.wait_all(others)


@pytest.mark.parametrize("owner", ["a", "b"])
def test_the_object_of_an_actor_ends_on_its_thread(cluster: InProcessCluster, owner: str) -> None:
    there.ended.clear()
    with cluster.use("a"):
        actors: list[Any] = [rpc.remote(owner, Bound, serial=True) for _ in range(20)]
        actors.append(rpc.remote("b", Bound, serial=True, max_restarts=1))
        rpc.wait_all([actor.rpc_async().add(0) for actor in actors])
        actors.clear()
        current_agent().rrefs.drain()
        eventually(lambda: len(there.ended) == 21)
    assert all(there.ended)


@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_thread_that_hands_a_call_to_an_actor_lets_go_of_the_object(
    cluster: InProcessCluster, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go on only when the call is over and the actor has ended: then it was the one that freed the object."""
    goes_on, handed_on = threading.Event(), list[Turn]()
    enter = SerialActor.enter

    def enter_slowly(self: SerialActor, turn: Turn) -> DeferredReply | None:
        reply = enter(self, turn)
        if not self.lane.is_here:
            handed_on.append(turn)
            goes_on.wait(LIMIT_S)
        return reply

    monkeypatch.setattr(SerialActor, "enter", enter_slowly)
    there.ended.clear()
    with cluster.use("a"):
        try:
            num_actors = 0
            while not handed_on:  # the thread of an actor may take its call itself
                actors = [rpc.remote(owner, Bound, serial=True) for _ in range(8)]
                rpc.wait_all([actor.rpc_async().add(0) for actor in actors])
                num_actors += len(actors)
                actors.clear()
            current_agent().rrefs.drain()
            eventually(lambda: len(there.ended) == num_actors)
        finally:
            goes_on.set()
    assert all(there.ended)


def test_the_object_of_an_actor_ends_on_its_thread_at_shutdown() -> None:
    there.ended.clear()
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        actor = rpc.remote("b", Bound, serial=True)
        actor.rpc_sync().add(0)
    eventually(lambda: there.ended == [True])


def test_actors_that_call_each_other_in_a_chain_need_no_thread_of_others(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        chain = [rpc.remote("b", Link, serial=True)]
        for _ in range(30):
            chain.append(rpc.remote("b", Link, (chain[-1],), serial=True))
        calls = [link.rpc_async().depth() for link in chain]
        assert rpc.wait_all(calls) == list(range(len(chain)))


class Link:
    def __init__(self, following: RRef[Any] | None = None) -> None:
        self.following = following

    def depth(self) -> int:
        return 0 if self.following is None else 1 + self.following.rpc_sync().depth()


def test_many_idle_actors_leave_the_pool_to_others(cluster: InProcessCluster) -> None:
    with cluster.use("b"):
        agent = current_agent()
    with cluster.use("a"):
        actors = [rpc.remote("b", Link, serial=True) for _ in range(100)]
        rpc.wait_all([actor.rpc_async().depth() for actor in actors])
        assert agent.pool.num_reserved == 100
        assert agent.pool.facts().threads < 50
        assert rpc.rpc_sync("b", pow, (2, 3)) == 8
        del actors
        current_agent().rrefs.drain()
        eventually(lambda: agent.pool.num_reserved == 0)


def test_more_actors_than_there_may_be_threads() -> None:
    with InProcessCluster("a", "b", max_worker_threads=4) as cluster, cluster.use("a"):
        actors = [rpc.remote("b", Link, serial=True) for _ in range(4)]
        assert rpc.wait_all([actor.rpc_async().depth() for actor in actors]) == [0] * 4
        one_more = rpc.remote("b", Link, serial=True)
        with pytest.raises(PoolExhausted, match=re.escape("max_worker_threads")):
            one_more.rpc_sync().depth()
        assert rpc.rpc_sync("b", pow, (2, 3)) == 8
        del one_more, actors
        current_agent().rrefs.drain()
        eventually(lambda: rpc.rpc_sync("b", there.num_reserved) == 0)
        assert rpc.remote("b", Link, serial=True).rpc_sync().depth() == 0


def test_an_actor_that_cannot_be_made_gives_its_thread_back(cluster: InProcessCluster) -> None:
    with cluster.use("b"):
        agent = current_agent()
    with cluster.use("a"):
        for _ in range(3):
            with pytest.raises(Exception, match="no number"):
                rpc.remote("b", int, ("no number",), serial=True).rpc_sync().bit_length()
        current_agent().rrefs.drain()
        eventually(lambda: agent.pool.num_reserved == 0 and len(agent.actors) == 0)


# ---------------------------------------------------------------- generators


@pytest.mark.parametrize("function", [there.rows, there.rows_of_an_open_database])
def test_a_generator_stays_on_its_thread(cluster: InProcessCluster, function: Callable[[int], Iterator[int]]) -> None:
    with cluster.use("a"):
        for i, row in enumerate(rpc.rpc_stream("b", function, (300,))):
            assert row == i
            if i % 40 == 0:  # it waits for its consumer now, and other threads are free
                rpc.wait_all(keep_busy())
        assert i == 299


def test_a_generator_that_is_given_up_ends_on_its_thread(cluster: InProcessCluster) -> None:
    there.ends.clear()
    with cluster.use("b"):
        agent = current_agent()
    with cluster.use("a"):
        stream = rpc.rpc_stream("b", there.rows, (100_000,))
        assert [next(stream) for _ in range(100)] == list(range(100))
        eventually(lambda: agent.pool.num_reserved == 1)  # it waits for its consumer, and the pool does not count it
        assert agent.pool.facts().threads < 10
        stream.close()
        eventually(lambda: there.ends == [(1, True)])
        eventually(lambda: agent.pool.num_reserved == 0)


def test_many_streams_that_wait_for_their_consumers() -> None:
    with InProcessCluster("a", "b", max_worker_threads=4) as cluster, cluster.use("a"):
        streams = [rpc.rpc_stream("b", there.rows, (1000,)) for _ in range(4)]
        assert [next(stream) for stream in streams] == [0] * 4
        eventually(lambda: rpc.rpc_sync("b", there.num_reserved) == 4)
        one_more = rpc.rpc_stream("b", there.rows, (1000,))
        with pytest.raises(PoolExhausted, match="max_worker_threads"):
            list(one_more)
        for stream in streams:
            stream.close()
        eventually(lambda: rpc.rpc_sync("b", there.num_reserved) == 0)


class Itself:
    """An actor that gives references to itself."""

    def itself(self) -> Itself:
        return self

    def number(self) -> int:
        return 3


def test_an_actor_forgets_callers_with_the_reference_through_which_they_called() -> None:
    """It kept a queue for each reference that there has ever been, as long as its caller lived."""
    with InProcessCluster("a", "b") as cluster:
        with cluster.use("b"):
            actor = rpc.remote("a", Itself, serial=True)
            for _ in range(20):
                again = actor.remote().itself()
                assert again.rpc_sync().number() == 3
                again = rpc.remote("a", there.the_object_of, (actor,), serial=True)
                assert again.rpc_sync().number() == 3
                del again
            assert actor.rpc_sync().number() == 3
        with cluster.use("a") as agent:
            [queue] = turn_queues(agent)
            eventually(lambda: len(queue.callers) == 1 and not agent.actors._called_by, "one reference is left")
        with cluster.use("b"):
            del actor
