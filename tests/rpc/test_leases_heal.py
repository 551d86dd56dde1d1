"""A worker that was silent for longer than its lease: new references work when it is back, old ones say why not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest
from own_shortages import no_free_descriptor
from peer_timeouts import LIMIT_S, UNIT_S
from rpc_functions import add

from rpcdist import rpc
from rpcdist.errors import LeaseExpired, OwnerLost, RpcdistError, RRefError
from rpcdist.ids import Identity
from rpcdist.rpc._peers.connections import LeaseWatch
from rpcdist.rpc._peers.directory import PeerEvents
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport.session import Session


@pytest.fixture
def cluster() -> InProcessCluster:
    return InProcessCluster("a", "b", "c", peer_timeout=UNIT_S)


def sum_at(owner: str) -> int:
    return int(rpc.remote(owner, add, (1, 2)).to_here())


def lease_end(cluster: InProcessCluster, owner: str, user: str) -> threading.Event:
    """Is set when the owner ends the user's lease."""
    ended = threading.Event()
    with cluster.use(owner) as agent:
        agent.events.lease_ended.listen(lambda identity: ended.set() if identity.name == user else None)
    return ended


def test_new_references_work_at_once(cluster: InProcessCluster) -> None:
    """The first thing that a user does after the network is back is `remote()`: nobody has called anybody before."""
    pairs = [("a", "b"), ("b", "a"), ("c", "b")]  # owner and user, the coordinator among them
    with cluster:
        held = {(owner, user): cluster.run(user, rpc.remote, owner, add, (1, 2)) for owner, user in pairs}
        assert [cluster.run(user, held[owner, user].to_here) for owner, user in pairs] == [3] * 3
        ended = [lease_end(cluster, owner, user) for owner, user in pairs]
        cluster.network.drop("a", "b")
        cluster.network.cut("c", "b")
        assert all(one.wait(LIMIT_S) for one in ended)
        cluster.network.heal("a", "b")
        cluster.network.heal("c", "b")
        assert [cluster.run(user, sum_at, owner) for owner, user in pairs] == [3] * 3
        new = [(user, cluster.run(user, rpc.remote, owner, add, (2, 2))) for owner, user in pairs]
        for (_, user), old in held.items():
            with pytest.raises(OwnerLost):
                cluster.run(user, old.to_here)
        assert [cluster.run(user, one.to_here) for user, one in new] == [4] * 3  # the old ones were refused, not these
        del held, old, new
        for name in cluster.names:
            with cluster.use(name) as agent:
                eventually(lambda: agent.rrefs.debug_info()["num_forks"] == "0", "the owner counts nothing")


def test_a_user_that_noticed_nothing_is_told(cluster: InProcessCluster) -> None:
    """Only the owner gave the other one up, as when the user's process stood still."""
    with cluster:
        held, forgotten = (cluster.run("b", rpc.remote, "c", add, (1, number)) for number in (1, 2))
        assert [cluster.run("b", one.to_here) for one in (held, forgotten)] == [2, 3]
        with cluster.use("b") as user, cluster.use("c") as owner:
            owner.events.lease_ended.publish(user.identity)
            owner.events.found.publish(user.identity)
        eventually(lambda: cluster.run("b", _error_of, held) is LeaseExpired, "the user learns it")
        new = cluster.run("b", rpc.remote, "c", add, (2, 2))
        with pytest.raises(LeaseExpired, match="'c' received nothing from this process for too long"):
            cluster.run("b", forgotten.to_here)
        assert cluster.run("b", new.to_here) == 4


def test_a_listener_that_fails_keeps_no_event_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    events, told = PeerEvents(), list[Identity]()
    worker = Identity("b", 1, 7)
    events.replaced.listen(told.append)
    events.replaced.listen(lambda identity: 1 / 0)
    events.replaced.listen(told.append)
    events.replaced.publish(worker)
    assert told == [worker, worker]
    assert "could not handle an event" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_session_that_outlives_a_lease_begins_another_one() -> None:
    """The owner was held up itself: what it reads next comes on the sessions that it has."""
    events, told = PeerEvents(), list[str]()
    events.lease_ended.listen(lambda identity: told.append("ended"))
    events.found.listen(lambda identity: told.append("found"))
    session = SimpleNamespace(peer=Identity("user", 1, 5), last_received=time.monotonic() - 1e6)
    watch = LeaseWatch(1e3, lambda: [cast(Session, session)], events)
    watch.renew(time.monotonic())
    assert told == ["ended"]
    session.last_received = time.monotonic()
    watch.renew(time.monotonic())
    watch.renew(time.monotonic())
    assert told == ["ended", "found"]


