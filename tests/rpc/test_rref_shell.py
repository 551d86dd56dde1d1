"""The shell of the reference counting: three shells over connections in memory, and real `RRef` objects."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from inside_agents import handle_of
from rref_world import is_empty

from rpcdist._proto import rref_pb2, value_pb2
from rpcdist.errors import DeadlineExceeded, LeaseExpired, OwnerLost, RRefError, WorkerLost
from rpcdist.ids import Identity, new_number
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._rref.handles import HandleState, copy_outcome
from rpcdist.rpc._rref.messages import Message, MessageKind, ReferenceShare, encode_messages
from rpcdist.rpc._rref.shell import MOST_AT_ONCE, RRefShell
from rpcdist.rpc.future import Future
from rpcdist.rpc.rref import RRef


class Host:
    """The agent of one worker, in memory, and its directory."""

    def __init__(self, cluster: Cluster, worker_id: int) -> None:
        self.me = Identity(f"w{worker_id}", worker_id, 100 + worker_id)
        self.cluster = cluster
        self.shell = RRefShell(
            cast(Directory, self), self.send_control, self.flush, lambda handle: RRef._of(self.calls, handle)
        )
        self.calls: Any = Calls(self)

    def send_control(self, to: int, message: rref_pb2.RRefMessage) -> None:
        self.cluster.queue.append((self, to, rref_pb2.RRefMessage.FromString(message.SerializeToString())))

    def flush(self, to: int) -> None:
        """Nothing lingers."""

    def name_of(self, worker_id: int) -> str:
        return f"w{worker_id}"

    def incarnation_of(self, worker_id: int) -> int:
        return self.cluster.incarnations[worker_id]

    def was_worker(self, worker_id: int, incarnation: int) -> bool:
        return True

    def own(self, value: object) -> RRef[Any]:
        rref: RRef[Any] = RRef.__new__(RRef)
        rref._set(self.calls, self.shell.own(value))
        return rref


class Calls:
    """The part of that agent that references need: of `RRefCalls`, the calls that these tests make."""

    def __init__(self, host: Host) -> None:
        self.me = host.shell.me
        self.my_name = host.me.name
        self.check_sharable = host.shell.check_sharable
        self.fetch_error = host.shell.fetch_error
        self.host = host

    def fetch(self, state: HandleState, timeout_s: float, creation: object = None) -> Any:
        return self.start_fetch(state, timeout_s).wait()

    async def find_owner(self, state: HandleState) -> None:
        """All owners are known here."""

    def start_fetch(self, state: HandleState, timeout_s: float) -> Future[Any]:
        result: Future[Any] = Future()
        result.is_quiet = True
        owner = self.host.cluster.hosts[self.host.shell.owner_of(state)]
        value: Future[Any] = Future()
        share = ReferenceShare(state.rref, state.id)
        owner.shell.when_there(share, lambda done: copy_outcome(done, value), self.host.me.id)
        value.add_done_callback(lambda done: copy_outcome(done, result))
        return result


class Cluster:
    def __init__(self) -> None:
        self.queue: list[tuple[Host, int, rref_pb2.RRefMessage]] = []
        self.incarnations = {worker: 100 + worker for worker in range(3)}
        self.hosts = [Host(self, worker) for worker in range(3)]

    def run(self) -> None:
        """Notices dropped handles and delivers until nothing is under way."""
        gc.collect()
        while True:
            for host in self.hosts:
                host.shell.drain()
            if not self.queue:
                return
            sender, to, message = self.queue.pop(0)
            self.hosts[to].shell.on_message(sender.me.id, sender.me.incarnation, message)

    def send(self, rref: RRef[Any], sender: int, to: int) -> RRef[Any]:
        fork = self.hosts[sender].shell.share(rref, to)
        fork = value_pb2.RRefFork.FromString(fork.SerializeToString())
        shell = self.hosts[to].shell
        claimed: RRef[Any] = shell.wrap(shell.receive(fork, sender))
        return claimed

    def remote(self, creator: int, owner: int, value: object = None) -> tuple[RRef[Any], Callable[[], None]]:
        """A reference, and what delivers the call, runs it, and delivers the reply."""
        shell, owners = self.hosts[creator].shell, self.hosts[owner].shell
        rref, fork = shell.create_remote(owner)

        def deliver() -> None:
            owners.accept_creation(fork, creator)
            owners.set_value(fork.rref, value)
            shell.on_created(fork)

        return rref, deliver

    def info(self, worker: int) -> tuple[int, ...]:
        info = self.hosts[worker].shell.debug_info()
        return tuple(int(info[f"num_{key}"]) for key in ("owner_rrefs", "forks", "pending_users", "pending_futures"))

    def assert_empty(self) -> None:
        self.run()
        for host in self.hosts:
            assert is_empty(host.shell.protocol), host.shell
            assert not host.shell.values and not host.shell.fetches and not host.shell.states


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for host in cluster.hosts:
        host.shell.close()


def test_numbers_of_references_cannot_be_guessed() -> None:
    """A peer that knew one could predict others: the numbers of references, and of shares, followed each other."""
    numbers = [new_number(count) for count in range(1000)]
    assert len(set(numbers)) == 1000 and all(0 <= number < 1 << 63 for number in numbers)
    for bit in range(24, 63):  # each is set in about half of them: a deviation of 6 standard deviations fails
        assert abs(sum(number >> bit & 1 for number in numbers) - 500) < 95, bit
    rref = Cluster().hosts[0].own(1)
    assert handle_of(rref).rref.local_id > 1 << 30 and str(rref).endswith("local_id=0))") and rref.local_value() == 1


def test_owner(cluster: Cluster) -> None:
    value = ["anything"]
    rref = cluster.hosts[0].own(value)
    assert rref.to_here() is value and rref.local_value() is value
    assert rref.is_owner() and rref.confirmed_by_owner() and rref.owner_name() == "w0" and rref.owner().id == 0
    assert str(rref) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    assert repr(rref).startswith("<RRef of ") and repr(rref).endswith(", ready>")
    assert cluster.info(0) == (0, 0, 0, 0)  # what nobody else knows is in no table
    del rref
    cluster.assert_empty()


def test_remote_is_usable_before_its_call_arrived(cluster: Cluster) -> None:
    rref, deliver = cluster.remote(0, 1, 35)
    assert str(rref) == (
        "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=0), "
        "ForkId = GloballyUniqueId(created_on=0, local_id=1))"
    )
    at_2 = cluster.send(rref, 0, 2)
    at_1 = cluster.send(at_2, 2, 1)
    cluster.run()
    fetched = cluster.hosts[2].calls.start_fetch(handle_of(at_2), 1.0)
    assert not fetched.done() and not rref.confirmed_by_owner()
    deliver()
    cluster.run()
    assert fetched.value() == rref.to_here() == at_2.to_here() == at_1.local_value() == 35
    assert rref.confirmed_by_owner() and at_2.confirmed_by_owner() and at_1.is_owner()
    assert cluster.info(1) == (1, 2, 0, 0)
    live = [str(live) for host in cluster.hosts for live in host.shell.debug_rrefs()]
    assert "0.0 at w1: ready, held by w0, w1, w2" in live
    del rref, at_1, at_2
    cluster.assert_empty()


def test_dropping_frees_the_value(cluster: Cluster) -> None:
    class Value:
        pass

    freed = threading.Event()
    value = Value()
    import weakref

    weakref.finalize(value, freed.set)
    rref = cluster.hosts[1].own(value)
    at_0 = cluster.send(rref, 1, 0)
    del value, rref
    cluster.run()
    assert not freed.is_set() and isinstance(at_0.to_here(), Value)
    del at_0
    cluster.assert_empty()
    gc.collect()
    assert freed.is_set()


def test_references_that_nobody_unpickles_are_given_back(cluster: Cluster) -> None:
    rref = cluster.hosts[1].own(1)
    shell = cluster.hosts[0].shell
    handle = shell.receive(cluster.hosts[1].shell.share(rref, 0), 1)
    assert cluster.info(1)[0] == 1
    del handle, rref
    cluster.assert_empty()


def test_confirmation(cluster: Cluster) -> None:
    rref, deliver = cluster.remote(0, 1)
    shell = cluster.hosts[2].shell
    token = shell.receive(cluster.hosts[0].shell.share(rref, 2), 0)
    confirmation = shell.confirmation([token])
    assert confirmation is not None and not confirmation.done()
    deliver()
    cluster.run()
    assert confirmation.done() and shell.confirmation([token]) is None


def test_errors_of_the_remote_function(cluster: Cluster) -> None:
    owners = cluster.hosts[1].shell
    rref, fork = cluster.hosts[0].shell.create_remote(1)
    owners.accept_creation(fork, 0)
    owners.set_error(fork.rref, ValueError("boom"))
    cluster.hosts[0].shell.on_created(fork)
    at_2 = cluster.send(rref, 0, 2)
    cluster.run()
    for user in (rref, at_2):
        with pytest.raises(ValueError, match="boom"):
            user.to_here()
    del rref, at_2, user
    cluster.assert_empty()


@pytest.mark.parametrize("arrives", [False, True])
def test_creation_that_timed_out(cluster: Cluster, arrives: bool) -> None:
    owners, shell = cluster.hosts[1].shell, cluster.hosts[0].shell
    rref, fork = shell.create_remote(1)
    at_2 = cluster.send(rref, 0, 2)
    if arrives:
        owners.accept_creation(fork, 0)
    shell.on_creation_failed(fork, DeadlineExceeded("RPC ran for more than set timeout (10 ms)"))
    cluster.run()
    with pytest.raises(RRefError, match=r"RRef creation .*timed out"):
        rref.to_here()
    with pytest.raises(RRefError, match="RRef creation"):
        shell.share(rref, 2)
    if arrives:
        assert cluster.info(1) == (1, 2, 0, 0)  # both are held until they are dropped
        owners.set_value(fork.rref, 7)
        assert at_2.to_here() == 7
    else:
        with pytest.raises(RRefError, match="RRef creation"):
            at_2.to_here()
        with pytest.raises(RRefError, match="RRef creation"):
            owners.accept_creation(fork, 0)  # too late: its creator was told that it is not there
    del rref, at_2
    cluster.assert_empty()


def test_remote_to_oneself(cluster: Cluster) -> None:
    rref, deliver = cluster.remote(1, 1, 5)
    assert rref.is_owner()
    with pytest.raises(DeadlineExceeded, match="RPC ran for more than set timeout"):
        rref.to_here(timeout=0.01)
    deliver()
    assert rref.to_here() == rref.local_value() == 5
    rref = deliver = None  # type: ignore[assignment]
    cluster.assert_empty()


def test_lost_share(cluster: Cluster) -> None:
    rref = cluster.hosts[1].own(1)
    shell = cluster.hosts[1].shell
    lost, arrived = shell.share(rref, 0), shell.share(rref, 0)
    token = cluster.hosts[0].shell.receive(arrived, 1)
    shell.connection_broken(0)
    cluster.run()
    assert cluster.info(1) == (1, 1, 0, 0)
    late = cluster.hosts[0].shell.wrap(cluster.hosts[0].shell.receive(lost, 1))
    with pytest.raises(RRefError, match="could not deliver the message"):
        late.to_here()
    assert cluster.hosts[0].shell.wrap(token).to_here() == 1
    del rref, late, token
    cluster.assert_empty()


def test_lease(cluster: Cluster) -> None:
    rref = cluster.hosts[1].own(1)
    first, second = cluster.send(rref, 1, 0), cluster.send(rref, 1, 0)
    cluster.hosts[1].shell.on_lease_ended(cluster.hosts[0].me)
    assert cluster.info(1) == (0, 0, 0, 0)
    with pytest.raises(RRefError, match="dropped its references"):
        first.to_here()
    cluster.run()
    with pytest.raises(LeaseExpired):
        second.to_here()
    with pytest.raises(LeaseExpired):
        cluster.hosts[0].shell.share(first, 2)
    del rref, first, second
    cluster.assert_empty()


def test_lost_owner(cluster: Cluster) -> None:
    rref = cluster.hosts[1].own(1)
    at_0 = cluster.send(rref, 1, 0)
    pending, _ = cluster.remote(0, 1)
    cluster.hosts[0].shell.on_lost(cluster.hosts[1].me, WorkerLost("w1", "a connection", 3.0, "it was killed"))
    for user in (at_0, pending):
        with pytest.raises(OwnerLost, match=r"'w1' .*it was killed"):
            user.to_here()
    with pytest.raises(OwnerLost):
        cluster.remote(0, 1)
    del rref, at_0, pending, user
    cluster.assert_empty()


def test_an_owner_that_is_lost_while_its_reference_is_shared(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference had passed the check of `share`, and the protocol has forgotten it since."""
    rref = cluster.hosts[1].own(1)
    at_0 = cluster.send(rref, 1, 0)
    shell = cluster.hosts[0].shell

    def lose_and_check(rref: Any) -> HandleState:
        state = check(rref)
        shell.on_lost(cluster.hosts[1].me, WorkerLost("w1", "a connection", 3.0, "it was killed"))
        return state

    check = shell.check_sharable
    monkeypatch.setattr(shell, "check_sharable", lose_and_check)
    with pytest.raises(OwnerLost, match=r"'w1' .*it was killed"):
        shell.share(at_0, 2)
    assert not shell.protocol.owners.entries, "the value is that of another worker"
    del rref, at_0
    cluster.assert_empty()


