"""A worker's death, return and replacement, as the others see them; the workers live in this process."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from peer_timeouts import CALM_S, LIMIT_S, UNIT_S
from rpc_functions import add
from transport_nodes import pretend_idle

from rpcdist import rpc
from rpcdist.errors import OwnerLost, WorkerLost
from rpcdist.rpc._membership import leaving as leaving_module
from rpcdist.testing import InProcessCluster, eventually

released = threading.Event()


@pytest.fixture(autouse=True)
def everything_is_released() -> Iterator[None]:
    released.clear()
    yield
    released.set()


def count_up() -> Iterator[int]:
    yield from range(1000)


class Value:
    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> int:
        return self.number


USES: dict[str, Callable[[str], int]] = {
    "rpc_sync": lambda to: rpc.rpc_sync(to, add, (1, 2)),
    "rpc_async": lambda to: rpc.rpc_async(to, add, (1, 2)).wait(),
    "remote": lambda to: rpc.remote(to, add, (1, 2)).to_here(),
    "a method of a reference": lambda to: rpc.remote(to, Value, (3,)).rpc_sync().get(),
    "rpc_stream": lambda to: sum(1 for _ in rpc.rpc_stream(to, count_up)) - 997,
}


@pytest.mark.parametrize("elastic", [False, True])
def test_a_replacement_is_reached_by_the_first_call(elastic: bool) -> None:
    """From a worker that called its predecessor, from one that never did, and from the coordinator."""
    uses = deque(USES.values())
    with InProcessCluster("a", "b", "c", "d", elastic=elastic, peer_timeout=UNIT_S) as cluster:
        for caller in ("a", "c"):
            assert cluster.run(caller, rpc.rpc_sync, "b", add, (1, 1)) == 2
        for _ in USES:  # each is the first one of each worker once
            cluster.kill("b")
            with pytest.raises(WorkerLost):
                cluster.run("c", rpc.rpc_sync, "b", add, (1, 1))
            cluster.restart("b")
            for caller in ("c", "d", "a", "b"):
                assert [cluster.run(caller, use, "b") for use in uses] == [3] * len(uses)
            uses.rotate()


def test_a_replacement_is_reached_long_after_the_loss() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=UNIT_S) as cluster:
        held = cluster.run("c", rpc.remote, "b", Value, (1,))
        assert cluster.run("c", lambda: held.rpc_sync().get()) == 1
        told = threading.Event()
        with cluster.use("c") as agent:
            agent.events.member.listen(lambda event: told.set())
            cluster.kill("b")
            assert told.wait(LIMIT_S) and "b" in agent.directory.losses()
        told.clear()
        told.wait(2 * UNIT_S)  # nothing more happens: each keeps its last opinion for longer than the peer timeout
        assert not told.is_set()
        cluster.restart("b")
        assert cluster.run("c", USES["remote"], "b") == 3
        with pytest.raises(OwnerLost):
            cluster.run("c", lambda: held.rpc_sync().get())


def test_shutdown_names_the_dead_once_and_returns_them(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=UNIT_S) as cluster, caplog.at_level(logging.WARNING):
        cluster.run("c", rpc.remote, "a", Value, (1,))
        departing = [cluster.begin(name, rpc.shutdown) for name in ("a", "b")]
        cluster.kill("c")
        for future in departing:
            lost = future.result(LIMIT_S)
            assert list(lost) == ["c"] and "refused" in lost["c"]
        cluster.close()
    warnings = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert len(warnings) == 2 and all("'c' (rank 2)" in text for text in warnings), warnings


def test_shutdown_serves_the_living_and_waits_for_a_replacement() -> None:
    with InProcessCluster("server", "t0", "t1", "t2", peer_timeout=UNIT_S) as cluster:
        departing = [cluster.begin(name, rpc.shutdown) for name in ("server", "t0")]
        cluster.kill("t1")
        for _ in range(3):
            assert cluster.run("t2", rpc.rpc_sync, "server", add, (1, 2)) == 3
        cluster.restart("t1")
        departing.append(cluster.begin("t2", rpc.shutdown))
        assert cluster.run("t1", rpc.rpc_sync, "server", add, (1, 2)) == 3
        assert cluster.run("t1", rpc.rpc_sync, "t2", add, (1, 2)) == 3
        assert not any(future.done() for future in departing)  # t1 lives, and has not called it
        departing.append(cluster.begin("t1", rpc.shutdown))
        assert [future.result(LIMIT_S) for future in departing] == [{}] * 4
        cluster.close()


def test_a_gathering_after_a_replacement_has_all_members() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=UNIT_S) as cluster:
        cluster.kill("b")
        cluster.restart("b")
        gathering = [cluster.begin(name, rpc.api._all_gather, name) for name in ("a", "b", "c")]
        assert [future.result(LIMIT_S) for future in gathering] == [{"a": "a", "b": "b", "c": "c"}] * 3


def test_a_gathering_that_loses_a_member_says_so() -> None:
    """Whether the member dies while the others wait for it, or before."""
    with InProcessCluster("a", "b", "c", peer_timeout=UNIT_S) as cluster:
        waiting: list[Future[Any]] = [cluster.begin(name, rpc.api._all_gather, name) for name in ("a", "c")]
        cluster.kill("b")
        waiting.append(cluster.begin("a", rpc.api._barrier, {"a", "b"}))
        for future in waiting:
            with pytest.raises(WorkerLost, match="'b' was lost during a gathering of workers"):
                future.result(LIMIT_S)


def test_a_worker_that_was_only_silent_is_in_the_job_again() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=UNIT_S) as cluster:
        assert cluster.run("b", rpc.rpc_sync, "a", add, (1, 2)) == 3
        cluster.network.drop("a", "b")
        with cluster.use("a") as agent:
            eventually(lambda: "b" in agent.directory.losses(), "a has given b up")
            with cluster.use("c") as other:
                eventually(lambda: not other.directory.is_living(1), "c has heard of it")
            cluster.network.heal("a", "b")
            eventually(lambda: cluster.run("b", _answers, "a"), "b reaches a again")
            eventually(lambda: agent.directory.is_living(1), "a has found b")
            with cluster.use("c") as other:
                eventually(lambda: other.directory.is_living(1), "c has heard of it")


def _answers(to: str) -> bool:
    try:
        return bool(rpc.rpc_sync(to, add, (1, 2), timeout=UNIT_S) == 3)
    except RuntimeError:
        return False


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_module, "IDLE_LIMIT_S", 0.2)


@pytest.mark.usefixtures("short_limit")
def test_a_stream_that_nobody_reads_does_not_hold_up_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        streams = [cluster.run(one, rpc.rpc_stream, other, count_up) for one, other in (("a", "b"), ("b", "a"))]
        assert next(streams[0]) == 0
        departing = [cluster.begin(name, rpc.shutdown) for name in ("a", "b")]
        assert [future.result(LIMIT_S) for future in departing] == [{}] * 2
        cluster.close()
    texts = [record.getMessage() for record in caplog.records if "was closed by shutdown" in record.getMessage()]
    assert sorted(text.split("'")[1] for text in texts) == ["a", "b"] and "count_up" in texts[0], texts


@pytest.mark.usefixtures("short_limit")
def test_a_stream_that_is_read_slowly_is_read_to_its_end() -> None:
    """The handler that reads it makes a pause longer than the limit after which unread streams are closed."""
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        reading = cluster.run("c", rpc.rpc_async, "a", _read_slowly, ("b",))
        departing = [cluster.begin(name, rpc.shutdown) for name in cluster.names]
        assert reading.wait() == 1000
        assert [future.result(LIMIT_S) for future in departing] == [{}] * 3
        cluster.close()


def _read_slowly(producer: str) -> int:
    stream: rpc.Stream[int] = rpc.rpc_stream(producer, count_up)
    next(stream)
    released.wait(3.0)  # nobody sets it: this is the pause
    return 1 + sum(1 for _ in stream)


def test_a_process_that_stood_still_reads_before_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer has closed the connection meanwhile, which its own loop has not read: a call that went out on it would
    be lost.
    """
    with InProcessCluster("a", "b", peer_timeout=LIMIT_S) as cluster:
        assert cluster.run("a", rpc.rpc_sync, "b", abs, (-1,)) == 1
        with cluster.use("a") as agent:
            peer, goes_on = agent.router.peer(1), threading.Event()
            session: Any = peer.session
            agent.caller.io.call_soon(goes_on.wait, LIMIT_S)
            agent.caller.io.call_soon(session.close, "the peer was given up")
            pretend_idle(session, 2 * LIMIT_S)
            run, send = agent.network.run, agent.router.send_call

            def run_when_it_goes_on(*args: Any) -> Any:
                goes_on.set()
                return run(*args)

            def send_before_it_goes_on(*args: Any) -> None:
                send(*args)
                goes_on.set()

            monkeypatch.setattr(agent.network, "run", run_when_it_goes_on)
            monkeypatch.setattr(agent.router, "send_call", send_before_it_goes_on)
            for call in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
                assert call("b", abs, (-2,)) == 2
            assert peer.session is not session
