"""A worker with the token answers calls that were made to another: numbers of calls can be guessed, sessions cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rpcdist import rpc
from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.testing import InProcessCluster

LIMIT_S = 20.0


class Gate:
    """Holds a handler of the victim's callee until the attack has been made; both run in this process."""

    began = threading.Event()
    open = threading.Event()


@pytest.fixture
def gate() -> Iterator[type[Gate]]:
    Gate.began.clear()
    Gate.open.clear()
    yield Gate
    Gate.open.set()


def answer_late() -> str:
    Gate.began.set()
    assert Gate.open.wait(LIMIT_S)
    return "genuine"


def count_late() -> Iterator[int]:
    yield 1
    Gate.began.set()
    assert Gate.open.wait(LIMIT_S)
    yield 2


def whoami() -> str:
    return rpc.get_worker_info().name


def inject(cluster: InProcessCluster, messages: list[rpc_pb2.Message]) -> None:
    """Lets `messages` arrive at the victim on the session that the attacker has opened to it."""
    assert cluster.run("attacker", rpc.rpc_sync, "victim", whoami) == "victim"
    with cluster.use("victim") as agent:
        [session] = [session for session in agent._inbound.sessions if session.peer.name == "attacker"]
        handed = threading.Event()

        def arrive() -> None:
            agent._inbound.on_messages(session, [(message, []) for message in messages])
            handed.set()

        agent.caller._io.call_soon(arrive)
        assert handed.wait(LIMIT_S)


FORGED = value_pb2.Value(body=b"\x87\x06forged")


def test_a_reply_counts_only_on_the_session_of_its_call(gate: type[Gate]) -> None:
    with InProcessCluster("victim", "callee", "attacker") as cluster:
        future = cluster.run("victim", rpc.rpc_async, "callee", answer_late, timeout=LIMIT_S)
        assert gate.began.wait(LIMIT_S)
        failure = rpc_pb2.Failure(text="forged", worker="callee")
        replies = [
            rpc_pb2.Message(reply=reply)
            for id in range(1, 50)
            for reply in (
                rpc_pb2.Reply(id=id),
                rpc_pb2.Reply(id=id, value=FORGED),
                rpc_pb2.Reply(id=id, failure=failure),
                rpc_pb2.Reply(id=id, stream=True),
            )
        ]
        inject(cluster, replies)
        assert not future.done()
        gate.open.set()
        assert future.wait() == "genuine"


def test_items_and_the_end_of_a_stream_count_only_on_its_session(gate: type[Gate]) -> None:
    with InProcessCluster("victim", "callee", "attacker") as cluster:
        stream = cluster.run("victim", rpc.rpc_stream, "callee", count_late, timeout=LIMIT_S)
        assert next(stream) == 1 and gate.began.wait(LIMIT_S)
        items = [rpc_pb2.Message(stream_item=rpc_pb2.StreamItem(id=id, value=FORGED)) for id in range(1, 50)]
        ends = [rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=id)) for id in range(1, 50)]
        inject(cluster, items + ends)
        gate.open.set()
        assert list(stream) == [2]


def test_a_cancellation_counts_only_on_the_session_of_the_call(gate: type[Gate]) -> None:
    with InProcessCluster("caller", "victim", "attacker") as cluster:
        future = cluster.run("caller", rpc.rpc_async, "victim", answer_late, timeout=LIMIT_S)
        assert gate.began.wait(LIMIT_S)
        inject(cluster, [rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=id)) for id in range(1, 50)])
        gate.open.set()
        assert future.wait() == "genuine"
