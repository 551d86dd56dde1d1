"""A worker with the token names references, and shares of them, that it does not hold."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from inside_agents import agent_of, control_outbox, handle_of, peers_of
from peer_timeouts import CALM_S, LIMIT_S

from rpcdist import rpc
from rpcdist._proto import rpc_pb2, rref_pb2, value_pb2
from rpcdist.errors import ProtocolViolation, RRefError
from rpcdist.ids import UniqueId, new_number
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._marshal.arrived_value import ArrivedValue
from rpcdist.rpc._rref import proxied
from rpcdist.rpc._rref.messages import ReferenceShare, id_to_pb
from rpcdist.rpc._rref.owner import OwnerEntry
from rpcdist.rpc._values.plain import FREE_BYTES, REFERENCE_BYTES
from rpcdist.testing import InProcessCluster, eventually

OWNER, USER, ATTACKER = 0, 1, 2
received: list[Any] = []
REFUSED = "the requesting worker does not hold the share that it named"


class Secret:
    """A value that lives at the owner."""

    may_tell = threading.Event()

    def tell(self) -> str:
        return "secret"

    def tell_late(self) -> str:
        assert self.may_tell.wait(LIMIT_S)
        return "late"


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("owner", "user", "attacker", peer_timeout=CALM_S) as cluster:
        yield cluster


def create(cluster: InProcessCluster, at: str) -> Any:
    rref = cluster.run(at, partial(rpc.remote, "owner", Secret))
    assert tells(cluster, rref, at) == "secret"
    return rref


def tells(cluster: InProcessCluster, rref: Any, at: str = "user") -> Any:
    return cluster.run(at, lambda: rref.rpc_sync().tell())


def receive(rref: Any) -> None:
    received.append(rref)


def share_of(rref: Any) -> ReferenceShare:
    state = handle_of(rref)
    return ReferenceShare(state.rref, state.id)


def fetch(cluster: InProcessCluster, share: ReferenceShare, at: str = "attacker") -> Any:
    with cluster.use(at) as agent:
        return agent.caller.fetch(OWNER, share, LIMIT_S)


def call_method(cluster: InProcessCluster, share: ReferenceShare, at: str = "attacker") -> Any:
    named: Any = SimpleNamespace(state=SimpleNamespace(rref=share.rref, id=share.fork))
    with cluster.use(at) as agent:
        return agent.caller.sync(OWNER, Invocation(proxied._local_invoke, ("tell", (), {}), None, LIMIT_S, named))


def say(cluster: InProcessCluster, to: str, *messages: rref_pb2.RRefMessage, at: str = "attacker") -> None:
    """Sends control messages, and waits until they are there."""
    with cluster.use(at) as agent:
        assert rpc.rpc_sync(to, abs, (-1,)) == 1  # connects
        session = agent.router.session_with(rpc.get_worker_info(to).id)
        assert session is not None
        for message in messages:
            session.send(rpc_pb2.Message(rref=message))
        assert rpc.rpc_sync(to, abs, (-1,)) == 1  # comes after them


def about(share: ReferenceShare) -> dict[str, Any]:
    return {"rref": id_to_pb(share.rref), "fork": id_to_pb(share.fork)}


def entry_of(cluster: InProcessCluster, share: ReferenceShare) -> OwnerEntry | None:
    with cluster.use("owner") as agent:
        return agent.rrefs.protocol.owners.entries.get(share.rref)


@pytest.mark.parametrize("use", [fetch, call_method])
def test_a_value_goes_only_to_who_holds_the_share_that_he_names(cluster: InProcessCluster, use: Any) -> None:
    """The owner looked up the value alone: any peer that knew its number was served, although it belonged to a process
    that counts its references.
    """
    rref = create(cluster, "user")
    share, own = share_of(rref), UniqueId(ATTACKER, new_number(0), agent_of(cluster, "attacker").identity.incarnation)
    for fork in (share.fork, own, share.rref, UniqueId(USER, 1, share.fork.incarnation)):
        with pytest.raises(RRefError, match=REFUSED):
            use(cluster, ReferenceShare(share.rref, fork))
    guessed = ReferenceShare(UniqueId(USER, 0, share.rref.incarnation), own)
    with pytest.raises(RRefError, match="the owner 'owner' does not know"):
        use(cluster, guessed)
    assert tells(cluster, rref) == "secret"
    del rref


@pytest.mark.parametrize("use", [fetch, call_method])
def test_a_share_that_was_released_is_of_no_use(cluster: InProcessCluster, use: Any) -> None:
    kept = create(cluster, "user")
    cluster.run("user", partial(rpc.rpc_sync, "attacker", receive, (kept,)))
    released = received.pop()
    share = share_of(released)
    assert isinstance(fetch(cluster, share), Secret) and call_method(cluster, share) == "secret"
    entry = entry_of(cluster, share)
    assert entry is not None and share.fork in entry.forks
    del released
    eventually(lambda: share.fork not in entry.forks, "the owner was told", LIMIT_S)
    with pytest.raises(RRefError, match=REFUSED):
        use(cluster, share)
    del kept


def test_a_share_ends_and_is_counted_by_the_word_of_its_holder_alone(cluster: InProcessCluster) -> None:
    """A peer that asked the owner to count a share took the share from its holder, and could then end it."""
    rref = create(cluster, "user")
    share = share_of(rref)
    say(
        cluster,
        "owner",
        rref_pb2.RRefMessage(fork_request=rref_pb2.ForkRequest(**about(share))),
        rref_pb2.RRefMessage(user_deleted=rref_pb2.UserDeleted(**about(share))),
        rref_pb2.RRefMessage(share_lost=rref_pb2.ShareLost(**about(share))),
    )
    entry = entry_of(cluster, share)
    assert entry is not None and entry.forks[share.fork].worker == USER
    assert tells(cluster, rref) == "secret"
    del rref
    eventually(lambda: entry_of(cluster, share) is None, "the user's word ends it", LIMIT_S)


def test_only_its_creator_gives_up_a_creation(cluster: InProcessCluster) -> None:
    """After a peer had named the reference, its call was refused, although its creator was about to make it."""
    incarnation = agent_of(cluster, "user").identity.incarnation
    share = ReferenceShare(*(UniqueId(USER, new_number(0), incarnation) for _ in range(2)))
    say(
        cluster,
        "owner",
        rref_pb2.RRefMessage(creation_query=rref_pb2.CreationQuery(**about(share))),
        rref_pb2.RRefMessage(creation_over=rref_pb2.CreationOver(rref=id_to_pb(share.rref))),
    )
    with cluster.use("owner") as agent:
        assert share.rref not in agent.rrefs.protocol.owners.refused
    with cluster.use("attacker") as agent, pytest.raises(RRefError, match=REFUSED):
        creates_as_another(agent, share)
    assert entry_of(cluster, share) is None
    with cluster.use("user") as agent:
        creates_as_another(agent, share)
        assert call_method(cluster, share, "user") == "secret"


def creates_as_another(agent: Any, share: ReferenceShare) -> None:
    """A call of `remote()` whose result has given numbers."""
    outcome: list[BaseException | None] = []
    reports = SimpleNamespace(
        on_created=lambda share: outcome.append(None), on_creation_failed=lambda share, exc: outcome.append(exc)
    )
    agent.caller.remote(OWNER, Invocation(Secret, timeout_s=LIMIT_S), share, reports)
    agent.router.flush(OWNER)
    eventually(lambda: outcome, "the owner has answered", LIMIT_S)
    if outcome[0] is not None:
        raise outcome[0]


def test_verdicts_on_a_share_count_from_its_owner_alone(cluster: InProcessCluster) -> None:
    rref = create(cluster, "user")
    share = share_of(rref)
    refused = rref_pb2.ForkRefused(**about(share), reason=rref_pb2.ForkRefused.LEASE_EXPIRED)
    say(cluster, "user", rref_pb2.RRefMessage(fork_refused=refused))
    assert tells(cluster, rref) == "secret"
    del rref


def test_a_share_that_is_there_already_ends_the_session_that_brings_it(cluster: InProcessCluster) -> None:
    """It was taken for a new one: when it was dropped, the share of who held it was deleted."""
    rref = create(cluster, "user")
    share = share_of(rref)
    fork = value_pb2.RRefFork(
        **about(share),
        parent=id_to_pb(UniqueId(ATTACKER, 1, 1)),
        owner=OWNER,
        owner_incarnation=agent_of(cluster, "owner").identity.incarnation,
    )
    call = rpc_pb2.Call(id=1 << 40, function="builtins:abs", arguments=value_pb2.Value(rrefs=[fork]))
    with cluster.use("attacker") as agent:
        assert rpc.rpc_sync("user", abs, (-1,)) == 1
        session = agent.router.session_with(USER)
        [at_user] = [one for one in agent_of(cluster, "user").connections.taken if one.peer.name == "attacker"]
        assert session is not None
        session.send(rpc_pb2.Message(call=call))
        eventually(lambda: at_user.closed_reason, "the session has ended", LIMIT_S)
        assert "but this worker already has it" in str(at_user.closed_reason)
    agent_of(cluster, "user").rrefs.drain()
    assert tells(cluster, rref) == "secret"
    del rref


def test_a_call_holds_the_reference_that_it_is_made_on(cluster: InProcessCluster) -> None:
    """Else the end of a share could overtake a call whose arguments are large, and the owner would refuse that."""
    rref = create(cluster, "user")
    share = share_of(rref)
    Secret.may_tell.clear()
    with cluster.use("user") as agent:
        future = rref.rpc_async().tell_late()
        del rref
        agent.rrefs.drain()
        assert [call.target_ref.state.id for call in agent.caller.calls if call.target_ref is not None] == [share.fork]
        assert call_method(cluster, share, "user") == "secret"
        Secret.may_tell.set()
        assert future.wait() == "late"
    eventually(lambda: entry_of(cluster, share) is None, "it is released after the call", LIMIT_S)


def test_a_share_is_announced_before_its_value_is_asked_for_also_to_a_worker_that_was_unknown(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may have joined a moment ago. A fetch that came before the announcement would be refused."""
    share = ReferenceShare(*(UniqueId(USER, new_number(0), 1) for _ in range(2)))
    request = rref_pb2.RRefMessage(fork_request=rref_pb2.ForkRequest(**about(share)))
    known = False
    with cluster.use("user") as agent:
        router, knows = agent.router, agent.directory.knows
        assert ATTACKER not in peers_of(agent)
        monkeypatch.setattr(agent.directory, "knows", lambda worker: (known or worker != ATTACKER) and knows(worker))

        async def nothing(worker: int) -> None:
            """In place of a question to the coordinator, which is slow."""

        monkeypatch.setattr(router, "_send_to_stranger", nothing)
        for _ in range(2):
            router.send_control(ATTACKER, request)
        assert ATTACKER not in peers_of(agent)
        known = True
        peer = router.peer(ATTACKER)  # as any peer that fetches it causes it to be made
        assert [message.rref for message in control_outbox(peer).to_resend()] == [request, request]
        assert rpc.rpc_sync("attacker", abs, (-1,)) == 1
        eventually(lambda: len(control_outbox(peer)) == 0, "the messages have been acknowledged", LIMIT_S)


