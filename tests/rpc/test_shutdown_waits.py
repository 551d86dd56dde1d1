"""The work for which a graceful shutdown waits, and the workers that it names when the time is over; the workers live
in this process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from inside_agents import current_agent
from peer_timeouts import CALM_S, LIMIT_S, UNIT_S
from rpc_functions import add

from rpcdist import rpc
from rpcdist.errors import DeadlineExceeded, NotInitialized, RpcdistError
from rpcdist.rpc._membership import leaving as leaving_module
from rpcdist.testing import InProcessCluster, eventually

SHORT_S = UNIT_S
entered = threading.Event()
released = threading.Event()


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def everything_is_released() -> Iterator[None]:
    entered.clear()
    released.clear()
    yield
    released.set()


def enter_and_wait() -> None:
    entered.set()
    released.wait(LIMIT_S)


def pass_on(to: str) -> None:
    """Starts a call for which nobody waits."""
    rpc.rpc_async(to, enter_and_wait)


def test_shutdown_waits_for_a_slow_worker() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        leaving = [cluster.begin(name, rpc.shutdown) for name in ("a", "b")]
        with cluster.use("c"):  # those who wait still serve
            for name in ("a", "b"):
                assert rpc.rpc_sync(name, add, (1, 2)) == 3
            assert not any(future.done() for future in leaving)
            rpc.shutdown()
        for future in leaving:
            future.result(LIMIT_S)
        cluster.close()


def test_a_replacement_leaves_that_never_knew_a_lost_worker() -> None:
    """It joins while another one is gone, which nobody replaces."""
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        cluster.kill("b")
        cluster.kill("c")
        cluster.restart("b")
        leaving = {name: cluster.begin(name, rpc.shutdown) for name in ("a", "b")}
        for name, future in leaving.items():
            assert list(future.result(LIMIT_S)) == ["c"], name
        cluster.close()


def test_shutdown_waits_for_outstanding_calls(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        rpc.rpc_async("b", pass_on, ("a",))
    assert entered.wait(LIMIT_S)
    leaving = [cluster.begin(name, rpc.shutdown) for name in cluster.names]
    with pytest.raises(TimeoutError):
        leaving[0].result(SHORT_S)
    released.set()
    for future in leaving:
        future.result(LIMIT_S)
    cluster.close()


def test_shutdown_with_a_timeout_names_who_is_missing() -> None:
    with InProcessCluster("a", "b", "c", "d", peer_timeout=CALM_S) as cluster:
        started = time.monotonic()
        # The host stays longer: b asks it who is missing.
        limits = {"a": 4 * SHORT_S, "b": SHORT_S}
        leaving = [cluster.begin(name, rpc.shutdown, timeout=limit_s) for name, limit_s in limits.items()]
        for future in leaving:
            error = future.exception(LIMIT_S)
            assert isinstance(error, DeadlineExceeded) and "['c', 'd']" in str(error)
        assert time.monotonic() - started < LIMIT_S / 2
        for name in ("a", "b"):
            with pytest.raises(NotInitialized):
                cluster.run(name, rpc.rpc_sync, "b", add, (1, 2))
        cluster.close()


def test_shutdown_timeout_of_the_options() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S, shutdown_timeout=SHORT_S) as cluster:
        with pytest.raises(DeadlineExceeded, match=r"\['b'\]"):
            cluster.run("a", rpc.shutdown)
        cluster.close()


async def enter_and_wait_async() -> None:
    entered.set()
    await asyncio.Event().wait()


def test_shutdown_with_a_timeout_names_the_call_that_does_not_end(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        held = rpc.rpc_async("b", enter_and_wait_async)
    assert entered.wait(LIMIT_S)
    leaving = [cluster.begin(name, rpc.shutdown, timeout=SHORT_S) for name in cluster.names]
    errors = [future.exception(LIMIT_S) for future in leaving]
    assert any("enter_and_wait" in str(error) for error in errors), errors
    assert isinstance(held.exception(LIMIT_S), RpcdistError)
    cluster.close()


def test_a_shutdown_that_nobody_can_host_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leaving_module, "LOG_PERIOD_S", 0.0)
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        with cluster.use("a"):
            caller = current_agent().caller
        gather, failures = caller.gather, ["it has no thread left"] * 2

        def gather_later(*arguments: Any) -> Any:
            if failures:
                raise RpcdistError(failures.pop())
            return gather(*arguments)

        monkeypatch.setattr(caller, "gather", gather_later)
        with caplog.at_level(logging.WARNING):
            for future in [cluster.begin(name, rpc.shutdown) for name in cluster.names]:
                future.result(LIMIT_S)
        cluster.close()
    assert caplog.text.count("shutdown of a tries again, since a could not host it: it has no thread left") == 2


def test_a_shutdown_that_waits_logs_for_what_with_stacks(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leaving_module, "LOG_PERIOD_S", SHORT_S)
    with cluster.use("a"):
        held = rpc.rpc_async("b", enter_and_wait)
    assert entered.wait(LIMIT_S)
    everybody = [cluster.begin(name, rpc.shutdown) for name in cluster.names]
    eventually(lambda: "shutdown of b waits for" in caplog.text and "in enter_and_wait" in caplog.text)
    assert "enter_and_wait" in next(line for line in caplog.text.splitlines() if "shutdown of b waits for" in line)
    released.set()
    held.wait(LIMIT_S)
    for future in everybody:
        future.result(LIMIT_S)
    cluster.close()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_shutdown_gives_up_a_handler_that_never_ends_when_its_caller_has(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.setattr(leaving_module, "SLOW_WORK_LIMIT_S", SHORT_S)
    with cluster.use("a"):
        if how == "deadline":
            limit_s = UNIT_S / 4
            while not entered.is_set():  # on a busy machine a deadline may be over before the call begins
                limit_s *= 4
                with pytest.raises(DeadlineExceeded):
                    rpc.rpc_sync("b", enter_and_wait, timeout=limit_s)
        else:
            future = rpc.rpc_async("b", enter_and_wait)
            assert entered.wait(LIMIT_S)
            future.cancel()
    everybody = [cluster.begin(name, rpc.shutdown) for name in cluster.names]
    eventually(lambda: "shutdown of b abandons <call" in caplog.text)
    assert "enter_and_wait" in caplog.text and "no longer waits" in caplog.text
    released.set()  # its thread, for which the pool waits
    for future_ in everybody:
        future_.result(LIMIT_S)
    cluster.close()


def test_shutdown_gives_up_no_call_that_somebody_waits_for(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving_module, "SLOW_WORK_LIMIT_S", 0.0)
    with cluster.use("a"):
        future = rpc.rpc_async("b", enter_and_wait)
    assert entered.wait(LIMIT_S)
    everybody = [cluster.begin(name, rpc.shutdown) for name in cluster.names]
    with pytest.raises(TimeoutError):
        everybody[1].result(SHORT_S)
    released.set()
    assert future.wait(LIMIT_S) is None
    for each in everybody:
        each.result(LIMIT_S)
    cluster.close()


def test_a_shutdown_that_cannot_close_its_connections_ends_its_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after SIGSTOP in the middle of it. Its threads stayed for ever, and its caller got the error."""

    def too_slow(coroutine: Coroutine[Any, Any, Any], timeout_s: float | None, **given: Any) -> Any:
        if "_close_connections" not in repr(coroutine):
            return run(coroutine, timeout_s, **given)
        coroutine.close()
        raise DeadlineExceeded("an operation took longer than 5.0 s")

    with InProcessCluster("a") as cluster:
        cluster.run("a", rpc.rpc_sync, "a", add, (1, 2))
        network = cluster.run("a", current_agent).network
        run = network.run
        monkeypatch.setattr(network, "run", too_slow)
        cluster.shutdown()
    assert "worker 'a' did not close its connections in order: an operation took longer" in caplog.text
