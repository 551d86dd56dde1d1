"""Futures of real calls: waiting in every way, cancelling, and many calls at once."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Any

import pytest
import rpc_functions
import torch
from rpc_cluster import Cluster
from torch.futures import collect_all

import rpcdist.rpc as rpc
from rpcdist.errors import Cancelled, DeadlineExceeded

pytestmark = pytest.mark.multiproc

remote_side: Any = rpc_functions  # a call of a coroutine function returns what it returns, not a coroutine

LIMIT_S = 30.0


@pytest.fixture
def key() -> str:
    """A name on the boards that nobody else uses."""
    return uuid.uuid4().hex


def open_gate(worker: str, key: str) -> None:
    rpc.rpc_sync(worker, remote_side.board_put, (key,))


def on_board(worker: str, key: str, count: int = 1) -> list[Any]:
    """The notes of a handler, as soon as they exist."""
    seen: list[Any] = rpc.rpc_sync(worker, remote_side.board_wait, (key, count))
    return seen


# ---------------------------------------------------------------- waiting in threads


def test_a_wait_may_end_before_the_call(cluster: Cluster, key: str) -> None:
    future = rpc.rpc_async("worker1", remote_side.block_at_gate, (key,))
    assert isinstance(future, rpc.Future) and isinstance(future, torch.futures.Future)
    with pytest.raises(DeadlineExceeded, match="the call continues"):
        future.wait(timeout=0.05)
    assert not future.done()
    open_gate("worker1", key)
    assert future.wait(timeout=LIMIT_S) == key
    assert future.done() and future.value() == key


def test_then_chains_and_keeps_errors(cluster: Cluster) -> None:
    future = rpc.rpc_async("worker1", remote_side.add, (1, 2))
    assert future.then(lambda done: done.wait() * 2).then(lambda done: done.wait() + 1).wait(LIMIT_S) == 7
    failed = rpc.rpc_async("worker1", remote_side.fail, ("value",)).then(lambda done: done.wait())
    with pytest.raises(RuntimeError, match="bad"):
        failed.wait(LIMIT_S)


def test_callbacks_may_call_again(cluster: Cluster) -> None:
    done = threading.Event()
    results: list[int] = []

    def again(future: rpc.Future[int]) -> None:
        results.append(rpc.rpc_sync("worker2", remote_side.add, (future.wait(), 1)))
        done.set()

    rpc.rpc_async("worker1", remote_side.add, (1, 2)).add_done_callback(again)
    assert done.wait(LIMIT_S)
    assert results == [4]


@pytest.mark.parametrize("reads_itself", [False, True], ids=["the loop reads", "the main thread reads"])
@pytest.mark.parametrize("how", ["then", "add_done_callback", "collect_all", "a copy of collect_all"])
@pytest.mark.parametrize("value", [None, 3, torch.ones(2)], ids=["None", "plain", "a tensor"])
def test_callbacks_may_call_whoever_reads_the_reply(
    cluster: Cluster, key: str, value: Any, how: str, reads_itself: bool
) -> None:
    """They run neither on the I/O loop, nor on a thread while it reads."""
    future: Any = rpc.rpc_async("worker1", remote_side.echo_after_gate, (key, value))
    called: Any = {
        "then": future.then,
        "add_done_callback": future.add_done_callback,
        "collect_all": lambda note: torch.futures.collect_all([future]).then(note),
        "a copy of collect_all": lambda note: collect_all([future]).then(note),
    }[how]
    sums: list[int] = []
    noted = threading.Event()

    def note(_: object) -> None:
        try:
            sums.append(rpc.rpc_sync("worker1", remote_side.add, (1, 1)))
        finally:
            noted.set()

    called(note)
    open_gate("worker1", key)
    if reads_itself:
        future.wait(LIMIT_S)
    assert noted.wait(LIMIT_S)
    assert sums == [2]


def test_torch_functions_wait_for_our_futures(cluster: Cluster) -> None:
    futures: Any = [rpc.rpc_async(name, remote_side.add, (index, 1)) for index, name in enumerate(cluster.names * 5)]
    assert torch.futures.wait_all(futures) == [index + 1 for index in range(20)]
    futures = [rpc.rpc_async(name, remote_side.add, (1, 1)) for name in cluster.names]
    assert [future.wait() for future in torch.futures.collect_all(futures).wait()] == [2] * 4
    failing: Any = [rpc.rpc_async("worker1", remote_side.fail, ("value",)), *futures]
    with pytest.raises(ValueError, match="bad"):
        torch.futures.wait_all(failing)


def test_wait_any_and_as_completed(cluster: Cluster, key: str) -> None:
    slow = rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,))
    quick = [rpc.rpc_async(name, remote_side.echo, (index,)) for index, name in enumerate(cluster.names)]
    found = rpc.wait_any([slow, *quick], timeout=LIMIT_S)
    assert found.done and slow in found.pending
    assert rpc.wait_any([slow], timeout=0.05).done == []
    order = []
    for future in rpc.as_completed([slow, *quick], timeout=LIMIT_S):
        order.append(future.wait())
        if len(order) == len(quick):
            open_gate("worker1", key)
    assert sorted(order[:-1]) == [0, 1, 2, 3] and order[-1] == key


# ---------------------------------------------------------------- awaiting


async def test_await_and_as_completed_on_a_loop(cluster: Cluster, key: str) -> None:
    assert await rpc.rpc_async("worker1", remote_side.add, (1, 2)) == 3
    results = await asyncio.gather(*(rpc.rpc_async(name, remote_side.add_async, (1, 2)) for name in cluster.names * 10))
    assert results == [3] * 40
    futures: list[Any] = [rpc.rpc_async(name, remote_side.echo, (name,)) for name in cluster.names]
    completed: Any = rpc.as_completed(futures, timeout=LIMIT_S)
    assert {await future async for future in completed} == set(cluster.names)
    with pytest.raises(ValueError, match="bad"):
        await rpc.rpc_async("worker1", remote_side.fail, ("value",))


async def test_a_future_may_be_awaited_by_many(cluster: Cluster, key: str) -> None:
    future = rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,))

    async def wait() -> object:
        return await future

    waiting = [asyncio.create_task(wait()) for _ in range(10)]
    await rpc.rpc_async("worker1", remote_side.board_put, (key,))
    assert await asyncio.gather(*waiting) == [key] * 10


# ---------------------------------------------------------------- cancelling


@pytest.mark.parametrize("worker", ["worker1", "worker0"])
def test_cancel_reaches_an_async_handler(cluster: Cluster, key: str, worker: str) -> None:
    future = rpc.rpc_async(worker, remote_side.wait_at_gate, (key,))
    on_board(worker, f"{key} entered")
    assert future.cancel() and future.cancelled() and not future.cancel()
    with pytest.raises(Cancelled):
        future.wait()
    assert on_board(worker, f"{key} ended") == ["CancelledError"]


def test_cancel_passes_through_a_handler_that_waits_for_another(cluster: Cluster, key: str) -> None:
    future = rpc.rpc_async("worker1", remote_side.wait_at_gate_of, ("worker2", key))
    on_board("worker2", f"{key} entered")
    future.cancel()
    assert on_board("worker2", f"{key} ended") == ["CancelledError"]


def test_cancelling_what_then_returned_cancels_the_call(cluster: Cluster, key: str) -> None:
    child = rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,)).then(lambda done: done.wait())
    on_board("worker1", f"{key} entered")
    assert child.cancel()
    assert on_board("worker1", f"{key} ended") == ["CancelledError"]


def test_a_call_that_is_cancelled_right_away_ends_here_and_there(cluster: Cluster, key: str) -> None:
    futures = [rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,)) for _ in range(50)]
    assert all(future.cancel() for future in futures)
    with pytest.raises(Cancelled):
        futures[0].wait()


def test_a_cancelled_call_with_large_arguments_leaves_the_connection_usable(cluster: Cluster) -> None:
    data = torch.ones(8 << 20)
    for _ in range(3):
        future = rpc.rpc_async("worker1", remote_side.echo, (data,))
        assert future.cancel()
    assert torch.equal(rpc.rpc_sync("worker1", remote_side.echo, (data[:100_000],)), data[:100_000])


def test_cancelling_a_blocked_handler_frees_the_caller_only(cluster: Cluster, key: str) -> None:
    future = rpc.rpc_async("worker1", remote_side.block_at_gate, (key,))
    on_board("worker1", f"{key} entered")
    assert future.cancel()
    with pytest.raises(Cancelled):
        future.wait()
    open_gate("worker1", key)  # a thread cannot be cancelled; its result is dropped


async def test_cancelling_the_awaiting_task_cancels_the_call(cluster: Cluster, key: str) -> None:
    async def wait() -> None:
        await rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,))

    task = asyncio.create_task(wait())
    await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} entered",))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} ended",)) == ["CancelledError"]


async def test_an_asyncio_timeout_cancels_the_call(cluster: Cluster, key: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,))
    assert await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} ended",)) == ["CancelledError"]


async def test_a_task_group_cancels_its_calls_when_one_fails(cluster: Cluster, key: str) -> None:
    async def wait() -> None:
        await rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,))

    async def fail() -> None:
        await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} entered", 3))
        await rpc.rpc_async("worker2", remote_side.fail, ("value",))

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(wait())
            group.create_task(fail())
    assert [type(exc) for exc in caught.value.exceptions] == [ValueError]
    ended = await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} ended", 3))
    assert ended == ["CancelledError"] * 3


# ---------------------------------------------------------------- many


def test_two_thousand_waiting_coroutines_cost_no_threads(cluster: Cluster, key: str) -> None:
    rpc.rpc_sync("worker1", remote_side.add_async, (1, 1))
    before = rpc.rpc_sync("worker1", remote_side.num_threads)
    futures = [rpc.rpc_async("worker1", remote_side.wait_at_gate, (key,)) for _ in range(2000)]
    entered = on_board("worker1", f"{key} entered", 2000)
    assert set(entered) == {"rpcdist-user-loop"}
    # The calls that come before the function is known as a coroutine function start in the pool, briefly; on a busy
    # machine, the pool starts a few more threads meanwhile.
    assert rpc.rpc_sync("worker1", remote_side.num_threads) <= before + 32
    open_gate("worker1", key)
    assert [future.wait(LIMIT_S) for future in futures] == [key] * 2000


def test_a_thousand_calls_in_flight_to_everybody(cluster: Cluster) -> None:
    futures = [rpc.rpc_async(index % 4, remote_side.add, (index, 1)) for index in range(1000)]
    assert [future.wait(LIMIT_S) for future in futures] == [index + 1 for index in range(1000)]


def test_futures_that_nobody_keeps_are_forgotten(cluster: Cluster) -> None:
    for _ in range(200):
        rpc.rpc_async("worker1", remote_side.add, (1, 1))
    assert rpc.rpc_sync("worker1", remote_side.add, (1, 1)) == 2