def of_a_third_worker(count: int) -> value_pb2.Value:
    """A value with references that its receiver asks a third worker about, which costs most."""
    value = value_pb2.Value()
    parent = value_pb2.UniqueId(created_on=USER, local_id=new_number(0))
    for number in range(count):
        rref, fork = (UniqueId(USER, new_number(2 * number + each), 0) for each in (0, 1))
        value.rrefs.add(
            rref=id_to_pb(rref), fork=id_to_pb(fork), parent=parent, owner=OWNER, owner_incarnation=1, owner_name="o"
        )
    return value


def test_references_that_weigh_too_little_are_refused_before_there_is_anything_of_them(
    cluster: InProcessCluster,
) -> None:
    """A message of 255 KB with 5,000 of them took 14.5 MB, for as long as its sender liked."""
    with cluster.use("user") as agent:
        shell, sender = agent.rrefs, agent_of(cluster, "attacker").identity
        for weight in (0, 2_000_000):
            value = of_a_third_worker(5000)
            value.weight = bytes(weight)
            with pytest.raises(ProtocolViolation, match=r"5000 remote references arrived from worker 'attacker'"):
                ArrivedValue(value, (), shell, sender, plain_only=True)
        assert not shell.states


def test_a_reference_takes_no_more_than_it_is_counted_for(cluster: InProcessCluster) -> None:
    count = FREE_BYTES // REFERENCE_BYTES
    with cluster.use("user") as agent:
        shell, sender = agent.rrefs, agent_of(cluster, "attacker").identity
        value = of_a_third_worker(count)
        gc.collect()
        tracemalloc.start()
        try:
            arrived = ArrivedValue(value, (), shell, sender, plain_only=True)
            kept = [arrived._claim(index) for index in range(count)]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(shell.states) == len(kept) == count
        assert peak <= (REFERENCE_BYTES - 300) * count  # protobuf's own is not traced