def test_a_process_without_a_free_descriptor_ends_no_lease() -> None:
    """The user may live all the same: nobody can connect to this process."""
    events, told = PeerEvents(), list[Identity]()
    events.lease_ended.listen(told.append)
    sessions = [SimpleNamespace(peer=Identity("user", 1, 5), last_received=time.monotonic() - 1e6)]
    watch = LeaseWatch(1e3, lambda: cast(list[Session], sessions), events)
    with no_free_descriptor():
        watch.renew(time.monotonic())
    sessions.clear()
    watch.renew(time.monotonic())  # there is a whole lease from the shortage on
    assert told == []


def test_a_look_at_the_connections_is_as_rare_as_heartbeats() -> None:
    """Looks come ten times a second, also at a worker with a thousand connections."""
    looks = list[float]()

    def sessions() -> list[Session]:
        looks.append(now)
        return []

    watch = LeaseWatch(40.0, sessions, PeerEvents())
    for now in (1000.0, 1000.1, 1009.9, 1010.0, 1010.1, 1020.0):
        watch.check(now)
    assert looks == [1000.0, 1010.0, 1020.0]


def _error_of(held: rpc.RRef[int]) -> type[Exception] | None:
    try:
        held.to_here()
    except RRefError as exc:
        return type(exc)
    return None


def test_what_is_dropped_while_connections_are_refused_is_told_later(cluster: InProcessCluster) -> None:
    """The user gives the owner up, which lives and may go on counting: the leases of both go on."""
    with cluster:
        held = [cluster.run("b", rpc.remote, "c", add, (1, number)) for number in range(3)]
        assert [cluster.run("b", one.to_here) for one in held] == [1, 2, 3]
        ended = lease_end(cluster, "c", "b")
        with cluster.use("b") as user, cluster.use("c") as owner:
            cluster.network.cut("b", "c")
            eventually(lambda: user.rrefs.is_lost(owner.worker_id), "the user has given the owner up")
            cluster.network.heal("b", "c")
            assert cluster.run("c", sum_at, "b") == 3  # the worker that connects first
            eventually(lambda: owner.rrefs.debug_info()["num_forks"] == "0", "the owner counts nothing")
            assert not ended.is_set()
        del held


entered, may_answer = threading.Event(), threading.Event()


def answer_late(is_own: bool) -> rpc.RRef[int]:
    """A reference, made before its caller died, and sent when another process has its place."""
    made: rpc.RRef[int] = rpc.RRef(3) if is_own else rpc.remote("c", add, (1, 2))
    assert made.to_here() == 3
    entered.set()
    assert may_answer.wait(LIMIT_S)
    return made


@pytest.mark.parametrize("is_own", [True, False], ids=["of the callee", "of a third worker"])
def test_a_reference_for_a_caller_that_was_replaced_is_given_up(is_own: bool) -> None:
    """The share is the dead process's. The new one was asked for it, and could give up nothing in its name."""
    entered.clear()
    may_answer.clear()
    with InProcessCluster("a", "b", "c", "x", peer_timeout=UNIT_S) as cluster:
        ended = [lease_end(cluster, name, "x") for name in ("b", "c")]
        call = cluster.begin("x", rpc.rpc_sync, "b", answer_late, (is_own,))
        assert entered.wait(LIMIT_S)
        cluster.kill("x")
        with pytest.raises(RpcdistError):
            call.result(LIMIT_S)
        cluster.restart("x")
        assert ended[0].wait(LIMIT_S)
        assert cluster.run("b", rpc.rpc_sync, "x", add, (1, 2)) == 3
        may_answer.set()
        eventually(
            lambda: not any(cluster.run(name, rpc.debug_rrefs) for name in ("b", "c")), "nothing is left", LIMIT_S
        )
