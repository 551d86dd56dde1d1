"""`rpc.remote(..., serial=True)`: one call at a time, in the order of each caller, whatever happens to single calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import actor_functions as there
import pytest
import torch
from actor_functions import LIMIT_S, Journal, new_gate
from inside_agents import current_agent

from rpcdist import rpc
from rpcdist.errors import Cancelled, DeadlineExceeded, RRefError, SerializationError, WorkerLost
from rpcdist.rpc import RRef
from rpcdist.testing import InProcessCluster, eventually

NUM_CALLS = 300


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", "c") as cluster:
        yield cluster


def journal(owner: str = "b", gate: str | None = None) -> RRef[Journal]:
    return rpc.remote(owner, Journal, (gate,), serial=True)


def notes(actor: RRef[Journal]) -> list[object]:
    found: list[object] = actor.rpc_sync().notes()
    return found


@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.parametrize("method", ["note", "note_later"])
def test_calls_run_in_the_order_in_which_they_were_made(cluster: InProcessCluster, owner: str, method: str) -> None:
    with cluster.use("a"):
        actor = journal(owner)
        counts = rpc.wait_all([getattr(actor.rpc_async(), method)(i) for i in range(NUM_CALLS)])
        assert counts == list(range(1, NUM_CALLS + 1))
        assert notes(actor) == list(range(NUM_CALLS))
        assert actor.rpc_sync().num_overlaps() == 0


def test_plain_and_coroutine_methods_do_not_overlap(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = journal()
        methods = [("note", "note_later")[i % 2] for i in range(NUM_CALLS)]
        rpc.wait_all([getattr(actor.rpc_async(), method)(i) for i, method in enumerate(methods)])
        assert notes(actor) == list(range(NUM_CALLS))
        assert actor.rpc_sync().num_overlaps() == 0


def test_large_and_small_calls_keep_their_order(cluster: InProcessCluster) -> None:
    """A large call arrives in pieces, between which small ones pass."""
    with cluster.use("a"):
        actor = rpc.remote("b", Journal, serial=True)
        padding = torch.zeros(1 << 18)
        rpc.wait_all([actor.rpc_async().note(i, *([padding] if i % 3 == 0 else [])) for i in range(60)])
        assert notes(actor) == list(range(60))


def test_builtin_types_are_actors_too(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor: RRef[list[int]] = rpc.remote("b", list, serial=True)
        rpc.wait_all([actor.rpc_async().append(i) for i in range(NUM_CALLS)])
        assert actor.to_here() == list(range(NUM_CALLS))


def test_calls_wait_for_an_actor_that_is_not_created_yet(cluster: InProcessCluster) -> None:
    for owner in ("a", "b"):
        with cluster.use("a"):
            gate = new_gate(owner)
            actor = journal(owner, gate=owner)
            calls = [actor.rpc_async().note(i) for i in range(50)]
            assert not any(call.done() for call in calls)
            gate.set()
            rpc.wait_all(calls)
            assert notes(actor) == list(range(50))


def test_each_caller_has_its_order(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = journal()
        calls = [rpc.rpc_async(name, there.note_through, (actor, 0, 100)) for name in ("a", "b", "c")]
        rpc.wait_all(calls)
        found = notes(actor)
        for name in ("a", "b", "c"):
            assert [note for note in found if note[0] == name] == [(name, i) for i in range(100)]  # type: ignore[index]


def test_an_actor_that_blocks_holds_up_nobody_else(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("block")
        blocked, other = journal(), journal()
        holding = blocked.rpc_async().hold("block")
        assert there.entered["block"].wait(LIMIT_S)
        waiting = [blocked.rpc_async().note(i) for i in range(NUM_CALLS)]
        assert other.rpc_sync().note("free") == 1
        assert rpc.rpc_sync("b", pow, (2, 3)) == 8
        with cluster.use("b"):
            eventually(lambda: current_agent().pool.facts().queued == 0)
            stats = current_agent().pool.facts()
        assert stats.threads < 50, stats  # those that wait hold no thread
        assert not any(call.done() for call in waiting)
        gate.set()
        assert holding.wait() == "block"
        rpc.wait_all(waiting)


def test_results_that_stay_at_the_owner_come_in_order(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = journal()
        counts = [actor.remote().note(i) for i in range(20)]
        assert [count.to_here() for count in counts] == list(range(1, 21))


def test_errors_and_attributes(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = journal()
        with pytest.raises(KeyError, match="fail"):
            actor.rpc_sync().fail()
        with pytest.raises(AttributeError, match="no_such_method"):
            actor.rpc_sync().no_such_method()
        with pytest.raises(TypeError, match=r"items\(\) of the actor Journal is a generator function.*serial=True"):
            actor.rpc_sync().items()
        assert actor.rpc_sync().note_elsewhere("c", "x") == 3
        assert actor.call(Journal.note_later, "y") == 2
        assert actor.rpc_sync().num_overlaps() == 0
        assert notes(actor) == ["x", "y"]


async def test_in_coroutines(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = journal()
        counts = await asyncio.gather(*(actor.call_async(Journal.note_later, i) for i in range(50)))
        assert counts == list(range(1, 51))


def test_a_call_that_waits_for_itself_is_refused(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = journal()
        with pytest.raises(RRefError, match=r"calls note\(\) of the same actor and waits for it"):
            actor.rpc_sync().ask_itself(actor)
        actor.rpc_sync().ask_itself_later(actor)
        eventually(lambda: notes(actor) == ["later"])


# ---------------------------------------------------------------- single calls that go wrong


def test_the_deadline_of_a_call_that_waits_passes_by_name(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("deadline")
        actor = journal()
        holding = actor.rpc_async().hold("deadline")
        assert there.entered["deadline"].wait(LIMIT_S)
        late = actor.rpc_async(timeout=0.1).note("late")
        behind = actor.rpc_async().note("behind")
        with pytest.raises(DeadlineExceeded, match="'b'"):
            late.wait()
        with cluster.use("b"):  # where the deadline is later by the time of the way
            eventually(lambda: any(call.deadline.expired() for call in current_agent().dispatcher.calls))
        gate.set()
        assert holding.wait() == "deadline" and behind.wait() == 1
        assert notes(actor) == ["behind"]


def test_the_deadline_of_the_call_that_runs_says_so(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("runs")
        actor = journal()
        assert actor.rpc_sync().note(1) == 1
        with pytest.raises(DeadlineExceeded, match="had been running on 'b' for"):
            actor.rpc_sync(timeout=1.5).hold("runs")
        with pytest.raises(DeadlineExceeded, match="its turn at an actor"):
            actor.rpc_sync(timeout=1.5).note(2)
        gate.set()


def test_a_cancelled_call_that_waits_never_runs(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("cancel")
        actor = journal()
        holding = actor.rpc_async().hold("cancel")
        assert there.entered["cancel"].wait(LIMIT_S)
        calls = [actor.rpc_async().note(i) for i in range(10)]
        at_owner = cluster.run("b", current_agent).dispatcher.calls
        eventually(lambda: len(at_owner) == 11)
        assert all(call.cancel() for call in calls[::2])
        eventually(lambda: len(at_owner) == 6)
        gate.set()
        holding.wait()
        rpc.wait_all(calls[1::2])
        assert notes(actor) == [1, 3, 5, 7, 9]
        with pytest.raises(Cancelled):
            calls[0].wait()


def test_a_running_coroutine_is_cancelled_and_the_next_call_comes_after_its_end(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        new_gate("never")
        actor = journal()
        holding = actor.rpc_async().hold_later("never")
        assert there.entered["never"].wait(LIMIT_S)
        behind = actor.rpc_async().note("behind")
        assert holding.cancel()
        behind.wait()
        assert notes(actor) == ["end of never", "behind"]


def test_calls_that_cannot_be_sent_or_read_hold_up_nobody(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("bad")
        actor = journal()
        holding = actor.rpc_async().hold("bad")
        assert there.entered["bad"].wait(LIMIT_S)
        first = actor.rpc_async().note(1)
        with pytest.raises(TypeError, match="not this one"):
            actor.rpc_async().note(there.Unpicklable())
        refused = actor.rpc_async().note(there.UnpicklableThere())
        last = actor.rpc_async().note(2)
        with pytest.raises(SerializationError, match="not here"):
            refused.wait()
        gate.set()
        rpc.wait_all([holding, first, last])
        assert notes(actor) == [1, 2]


def test_calls_that_were_lost_with_their_connection_are_not_waited_for(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("cut")
        actor = journal()
        actor._get_future().wait()  # the answer of a method may overtake that of the creation, which the cut would lose
        assert actor.rpc_sync().note("before") == 1
        holding = actor.rpc_async().hold("cut")
        assert there.entered["cut"].wait(LIMIT_S)
        lost = [actor.rpc_async().note(i) for i in range(5)]
        cluster.network.cut("a", "b")
        for call in [holding, *lost]:
            with pytest.raises(WorkerLost):
                call.wait(LIMIT_S)
        cluster.network.heal("a", "b")
        gate.set()
        assert actor.rpc_sync().note("after") == 2
        assert notes(actor) == ["before", "after"]


def test_the_death_of_the_owner_fails_all(cluster: InProcessCluster) -> None:
    new_gate("death")
    with cluster.use("a"):
        actor = journal()
        holding = actor.rpc_async().hold("death")
        assert there.entered["death"].wait(LIMIT_S)
        waiting = [actor.rpc_async().note(i) for i in range(5)]

        def open_when_lost() -> None:  # the end of the killed worker waits for its pool
            holding.exception(LIMIT_S)
            there.gates["death"].set()

        cluster.begin("a", open_when_lost)
        cluster.kill("b")
        for call in [holding, *waiting]:
            with pytest.raises(WorkerLost, match="'b'"):
                call.wait(LIMIT_S)
        with pytest.raises(WorkerLost, match="'b'"):
            actor.rpc_sync().note("x")
    cluster.restart("b")


def test_the_death_of_a_caller_frees_the_actor_for_others(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("caller")
        actor = journal()
        holding = actor.rpc_async().hold("caller")
        assert there.entered["caller"].wait(LIMIT_S)
        through = rpc.rpc_async("c", there.note_through, (actor, 0, 20))
        with cluster.use("b"):
            eventually(lambda: len(current_agent().dispatcher.calls) >= 21)
        behind = actor.rpc_async().note("behind")
        cluster.kill("c")
        with pytest.raises(WorkerLost):
            through.wait(LIMIT_S)
        with cluster.use("b"):  # its calls are cancelled there
            eventually(lambda: len(current_agent().dispatcher.calls) <= 2)
        gate.set()
        assert holding.wait() == "caller" and behind.wait() == 1
        assert notes(actor) == ["behind"]
    cluster.shutdown(graceful=False)  # or it waits until the lease of the dead one ends


def test_an_actor_ends_with_its_last_reference(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = journal()
        actor.rpc_sync().note(1)
        with cluster.use("b"):
            assert len(current_agent().actors) == 1
            del actor
            eventually(lambda: len(current_agent().actors) == 0)