def test_replaced_owner(cluster: Cluster) -> None:
    rref = cluster.hosts[1].own(1)
    at_0 = cluster.send(rref, 1, 0)
    cluster.incarnations[1] = 999
    with pytest.raises(OwnerLost, match="took its place"):
        at_0.to_here()
    at_2 = cluster.hosts[2].shell.wrap(cluster.hosts[2].shell.receive(cluster.hosts[1].shell.share(rref, 2), 1))
    with pytest.raises(OwnerLost):
        at_2.to_here()


def test_uses_that_are_refused(cluster: Cluster) -> None:
    rref = cluster.hosts[1].own(1)
    user = cluster.send(rref, 1, 0)
    for refused in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError, match="rref"):
            refused(rref)
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(user)
    text = (
        r"For UserRRef\(rref_id=GloballyUniqueId\(created_on=1, local_id=0\), "
        r"fork_id=GloballyUniqueId\(created_on=1, local_id=1\)\), can't call localValue\(\) on user "
        r"WorkerInfo\(id=0, name=w0\). Call it on owner WorkerInfo\(id=1, name=w1\)"
    )
    with pytest.raises(RuntimeError, match=text):
        user.local_value()
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        user.backward()
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for .backward\(\)"):
        rref.backward()


def test_shutdown(cluster: Cluster) -> None:
    rref = cluster.hosts[1].own(1)
    user = cluster.send(rref, 1, 0)
    with pytest.raises(RuntimeError, match="Leaking RRef GloballyUniqueId"):
        cluster.hosts[1].shell.check_leaks()
    assert cluster.hosts[0].shell.delete_all_user_and_unforked_owner_rrefs(1.0)
    cluster.run()
    cluster.hosts[1].shell.check_leaks()
    with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion."):
        user.to_here()
    with pytest.raises(RuntimeError, match=r"Cannot call fork an UserRRef after deletion."):
        user._serialize()
    for host in cluster.hosts:
        host.shell.close()
        host.shell.close()
    assert rref.to_here() == 1


