"""Calls come faster than a worker serves them: what waits is bounded for each peer, and holds up nobody else."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from full_sets import FULL
from inside_agents import Agent, reserved_bytes
from peer_timeouts import CALM_S, LIMIT_S, UNIT_S

from rpcdist import rpc
from rpcdist._proto import rpc_pb2
from rpcdist.deadline import NEVER
from rpcdist.errors import Overloaded, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._serving import active_calls, answers
from rpcdist.rpc._serving.active_calls import CALL_BYTES, NUM_UNCOUNTED, ActiveCall, ActiveCalls
from rpcdist.rpc._serving.dispatcher import MAX_FUNCTION_CHARS
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import CallMessage

NUM_CALLS = 100_000 if FULL else 10_000
LIMIT_BYTES = 1 << 20


class Work:
    """The calls of a flood in this process: they take time until the flood is over."""

    num_done = itertools.count()
    is_over = threading.Event()


@pytest.fixture(autouse=True)
def work() -> Iterator[type[Work]]:
    Work.num_done = itertools.count()
    Work.is_over.clear()
    yield Work
    Work.is_over.set()


def take_time() -> None:
    Work.is_over.wait(0.002)
    next(Work.num_done)


def hold(data: bytes = b"") -> int:
    assert Work.is_over.wait(LIMIT_S)
    return len(data)


def nothing() -> None:
    pass


def num_done_after() -> int:
    return next(Work.num_done)


def ask(worker: str) -> int:
    return int(rpc.rpc_sync(worker, num_done_after, timeout=LIMIT_S))


def call_back(caller: str, depth: int) -> int:
    return 0 if not depth else 1 + int(rpc.rpc_sync(caller, call_back, (rpc.get_worker_info().name, depth - 1)))


def account_of(agent: Agent, name: str) -> AnnouncedBytes:
    """The counts that an agent keeps for a worker that has called it."""
    found: list[AnnouncedBytes] = [session.account for session in agent.connections.taken if session.peer.name == name]
    assert found, f"worker {name!r} has not called yet"
    return found[0]


def held_by(agent: Agent, name: str) -> int:
    return reserved_bytes(account_of(agent, name))


def flood(worker: str) -> list[rpc.Future[None]]:
    return [rpc.rpc_async(worker, take_time, timeout=0) for _ in range(NUM_CALLS)]


def test_the_call_of_another_worker_passes_a_flood() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        calls = cluster.run("a", flood, "b")
        with cluster.use("b") as agent:
            eventually(lambda: len(agent.dispatcher.calls) > NUM_CALLS // 2)
        begun, answered = next(Work.num_done), cluster.run("c", ask, "b")
        assert answered - begun < NUM_CALLS // 10
        assert agent.pool.facts().queued > NUM_CALLS // 4
        Work.is_over.set()
        rpc.wait_all(calls)
        eventually(lambda: held_by(agent, "a") == 0, "each call is taken off after its answer")


def test_a_call_of_a_handler_passes_the_flood_of_its_own_worker() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        calls = cluster.run("a", flood, "b")
        with cluster.use("b") as agent:
            eventually(lambda: len(agent.dispatcher.calls) > NUM_CALLS // 2)
        begun, answered = next(Work.num_done), cluster.run("c", rpc.rpc_sync, "a", ask, ("b",), timeout=LIMIT_S)
        assert answered - begun < NUM_CALLS // 10
        assert agent.pool.facts().queued > NUM_CALLS // 4
        Work.is_over.set()
        rpc.wait_all(calls)


def test_a_flood_of_calls_that_call_back_ends() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        calls = cluster.run("a", lambda: [rpc.rpc_async("b", call_back, ("a", 3), timeout=LIMIT_S) for _ in range(300)])
        assert [call.wait() for call in calls] == [3] * 300


def test_what_waits_is_bounded_for_each_peer_and_refused_by_name() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S, max_incoming_bytes=LIMIT_BYTES) as cluster:
        num_fit = NUM_UNCOUNTED + LIMIT_BYTES // CALL_BYTES
        calls = cluster.run("a", lambda: [rpc.rpc_async("b", hold, timeout=LIMIT_S) for _ in range(num_fit + 100)])
        refused = [call.exception(LIMIT_S) for call in calls[num_fit:]]
        assert all(isinstance(error, Overloaded) for error in refused)
        assert "max_incoming_bytes" in str(refused[0]) and f"accepts {LIMIT_BYTES} from one peer" in str(refused[0])
        with cluster.use("b") as agent:
            assert len(agent.dispatcher.calls) == num_fit
            assert LIMIT_BYTES - CALL_BYTES < held_by(agent, "a") <= LIMIT_BYTES
        assert not any(call.done() for call in calls[:num_fit])
        assert cluster.run("b", rpc.rpc_sync, "a", nothing, timeout=LIMIT_S) is None  # answers count for nothing
        Work.is_over.set()
        assert [call.wait() for call in calls[:num_fit]] == [0] * num_fit
        eventually(lambda: held_by(agent, "a") == 0)
        assert cluster.run("a", rpc.rpc_sync, "b", hold, (b"again",)) == 5


def test_a_refused_call_under_the_number_of_another_one_takes_nothing_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Mock(account=AnnouncedBytes(2 * CALL_BYTES), peer=Identity("a", 1, 1))
    calls = ActiveCalls()
    first, second = (ActiveCall(session, 7, "m:f", None, NEVER, 0.0) for _ in range(2))
    monkeypatch.setattr(active_calls, "NUM_UNCOUNTED", 0)
    second.weight = 100 * CALL_BYTES
    assert calls.add(first) is None
    assert "accepts" in str(calls.add(second))
    calls.remove(second)
    assert calls.find(session, 7) is first and reserved_bytes(session.account) == CALL_BYTES
    calls.remove(first)
    calls.remove(first)
    assert calls.find(session, 7) is None and reserved_bytes(session.account) == 0


def test_the_arguments_of_calls_that_run_are_counted() -> None:
    with InProcessCluster("a", "b", max_incoming_bytes=LIMIT_BYTES, peer_timeout=CALM_S) as cluster:
        calls = cluster.run("a", lambda: [rpc.rpc_async("b", hold, (bytes(1 << 18),), timeout=LIMIT_S) for _ in "123"])
        with cluster.use("b") as agent:
            eventually(lambda: bool(agent.connections.taken))
            eventually(lambda: held_by(agent, "a") > 3 << 18)
        with pytest.raises(RuntimeError, match="max_incoming_bytes"):
            cluster.run("a", rpc.rpc_sync, "b", hold, (bytes(1 << 18),), timeout=LIMIT_S)
        Work.is_over.set()
        assert [call.wait() for call in calls] == [1 << 18] * 3


def test_a_flood_whose_caller_dies_leaves_nothing() -> None:
    with InProcessCluster("b", "a", peer_timeout=UNIT_S, max_worker_threads=4) as cluster:
        calls = cluster.run("a", lambda: [rpc.rpc_async("b", hold, timeout=0) for _ in range(NUM_CALLS)])
        with cluster.use("b") as agent:
            eventually(lambda: len(agent.dispatcher.calls) == NUM_CALLS)
        account = account_of(agent, "a")
        eventually(lambda: agent.pool.facts().queued > NUM_CALLS - 100)  # after their entry in the table
        assert reserved_bytes(account) >= (NUM_CALLS - NUM_UNCOUNTED) * CALL_BYTES
        cluster.kill("a")
        eventually(lambda: not agent.connections.taken)
        Work.is_over.set()
        eventually(lambda: not len(agent.dispatcher.calls) and not reserved_bytes(account))
        eventually(lambda: not agent.pool.has_queue)
        assert all(isinstance(call.exception(LIMIT_S), RuntimeError) for call in calls)


def test_two_calls_of_one_number_end_the_session_and_count_for_nothing() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        call = cluster.run("a", rpc.rpc_async, "b", hold, timeout=LIMIT_S)
        with cluster.use("b") as agent:
            [active] = eventually(lambda: list(agent.dispatcher.calls))
        account = account_of(agent, "a")
        with cluster.use("a") as sender:
            session = sender.router.session_with(sender.directory.resolve("b"))
            assert session is not None
            session.send(CallMessage(active.id, "test_floods:nothing"))
            session.flush()
        with pytest.raises(WorkerLost, match="was lost"):
            call.wait()
        Work.is_over.set()
        eventually(lambda: not len(agent.dispatcher.calls) and not reserved_bytes(account))


def test_calls_that_fail_do_not_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_LOGGED_CALLS", 3)
    caplog.set_level(logging.WARNING, "rpcdist.rpc._serving.answers")
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:

        def fail() -> None:
            with pytest.raises(ValueError, match="invalid literal"):
                rpc.rpc_sync("b", int, ("no number",))

        for _ in range(6):
            cluster.run("a", fail)
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == 4 and texts[3].startswith("3 calls from a have failed")
        cluster.run("c", fail)
        assert "from c failed on b" in caplog.records[-1].getMessage()


def test_a_long_name_of_a_function_is_refused_and_kept_nowhere() -> None:
    """Those of the last thousand calls were kept, with up to a mebibyte each."""
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        with cluster.use("a") as sender:
            name = "test_floods:" + "x" * 100_000
            cluster.run("a", rpc.rpc_sync, "b", nothing, timeout=LIMIT_S)
            session: Any = sender.router.session_with(sender.directory.resolve("b"))
            session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=999, function=name)))
            session.flush()
        with cluster.use("b") as agent:
            assert cluster.run("a", rpc.rpc_sync, "b", nothing, timeout=LIMIT_S) is None
            eventually(lambda: not len(agent.dispatcher.calls), "the last call is taken off after its answer")
            recorder = agent.recorder
            assert recorder is not None
            eventually(lambda: len(list(recorder)) == 2, "both calls are kept")
            assert max(len(call.function) for call in recorder) < MAX_FUNCTION_CHARS
