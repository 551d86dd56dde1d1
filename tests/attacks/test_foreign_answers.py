"""A worker with the token answers calls that were made to another: numbers of calls can be guessed, sessions cannot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from chunk_envelopes import chunk_envelope
from inside_agents import agent_of, control_outbox, peers_of

from rpcdist import rpc
from rpcdist._proto import rpc_pb2, rref_pb2, value_pb2
from rpcdist.rpc._calling.result_streams import DEFAULT_WINDOW
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport._framing.calls_in_protobuf import from_protobuf
from rpcdist.transport._framing.frames import frame

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


async def answer_late_on_a_loop() -> str:
    Gate.began.set()
    assert await asyncio.to_thread(Gate.open.wait, LIMIT_S)
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
        [session] = [session for session in agent.connections.taken if session.peer.name == "attacker"]
        handed = threading.Event()

        def arrive() -> None:
            agent.connections.on_messages(
                session, [(from_protobuf(message, message.ByteSize()), []) for message in messages]
            )
            handed.set()

        agent.caller.io.call_soon(arrive)
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
        future = cluster.run("caller", rpc.rpc_async, "victim", answer_late_on_a_loop, timeout=LIMIT_S)
        assert gate.began.wait(LIMIT_S)
        inject(cluster, [rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=id)) for id in range(1, 50)])
        gate.open.set()
        assert future.wait() == "genuine"


def count_far() -> Iterator[int]:
    for number in range(1000):
        made.append(number)
        yield number


made: list[int] = []


def test_credit_for_a_stream_counts_only_on_its_session() -> None:
    made.clear()
    with InProcessCluster("caller", "victim", "attacker") as cluster:
        stream = cluster.run("caller", rpc.rpc_stream, "victim", count_far, timeout=LIMIT_S)
        eventually(lambda: len(made) == DEFAULT_WINDOW, "the window is full", LIMIT_S)
        credit = [rpc_pb2.StreamCredit(id=id, items=500) for id in range(1, 50)]
        inject(cluster, [rpc_pb2.Message(stream_credit=one) for one in credit])
        assert cluster.run("attacker", rpc.rpc_sync, "victim", whoami) == "victim"
        assert len(made) == DEFAULT_WINDOW
        stream.close()


def test_how_far_a_call_is_learns_only_its_session(gate: type[Gate]) -> None:
    with InProcessCluster("caller", "victim", "attacker") as cluster:
        future = cluster.run("caller", rpc.rpc_async, "victim", answer_late, timeout=LIMIT_S)
        assert gate.began.wait(LIMIT_S)
        assert cluster.run("attacker", rpc.rpc_sync, "victim", whoami) == "victim"
        with cluster.use("victim") as agent:
            [number] = [active.id for active in agent.dispatcher.calls]
            asked = rpc_pb2.Message(call_question=rpc_pb2.CallQuestion(id=number))
            phases = {}
            for session in agent.connections.taken:
                answers: list[rpc_pb2.Message] = []
                asking: Any = _SessionOf(session, answers)
                agent.dispatcher.on_question(asking, asked, [])
                phases[session.peer.name] = answers[0].call_state.phase
        assert phases == {"caller": rpc_pb2.CallState.RUNNING, "attacker": rpc_pb2.CallState.ENDED}
        gate.open.set()
        assert future.wait() == "genuine"


class _SessionOf:
    """Stands for a session in tables, and keeps what is sent on it."""

    def __init__(self, session: Any, sent: list[rpc_pb2.Message]) -> None:
        self._session = session
        self.send = sent.append

    def __hash__(self) -> int:
        return hash(self._session)

    def __eq__(self, other: object) -> bool:
        return other is self._session

    def flush(self) -> None:
        """Nothing waits."""


def test_control_messages_are_acknowledged_by_their_receiver() -> None:
    with InProcessCluster("victim", "callee", "attacker") as cluster:
        assert cluster.run("victim", rpc.rpc_sync, "callee", whoami) == "callee"
        assert cluster.run("victim", rpc.rpc_sync, "attacker", whoami) == "attacker"
        peer = peers_of(agent_of(cluster, "victim"))[1]
        unacknowledged = control_outbox(peer).add(rref_pb2.RRefMessage(creation_probe=rref_pb2.CreationProbe()))
        inject(cluster, [rpc_pb2.Message(ack=rpc_pb2.Ack(control_seq=1 << 40))])
        assert control_outbox(peer).to_resend() == [unacknowledged]
        peer.acknowledged(unacknowledged.control_seq)


arrived = threading.Event()


def note_arrival() -> None:
    arrived.set()


def test_transfers_are_ended_and_sped_up_on_their_session_alone() -> None:
    arrived.clear()
    with InProcessCluster("caller", "victim", "attacker") as cluster:
        for name in ("caller", "attacker"):
            assert cluster.run(name, rpc.rpc_sync, "victim", whoami) == "victim"
        wrapped = rpc_pb2.Message(call=rpc_pb2.Call(id=1 << 40, function=f"{__name__}:note_arrival"))
        body = wrapped.SerializeToString()
        with cluster.use("victim") as agent:
            sessions: dict[str, Any] = {session.peer.name: session for session in agent.connections.taken}
            handed = threading.Event()

            def arrive() -> None:
                sessions["caller"].receive(frame(rpc_pb2.Message(wrapped=True, transfer=77, large=[len(body)])))
                before = sessions["caller"]._outgoing.__dict__.copy()
                for message in (
                    rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=77)),
                    rpc_pb2.Message(chunk_credit=rpc_pb2.ChunkCredit(bytes=1 << 20)),
                ):
                    sessions["attacker"].receive(frame(message))
                assert sessions["caller"]._outgoing.__dict__ == before
                sessions["caller"].receive(chunk_envelope(77, 0, 0, memoryview(body)))
                handed.set()

            agent.caller.io.call_soon(arrive)
            assert handed.wait(LIMIT_S) and arrived.wait(LIMIT_S)