def test_shutdown_does_not_wait_for_what_lost_workers_hold(cluster: Cluster) -> None:
    """Their references end with their leases, which last longer than anybody waits."""
    shell = cluster.hosts[1].shell
    cluster.send(cluster.hosts[1].own(1), 1, 0)
    assert not shell.delete_all_user_and_unforked_owner_rrefs(0.0)
    shell.on_lost(cluster.hosts[0].me, WorkerLost("w0", "a connection", 3.0, "it was killed"))
    assert shell.delete_all_user_and_unforked_owner_rrefs(0.0)
    shell.check_leaks()


async def test_await(cluster: Cluster) -> None:
    rref, deliver = cluster.remote(0, 1, 3)
    here, deliver_here = cluster.remote(0, 0, 4)
    deliver()
    deliver_here()
    assert await rref == 3 and await here == 4
    lost = cluster.send(cluster.hosts[1].own(1), 1, 0)
    cluster.hosts[0].shell.on_lost(cluster.hosts[1].me, WorkerLost("w1", "a connection", 3.0, "it was killed"))
    with pytest.raises(OwnerLost):
        await lost


def test_threads(cluster: Cluster) -> None:
    """Shares, drops and deliveries race; in the end nothing is left."""
    rref, deliver = cluster.remote(0, 1, 1)
    deliver()
    failures: list[BaseException] = []

    def share(to: int) -> None:
        try:
            for _ in range(200):
                cluster.send(cluster.send(rref, 0, to), to, 3 - to)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=share, args=(1 + number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        cluster.run()
    for thread in threads:
        thread.join()
    assert not failures
    rref = deliver = None  # type: ignore[assignment]
    cluster.assert_empty()


def test_a_drop_that_another_thread_notices_meanwhile_is_no_error(cluster: Cluster) -> None:
    """`debug_info` of a user's thread, beside the agent's timer: "pop from an empty deque"."""

    class TakenMeanwhile(deque[Any]):
        def __bool__(self) -> bool:
            return True

    shell = cluster.hosts[0].shell
    shell.dropped = TakenMeanwhile()
    shell.drain()
    assert shell.debug_info()["num_pending_users"] == "0"


def test_references_that_end_together_are_told_in_one_message(cluster: Cluster) -> None:
    number = 2 * MOST_AT_ONCE + 1
    made = [cluster.remote(0, to, value=to) for to in (1, 2) for _ in range(number)]
    for _, deliver in made:
        deliver()
    cluster.run()
    assert cluster.info(1)[0] == cluster.info(2)[0] == number
    del made, deliver, _
    gc.collect()
    cluster.hosts[0].shell.drain()
    told = [(to, len(message.users_deleted.ids) // 48 or 1) for _, to, message in cluster.queue]
    assert len(told) <= 6 and sum(count for to, count in told if to == 1) == number
    cluster.assert_empty()


def test_a_deletion_ends_no_reference_of_another_worker(cluster: Cluster) -> None:
    """A peer that names forks of others in one of many deletions ends only its own."""
    first, deliver_first = cluster.remote(0, 1, value="of 0")
    second, deliver_second = cluster.remote(2, 1, value="of 2")
    deliver_first()
    deliver_second()
    cluster.run()
    shares = [(state.rref, state.id) for state in map(handle_of, (first, second))]
    deletions = encode_messages([Message(MessageKind.USER_DELETED, rref, fork) for rref, fork in shares])
    assert deletions.WhichOneof("body") == "users_deleted"
    cluster.hosts[1].shell.on_message(2, 102, deletions)
    assert cluster.info(1)[0] == 1 and first.to_here() == "of 0"
    del first, second
    cluster.assert_empty()
