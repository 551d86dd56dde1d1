"""A worker that has the token speaks for another one: in gatherings, in the shutdown, and to one that serves."""

from __future__ import annotations

from functools import partial

import pytest
from inside_agents import agent_of, turn_queues
from peer_timeouts import CALM_S, LIMIT_S

from rpcdist import rpc
from rpcdist._proto import membership_pb2, rpc_pb2
from rpcdist.errors import CallRefused, Overloaded, RpcdistError, UnknownActor
from rpcdist.rpc._actors import actor_names
from rpcdist.rpc._actors.actor_names import CONFIRM, RELEASE, RESERVE
from rpcdist.rpc._api.call_functions import keep_actor
from rpcdist.rpc._membership.barrier import CONTRIBUTE
from rpcdist.rpc._membership.roster_messages import members_to_bytes
from rpcdist.rpc._membership.shutdown import DEPART, STOP
from rpcdist.rpc._peers.directory import Member
from rpcdist.rpc._peers.network import check_speaks_for
from rpcdist.rpc._rref.proxied import _turns_over
from rpcdist.testing import InProcessCluster
from rpcdist.transport.identities import identity_to_proto


class Journal:
    """An actor."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


CLAIMS = {
    "a gathering": (CONTRIBUTE, (["a", "b", "c"], "c", "forged", True)),
    "the shutdown": (DEPART, ("c", False)),
    "a request to stop": (STOP, ("c",)),
    "a name for an actor": (RESERVE, ("journal", 0, 2)),
    "an actor that is there": (CONFIRM, ("journal", 2)),
    "an actor that is not made": (RELEASE, ("journal", 2)),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_nobody_speaks_for_another_worker(claim: str) -> None:
    function, arguments = CLAIMS[claim]
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        with cluster.use("b") as agent:
            with pytest.raises(CallRefused, match="worker 'b' cannot speak for worker 'c'"):
                agent.caller.gather(0, function, arguments, LIMIT_S)
        gathering = [cluster.begin(name, rpc.api._all_gather, f"of {name}") for name in ("a", "b", "c")]
        assert gathering[0].result(LIMIT_S) == {name: f"of {name}" for name in "abc"}


def test_a_name_counts_only_where_its_worker_is_known_to_have_called() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster, cluster.use("b"):
        with pytest.raises(CallRefused, match="code that no worker has called cannot speak for worker 'b'"):
            rpc.rpc_sync("a", check_speaks_for, ("b",))


def test_nobody_ends_the_calls_of_another_worker_at_an_actor() -> None:
    """The message was believed whose calls had ended: calls of another worker were not waited for any more."""
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        actor = cluster.run("c", partial(rpc.remote, "a", Journal, (), serial=True, name="journal"))
        cluster.run("c", lambda: actor.rpc_sync().note("first"))
        with cluster.use("a") as agent:
            [queue] = turn_queues(agent)
            of_c = next(iter(queue._callers.values()))
        with cluster.use("b"):
            there = rpc.get_actor("journal")
            rpc.rpc_sync("a", _turns_over, (there, 0, (1, 2, 3)))
            with pytest.raises(TypeError):
                rpc.rpc_sync("a", _turns_over, (there, (2, 1), 0, (1, 2, 3)))
            for stream, numbers in ((0, [1]), ("0", (1,)), (0, ("1",)), (0, 1)):
                with pytest.raises(RpcdistError, match="needs the number"):
                    rpc.rpc_sync("a", _turns_over, (there, stream, numbers))
        assert of_c.over == set() and len(queue._callers) == 2


def test_an_actor_is_kept_under_a_name_only_for_who_has_reserved_it() -> None:
    """A peer with the token could put a value of its own under the name of another actor, and any number of them."""
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        cluster.run("b", partial(rpc.remote, "a", Journal, (), serial=True, name="journal"))
        with cluster.use("c") as agent:
            forged = rpc.remote("a", Journal, (), serial=True)
            for name in ("journal", "another"):
                with pytest.raises(CallRefused, match=f"'c' has not reserved the name '{name}'"):
                    rpc.rpc_sync("a", keep_actor, (name, forged))
            agent.actor_names.reserve("elsewhere", 1, LIMIT_S)
            with pytest.raises(CallRefused, match="'c' has not reserved"):
                rpc.rpc_sync("a", keep_actor, ("elsewhere", forged))
            agent.actor_names.release("elsewhere", LIMIT_S)
            del forged
        with cluster.use("b"):
            rpc.get_actor("journal").rpc_sync().note("mine")


@pytest.mark.parametrize(("allowed", "stops"), [([], False), ([STOP], True)])
def test_where_functions_are_listed_nobody_stops_a_worker_unless_that_is_listed(
    allowed: list[str], stops: bool
) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S, allow_functions=allowed) as cluster:
        serving = cluster.begin("a", rpc.serve)
        with cluster.use("b"):
            if stops:
                rpc.stop_serving("a")
                assert serving.result(LIMIT_S) == "worker 'b' asked for it"
            else:
                with pytest.raises(CallRefused, match=r"does not allow calls of rpcdist.rpc._membership.serving:stop"):
                    rpc.stop_serving("a")
        with cluster.use("a") as agent:
            agent.serving.stop("the test is over")


def test_who_is_there_is_said_by_the_coordinator_alone() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        gone = membership_pb2.Departure(identity=identity_to_proto(agent_of(cluster, "a").identity), reason="forged")
        members = members_to_bytes([Member(agent_of(cluster, "c").identity, "127.0.0.1:9")])
        news = membership_pb2.MembershipMessage(version=1 << 40, members=members, departures=[gone])
        before = agent_of(cluster, "b").directory.living()
        with cluster.use("c") as agent:
            for worker in ("a", "b"):
                rpc.rpc_sync(worker, abs, (-1,))  # connects
                session = agent.router.session_with(rpc.get_worker_info(worker).id)
                assert session is not None
                session.send(rpc_pb2.Message(membership=news))
                rpc.rpc_sync(worker, abs, (-1,))  # comes after it
        for name in ("a", "b"):
            directory = agent_of(cluster, name).directory
            assert directory.living() == before and directory.losses() == {}
        with cluster.use("b"):
            assert rpc.rpc_sync("a", abs, (-1,)) == rpc.rpc_sync("c", abs, (-1,)) == 1


def test_names_of_actors_take_a_bounded_part_of_the_memory_of_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker could also take all names, so that no other worker could name an actor."""
    monkeypatch.setattr(actor_names, "MAX_NAMES", 6)
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S, allow_functions=[]) as cluster:
        with cluster.use("b") as agent:
            for name in ("x" * (actor_names.MAX_NAME_CHARS + 1), "", b"bytes", ["a list"], None):
                with pytest.raises(CallRefused, match="a string of 1 to 1000 characters"):
                    agent.caller.gather(0, RESERVE, (name, 1, 1), LIMIT_S)
            for number in range(3):
                agent.caller.gather(0, RESERVE, (f"actor {number}", 1, 1), LIMIT_S)
            for owner in (0, 1, 2):  # it counts who creates them, and not where
                with pytest.raises(Overloaded, match=r"worker 'b' has created 3 of the 3 named actors .* at most 6"):
                    agent.caller.gather(0, RESERVE, ("one more", owner, 1), LIMIT_S)
            with pytest.raises(UnknownActor, match="Did you mean 'actor 1'"):
                agent.actor_names.find("actors 1", LIMIT_S)
            agent.caller.gather(0, RELEASE, ("actor 0", 1), LIMIT_S)
            agent.caller.gather(0, RESERVE, ("one more", 1, 1), LIMIT_S)
        for number, name in ((2, "c"), (0, "a")):  # names are left for the others
            with cluster.use(name) as agent:
                agent.caller.gather(0, RESERVE, (f"of {name}", number, number), LIMIT_S)
        with cluster.use("b") as agent, pytest.raises(Overloaded, match="worker 'b' has created 3 of the"):
            agent.caller.gather(0, RESERVE, ("the last", 1, 1), LIMIT_S)