def number_of_objects(references: list[Any]) -> int:
    return len({id(reference) for reference in references})


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_a_reference_that_stands_several_times_in_a_value_is_one_object_at_its_receiver(allow_pickle: bool) -> None:
    """The receiver of `[rref, rref]` had two, and each place of two bytes took one, which nothing counted."""
    with InProcessCluster("user", "other", peer_timeout=CALM_S, allow_pickle=allow_pickle) as cluster:
        mine = cluster.run("user", rpc.RRef, 3)
        assert cluster.run("user", rpc.rpc_sync, "other", number_of_objects, ([mine] * 8,)) == 1
        del mine


def length_of(references: list[Any]) -> int:
    received.extend(references)
    return len(references)


def test_workers_without_pickle_send_many_references_with_enough_weight() -> None:
    with InProcessCluster("owner", "user", "third", peer_timeout=CALM_S, allow_pickle=False) as cluster:
        mine = cluster.run("user", lambda: [rpc.RRef(number) for number in range(1500)])
        for to in ("owner", "third"):
            assert cluster.run("user", partial(rpc.rpc_sync, to, length_of, (mine,))) == 1500
        theirs = received[:1500]
        assert cluster.run("owner", partial(rpc.rpc_sync, "third", length_of, (theirs * 2,))) == 3000
        assert cluster.run("third", received[-1].to_here) == 1499
        received.clear()
        theirs.clear()
