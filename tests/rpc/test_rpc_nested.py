"""Handlers that call on: back to their caller, through several workers, and with `async_execution`."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import rpc_functions
import torch
from rpc_cluster import Cluster

import rpcdist.rpc as rpc
from rpcdist.errors import DeadlineExceeded

pytestmark = pytest.mark.multiproc

remote_side: Any = rpc_functions  # a call of a coroutine function returns what it returns, not a coroutine

LIMIT_S = 60.0


@pytest.mark.parametrize("function", [remote_side.bounce, remote_side.bounce_in_cpp, remote_side.bounce_async])
def test_64_calls_that_call_back_three_levels_deep_finish(cluster: Cluster, function: Any) -> None:
    futures = [rpc.rpc_async("worker1", function, (3, "worker1", cluster.me)) for _ in range(64)]
    assert [future.wait(LIMIT_S) for future in futures] == [3] * 64


@pytest.mark.parametrize("function", [remote_side.bounce, remote_side.bounce_async])
def test_calls_to_oneself_may_nest(cluster: Cluster, function: Any) -> None:
    futures = [rpc.rpc_async(cluster.me, function, (4, cluster.me, cluster.me)) for _ in range(16)]
    assert [future.wait(LIMIT_S) for future in futures] == [4] * 16


def test_a_long_chain_of_blocked_handlers(cluster: Cluster) -> None:
    assert rpc.rpc_sync("worker1", remote_side.bounce, (40, "worker1", "worker2"), timeout=LIMIT_S) == 40


def test_every_pair_of_workers_at_once(cluster: Cluster) -> None:
    futures = [
        rpc.rpc_async(there, remote_side.bounce, (2, there, back))
        for there in cluster.names
        for back in cluster.names
        for _ in range(4)
    ]
    assert [future.wait(LIMIT_S) for future in futures] == [2] * 64


def test_a_sync_handler_calls_an_async_one(cluster: Cluster) -> None:
    for name in cluster.names:
        assert rpc.rpc_sync("worker1", remote_side.sync_call_of_async, (name,)) == 3


# ---------------------------------------------------------------- async_execution


@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("then_to", ["worker1", "worker2", "worker0"])
def test_the_future_of_a_handler_becomes_the_result(cluster: Cluster, to: str, then_to: str) -> None:
    assert rpc.rpc_sync(to, remote_side.chained_add, (then_to, 1, 2, 3)) == 6
    expected = torch.full((2,), 103.0)
    result = rpc.rpc_sync(to, remote_side.chained_twice, (then_to, cluster.me, torch.ones(2), 2))
    torch.testing.assert_close(result, expected)


def test_methods_with_async_execution(cluster: Cluster) -> None:
    for method in (remote_side.Chained.static, remote_side.Chained.of_class, remote_side.Chained().bound):
        assert rpc.rpc_sync("worker1", method, ("worker2", 1, 2)) == 3


def test_a_plain_future_that_a_thread_completes_holds_no_worker_thread(cluster: Cluster) -> None:
    key = uuid.uuid4().hex
    futures = [rpc.rpc_async("worker1", remote_side.completed_by_thread, (key,)) for _ in range(8)]
    rpc.rpc_sync("worker1", remote_side.board_put, (key,))
    assert [future.wait(LIMIT_S) for future in futures] == [key] * 8


def test_a_future_that_is_late_leaves_nothing_behind(cluster: Cluster) -> None:
    key = uuid.uuid4().hex
    with pytest.raises(DeadlineExceeded):
        rpc.rpc_sync("worker1", remote_side.completed_by_thread, (key,), timeout=0.2)
    rpc.rpc_sync("worker1", remote_side.board_put, (key,))
    assert rpc.rpc_sync("worker1", remote_side.add, (1, 1)) == 2


def test_failures_with_async_execution(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="from the future"):
        rpc.rpc_sync("worker1", remote_side.chained_failure)
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync("worker1", remote_side.not_a_future)
    with pytest.raises((RuntimeError, TypeError), match="unsupported operand"):
        rpc.rpc_sync("worker1", remote_side.chained_add, ("worker2", 1, 2, "x"))
