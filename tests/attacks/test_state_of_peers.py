"""State that a peer with the token makes a worker keep, or ends for others: contexts, gatherings, streams, verdicts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside_agents import ThreadPool
from peer_timeouts import CALM_S, LIMIT_S
from rref_world import Action, NotedProtocol, Send

from rpcdist import autograd, rpc
from rpcdist._proto import autograd_pb2, rpc_pb2, value_pb2
from rpcdist.autograd import _context
from rpcdist.autograd._context import ContextTable, make_id
from rpcdist.collectives._group.flight_records import FlightRecorder
from rpcdist.errors import CallRefused, UnknownWorker, WorkerLost
from rpcdist.ids import ProcessId, UniqueId
from rpcdist.private_files import FOLDER_VARIABLE
from rpcdist.rpc._calling.result_streams import DEFAULT_WINDOW
from rpcdist.rpc._membership.barrier import CONTRIBUTE
from rpcdist.rpc._rref import owner
from rpcdist.rpc._rref.messages import Message, MessageKind, Reason
from rpcdist.rpc._serving.producers import MAX_CREDIT, SyncProducer
from rpcdist.testing import InProcessCluster, eventually


def test_a_peer_brings_a_bounded_number_of_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_context, "MAX_CONTEXTS_OF_PEER", 3)
    table = ContextTable(0)
    ids = [make_id(7, number) for number in range(1, 5)]
    assert all(table.join(id, 7) for id in ids[:3]) and table.join(ids[0], 7) is table.find(ids[0])
    with pytest.raises(CallRefused, match="worker 7 has 3 open autograd contexts"):
        table.join(ids[3], 7)
    assert table.join(ids[3], 8) is not None  # another worker brings it
    table.release(ids[0])
    assert table.join(make_id(7, 9), 7) is not None
    assert [table.new() for _ in range(5)]  # its own are not counted


def test_a_release_of_an_unknown_context_counts_for_its_sender_alone() -> None:
    table = ContextTable(0)
    id = make_id(1, 5)
    table.refuse(id, 2)
    assert table.join(id, 2) is None
    assert table.join(id, 1) is not None and table.join(id, 2) is not None


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def test_a_context_is_ended_by_nobody_who_takes_no_part_in_it() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:

        def end(context_id: int) -> None:
            release = autograd_pb2.AutogradMessage(context=context_id)
            release.release.others.append(context_id + 1)
            with cluster.use("c") as agent:
                for worker in (0, 1):
                    rpc.rpc_sync(worker, abs, (-1,))  # connects
                    session = agent.router.session_with(worker)
                    assert session is not None
                    session.send(rpc_pb2.Message(autograd=release))
                    rpc.rpc_sync(worker, abs, (-1,))  # comes after it

        def step() -> torch.Tensor:
            x = torch.ones(3, requires_grad=True)
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("b", square, (x,)).sum()
                cluster.begin("c", end, context_id).result(LIMIT_S)
                autograd.backward(context_id, [loss])
                return autograd.get_gradients(context_id)[x]

        for _ in range(2):  # the context of the next number was named, too
            assert cluster.run("a", step).tolist() == [2.0, 2.0, 2.0]


def test_a_worker_contributes_to_no_gathering_of_others() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        with cluster.use("c") as agent, pytest.raises(CallRefused, match="it is not one of them"):
            agent.caller.gather(0, CONTRIBUTE, (["a", "b"], "c", "mine", True), LIMIT_S)
        gathering = [cluster.begin(name, partial(rpc.api._all_gather, name, {"a", "b"})) for name in "ab"]
        assert [future.result(LIMIT_S) for future in gathering] == [{"a": "a", "b": "b"}] * 2


def test_a_gathering_of_unknown_names_leaves_nothing_behind() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        with cluster.use("b") as agent:
            for number in range(3):
                with pytest.raises(UnknownWorker, match="nobody"):
                    agent.caller.gather(0, CONTRIBUTE, (["b", f"nobody{number}"], "b", 1, True), LIMIT_S)
        with cluster.use("a") as agent:
            assert agent.gatherings._rounds == {} and agent.gatherings._last_came == {}


def test_a_producer_makes_no_more_items_ahead_than_its_limit() -> None:
    sent: list[object] = []
    sender: Any = SimpleNamespace(autograd=None, item=sent.append, end=sent.append)
    pool = ThreadPool()
    producer = SyncProducer(pool, sender, (number for number in range(10**9)), copy_context())
    try:
        producer.credit(4_000_000_000)
        eventually(lambda: pool.num_reserved == 1)  # it waits for its consumer
        assert len(sent) == MAX_CREDIT
    finally:
        producer.cancel()
        still_running = pool.close()
    assert still_running == []
    assert sent[MAX_CREDIT:] == [None]


ONE = value_pb2.Value(body=b"\x01")


def count(number: int) -> Iterator[int]:
    yield from range(number)


def test_items_that_were_not_granted_end_the_session_that_brings_them() -> None:
    """A consumer that read slowly kept all that its producer sent."""
    with InProcessCluster("a", "b", "evil", peer_timeout=CALM_S) as cluster:
        with cluster.use("a"):
            stream = rpc.rpc_stream("evil", count, (10**6,), timeout=LIMIT_S)
            assert next(stream) == 0
        with cluster.use("evil") as agent:
            [active] = agent.dispatcher.calls
            for _ in range(10 * DEFAULT_WINDOW):
                active.session.send(rpc_pb2.Message(stream_item=rpc_pb2.StreamItem(id=active.id, value=ONE)))
        with cluster.use("a") as agent:
            eventually(lambda: not agent.streams, "its session has ended")
            kept: list[int] = []
            with pytest.raises(WorkerLost, match="more than 16 unread items of the stream of"):
                kept.extend(stream)
            assert len(kept) <= DEFAULT_WINDOW
            assert list(rpc.rpc_stream("b", count, (100,), timeout=LIMIT_S)) == list(range(100))


def test_a_failure_is_written_into_no_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    written = FlightRecorder().write_dump(0)
    assert written is not None and written.parent.stat().st_mode & 0o777 == 0o700
    folder = written.parent

    def open_to_others() -> None:
        folder.chmod(0o777)

    def a_link() -> None:
        folder.chmod(0o700)
        folder.symlink_to(folder.rename(tmp_path / "elsewhere"))

    for spoil in (open_to_others, a_link):
        spoil()
        assert FlightRecorder().write_dump(1) is None
        assert list(folder.iterdir()) == [written]


def test_references_that_nobody_will_make_are_bounded_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that a peer named, made by a process that does not exist, took 900 bytes for ever."""
    monkeypatch.setattr(owner, "MAX_WAITING", 3)
    me, asker, other, maker = (ProcessId(number, 100 + number) for number in (0, 1, 2, 66))
    protocol = NotedProtocol(me)

    def ask(sender: ProcessId, number: int, fork: int) -> list[Action]:
        rref = UniqueId(maker.worker, number, maker.incarnation)
        request = Message(MessageKind.FORK_REQUEST, rref, UniqueId(sender.worker, fork, 5))
        return [
            action for action in protocol.step(NotedProtocol.message_arrived, sender, request) if is_refusal(action)
        ]

    def is_refusal(action: Action) -> bool:
        return isinstance(action, Send) and action.message.kind is MessageKind.FORK_REFUSED

    assert [ask(asker, 1, 1), ask(asker, 1, 2), ask(asker, 2, 3), ask(asker, 1, 1)] == [[], [], [], []]
    assert len(ask(asker, 3, 4)) == len(ask(asker, 1, 5)) == 1
    assert ask(other, 3, 6) == []  # another worker may name more
    deleted = Message(
        MessageKind.USER_DELETED, UniqueId(maker.worker, 2, maker.incarnation), UniqueId(asker.worker, 3, 5)
    )
    protocol.message_arrived(asker, deleted)
    assert len(protocol.owners.entries) == 2 and ask(asker, 4, 7) == []
    protocol.lease_ended(asker)
    protocol.lease_ended(other)
    assert not protocol.owners.entries and not protocol.owners.waiting


def test_forks_of_a_value_that_is_there_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that a peer asked for, of one reference that it did hold, took 400 bytes until its end."""
    monkeypatch.setattr(owner, "MAX_HELD", 3)
    me, holder, other = (ProcessId(number, 100 + number) for number in (0, 1, 2))
    protocol = NotedProtocol(me)
    rref = UniqueId(holder.worker, 1, holder.incarnation)
    forks = [UniqueId(holder.worker, number, holder.incarnation) for number in range(2, 9)]

    def ask(sender: ProcessId, fork: UniqueId) -> list[Action]:
        return protocol.step(NotedProtocol.message_arrived, sender, Message(MessageKind.FORK_REQUEST, rref, fork))

    protocol.creation_accepted(rref, forks[0], holder)
    protocol.creation_finished(rref)
    assert all(
        ask(holder, fork) == [Send(holder, Message(MessageKind.FORK_CONFIRMED, rref, fork))]
        for fork in [*forks[1:3], forks[1]]
    )
    refused = Send(holder, Message(MessageKind.FORK_REFUSED, rref, forks[3], Reason.TOO_MANY))
    assert ask(holder, forks[3]) == [refused] == ask(holder, forks[3])
    another = UniqueId(holder.worker, 9, holder.incarnation)
    assert protocol.creation_accepted(another, forks[4], holder) is Reason.TOO_MANY
    assert ask(other, UniqueId(2, 5, 102))[0] == Send(
        other, Message(MessageKind.FORK_CONFIRMED, rref, UniqueId(2, 5, 102))
    )
    protocol.message_arrived(holder, Message(MessageKind.USER_DELETED, rref, forks[1]))
    assert ask(holder, forks[3]) == [Send(holder, Message(MessageKind.FORK_CONFIRMED, rref, forks[3]))]
    protocol.lease_ended(holder)
    protocol.lease_ended(other)
    assert not protocol.owners.held and not protocol.owners.entries and not protocol.owners.since
