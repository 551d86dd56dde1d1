"""Streams between real processes: items, errors, backpressure, and every way of ending one early."""

from __future__ import annotations

import asyncio
import gc
import uuid
from functools import partial
from typing import Any

import pytest
import rpc_functions
import rpc_stream_functions
from rpc_cluster import Cluster

import rpcdist.rpc as rpc
from rpcdist.errors import BlockingInLoop, Cancelled, DeadlineExceeded, RpcdistError
from rpcdist.rpc._calling import result_streams
from rpcdist.rpc._calling.result_streams import DEFAULT_WINDOW
from rpcdist.testing import eventually
from rpcdist.waiters import run_in_thread

pytestmark = pytest.mark.multiproc

stream_side: Any = rpc_stream_functions
remote_side: Any = rpc_functions  # a call of a coroutine function returns what it returns, not a coroutine

LIMIT_S = 30.0
GENERATORS = [stream_side.count_up, stream_side.count_up_async]
BOTH = pytest.mark.parametrize("function", GENERATORS)
EVERYWHERE = pytest.mark.parametrize("worker", ["worker1", "worker0"])


@pytest.fixture
def key() -> str:
    """A name on the boards that nobody else uses."""
    return uuid.uuid4().hex


def on_board(worker: str, key: str, count: int = 1) -> list[Any]:
    seen: list[Any] = rpc.rpc_sync(worker, remote_side.board_wait, (key, count))
    return seen


def drawn(worker: str, key: str) -> int:
    return len(rpc.rpc_sync(worker, remote_side.board_look, (f"{key} drawn",)))


@BOTH
@EVERYWHERE
@pytest.mark.parametrize("num", [0, 1, DEFAULT_WINDOW, 500])
def test_all_items_in_order(cluster: Cluster, worker: str, function: Any, num: int, key: str) -> None:
    assert list(rpc.rpc_stream(worker, function, (num, key))) == list(range(num))
    assert len(on_board(worker, f"{key} closed")) == 1


@BOTH
@EVERYWHERE
async def test_async_for(cluster: Cluster, worker: str, function: Any) -> None:
    stream = await rpc.rpc_async(worker, function, (100,))
    assert [item async for item in stream] == list(range(100))
    with pytest.raises(RpcdistError, match="has been read to its end"):
        _ = [item async for item in stream]


def test_every_call_function_gives_the_stream(cluster: Cluster) -> None:
    assert list(rpc.rpc_sync("worker1", stream_side.count_up, (3,))) == [0, 1, 2]
    assert list(rpc.rpc_async("worker1", stream_side.count_up, (3,)).wait(LIMIT_S)) == [0, 1, 2]
    with pytest.raises(TypeError, match="generator function"):
        rpc.rpc_stream("worker1", remote_side.add, (1, 2))


def test_streams_inside_handlers(cluster: Cluster) -> None:
    futures = [rpc.rpc_async("worker1", stream_side.sum_stream_of, ("worker2", 100)) for _ in range(8)]
    futures += [rpc.rpc_async("worker1", stream_side.sum_stream_of_async, ("worker2", 100)) for _ in range(8)]
    assert [future.wait(LIMIT_S) for future in futures] == [4950] * 16


def test_a_coroutine_that_returns_a_stream(cluster: Cluster, key: str) -> None:
    future = rpc.rpc_async("worker1", stream_side.make_stream_later, (key, 30))
    rpc.rpc_sync("worker1", remote_side.board_put, (key,))
    assert list(future.wait(LIMIT_S)) == list(range(30))


# ---------------------------------------------------------------- backpressure


@BOTH
@EVERYWHERE
def test_the_producer_does_not_run_ahead_of_the_window(cluster: Cluster, worker: str, function: Any, key: str) -> None:
    with rpc.rpc_stream(worker, function, (10_000, key)) as stream:
        on_board(worker, f"{key} drawn", DEFAULT_WINDOW)
        for taken in range(1, 60):
            assert next(stream) == taken - 1
            assert drawn(worker, key) <= taken + DEFAULT_WINDOW
        for _ in range(20):  # nothing more comes while nobody takes
            rpc.rpc_sync(worker, remote_side.nothing)
        assert drawn(worker, key) <= 59 + DEFAULT_WINDOW
    assert len(on_board(worker, f"{key} closed")) == 1


def test_a_waiting_stream_does_not_hold_up_others(cluster: Cluster) -> None:
    slow = rpc.rpc_stream("worker1", stream_side.tensors_up, (100, 1 << 18))
    assert [len(list(rpc.rpc_stream("worker1", stream_side.count_up, (100,)))) for _ in range(3)] == [100] * 3
    assert sum(float(item[0]) for item in slow) == 4950


# ---------------------------------------------------------------- ending early


@BOTH
@EVERYWHERE
@pytest.mark.parametrize("how", ["close", "with", "drop", "break"])
def test_a_consumer_that_stops_closes_the_generator(
    cluster: Cluster, worker: str, function: Any, how: str, key: str
) -> None:
    stream = rpc.rpc_stream(worker, function, (10_000, key))
    assert next(stream) == 0
    if how == "close":
        stream.close()
        stream.close()
        with pytest.raises(Cancelled):
            list(stream)
    elif how == "with":
        with stream:
            next(stream)
    elif how == "break":
        for item in stream:
            if item == 20:
                break
        stream.close()
    del stream
    gc.collect()
    assert on_board(worker, f"{key} closed") == [True]
    assert drawn(worker, key) < 100


@pytest.mark.parametrize("is_traced", [False, True])
def test_dropping_a_stream_that_was_never_read(
    cluster: Cluster, key: str, monkeypatch: pytest.MonkeyPatch, is_traced: bool
) -> None:
    told: list[str] = []
    if is_traced:
        monkeypatch.setattr(result_streams, "span_taps", [lambda lane, name, began_s, ended_s: told.append(name)])
    rpc.rpc_stream("worker1", stream_side.count_up, (10_000, key))
    gc.collect()
    assert on_board("worker1", f"{key} closed") == [True]
    if is_traced:
        eventually(lambda: told, "the trace is told of its end")


async def test_cancelling_the_consumer_takes_no_item(cluster: Cluster, key: str) -> None:
    stream = await rpc.rpc_async("worker1", stream_side.gated_stream, (key,))
    assert await anext(stream) == 0

    async def take() -> int:
        item: int = await anext(stream)
        return item

    task = asyncio.create_task(take())
    await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} waiting",))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rpc.rpc_async("worker1", remote_side.board_put, (key,))
    assert [item async for item in stream] == [1]


def test_closing_cancels_an_async_generator_that_waits(cluster: Cluster, key: str) -> None:
    with rpc.rpc_stream("worker1", stream_side.gated_stream, (key,)) as stream:
        assert next(stream) == 0
        on_board("worker1", f"{key} waiting")
    assert on_board("worker1", f"{key} ended") == ["CancelledError"]


def test_a_call_that_is_cancelled_before_its_stream_began(cluster: Cluster, key: str) -> None:
    future = rpc.rpc_async("worker1", stream_side.make_stream_when_open, (key, 10_000))
    on_board("worker1", f"{key} entered")
    assert future.cancel()
    rpc.rpc_sync("worker1", remote_side.board_put, (key,))  # the fixture sees whether the generator stays


def test_a_stream_that_begins_after_the_deadline_is_closed(cluster: Cluster, key: str) -> None:
    future = rpc.rpc_async("worker1", stream_side.make_stream_when_open, (key, 10_000), timeout=0.2)
    with pytest.raises(DeadlineExceeded):
        future.wait(LIMIT_S)  # the fixture sees whether the generator stays


# ---------------------------------------------------------------- errors and limits


@pytest.mark.parametrize("function", [stream_side.break_after, stream_side.break_after_async])
@EVERYWHERE
def test_an_exception_comes_after_the_items_before_it(cluster: Cluster, worker: str, function: Any) -> None:
    stream = rpc.rpc_stream(worker, function, (40,))
    got = []
    with pytest.raises(ValueError, match="broken") as caught:
        for item in stream:
            got.append(item)
    assert got == list(range(40)) and caught.value.args == ("broken", 40)
    assert "break_after" in str(caught.value.__cause__)
    with pytest.raises(RpcdistError, match="has been read to its end"):
        list(stream)


def test_an_item_that_cannot_be_pickled_ends_the_stream(cluster: Cluster, key: str) -> None:
    got = []
    with pytest.raises(TypeError, match="lock"):
        for item in rpc.rpc_stream("worker1", stream_side.unpicklable_after, (20, key)):
            got.append(item)
    assert got == list(range(20))
    assert len(on_board("worker1", f"{key} closed")) == 1


def test_a_generator_that_fails_while_it_is_closed_still_ends_the_stream(cluster: Cluster, key: str) -> None:
    stream = rpc.rpc_stream("worker1", stream_side.stubborn, (key,), timeout=LIMIT_S)
    assert next(stream) == 0
    with pytest.raises((TypeError, KeyError), match=r"lock|at the end"):
        next(stream)


def test_the_timeout_limits_the_wait_for_each_item(cluster: Cluster, key: str) -> None:
    stream = rpc.rpc_stream("worker1", stream_side.gated_sync_stream, (key,), timeout=2)
    assert next(stream) == 0
    with pytest.raises(DeadlineExceeded, match="gated_sync_stream"):
        next(stream)
    rpc.rpc_sync("worker1", remote_side.board_put, (key,))
    with pytest.raises(StopIteration):
        while True:
            next(stream)


async def test_the_timeout_limits_each_item_on_a_loop(cluster: Cluster, key: str) -> None:
    stream = await rpc.rpc_async("worker1", stream_side.gated_stream, (key,), timeout=2)
    assert await anext(stream) == 0
    with pytest.raises(DeadlineExceeded, match="gated_stream"):
        await anext(stream)
    await stream.aclose()
    assert await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} ended",)) == ["CancelledError"]


async def test_a_for_loop_on_a_loop_is_refused(cluster: Cluster) -> None:
    stream = await rpc.rpc_async("worker1", stream_side.count_up, (3,))
    with pytest.raises(BlockingInLoop):
        next(stream)
    stream.close()


@EVERYWHERE
async def test_rpc_stream_on_a_loop(cluster: Cluster, worker: str) -> None:
    stream = rpc.rpc_stream(worker, stream_side.count_up, (40,))
    assert [item async for item in stream] == list(range(40))
    with pytest.raises(RpcdistError, match="read to its end"):
        aiter(stream)


async def test_rpc_stream_on_a_loop_of_what_is_no_generator(cluster: Cluster) -> None:
    stream = rpc.rpc_stream("worker1", remote_side.board_put, ("no generator",))
    with pytest.raises(TypeError, match=r"expects a generator function, but .*board_put.* returned NoneType"):
        await anext(stream)


async def test_rpc_stream_on_a_loop_refuses_for_there(cluster: Cluster) -> None:
    stream = rpc.rpc_stream("worker1", stream_side.count_up, (3,))
    with pytest.raises(BlockingInLoop, match="async for item in"):
        next(stream)
    assert await run_in_thread(partial(list, stream), stream.close, "reader") == [0, 1, 2]
    with pytest.raises(RpcdistError, match="read to its end"):
        iter(stream)


async def test_leaving_rpc_stream_on_a_loop_closes_the_generator(cluster: Cluster, key: str) -> None:
    async with rpc.rpc_stream("worker1", stream_side.gated_stream, (key,)) as stream:
        assert await anext(stream) == 0
    assert await rpc.rpc_async("worker1", remote_side.board_wait, (f"{key} ended",)) == ["CancelledError"]


async def test_closing_rpc_stream_on_a_loop_at_once_cancels_its_call(cluster: Cluster) -> None:
    stream = rpc.rpc_stream("worker1", stream_side.count_up, (3,))
    stream.close()
    with pytest.raises(Cancelled):
        await anext(stream)


async def test_closing_rpc_stream_on_a_loop_discards_what_has_arrived(cluster: Cluster) -> None:
    stream = rpc.rpc_stream("worker1", stream_side.count_up, (3,))
    await run_in_thread(lambda: eventually(lambda: "3 waiting, ended" in repr(stream)), stream.close, "watcher")
    stream.close()
    with pytest.raises(Cancelled, match="closed by its consumer"):
        await anext(stream)


# ---------------------------------------------------------------- what the items are


@EVERYWHERE
def test_a_stream_of_large_tensors(cluster: Cluster, worker: str) -> None:
    num, size = 40, 1 << 18
    total = 0.0
    for index, item in enumerate(rpc.rpc_stream(worker, stream_side.tensors_up, (num, size))):
        assert item.shape == (size,) and float(item[-1]) == index
        item.add_(1)  # it is the consumer's own
        total += float(item[0])
    assert total == num * (num - 1) / 2 + num


def test_four_streams_of_large_tensors_at_once(cluster: Cluster) -> None:
    streams = [rpc.rpc_stream(name, stream_side.tensors_up, (12, 1 << 19)) for name in cluster.names]
    for index, items in enumerate(zip(*streams, strict=True)):
        assert [float(item[-1]) for item in items] == [index] * 4


def test_torch_state_of_a_generator_stays_with_it(cluster: Cluster) -> None:
    for worker in ("worker1", cluster.me):
        with rpc.rpc_stream(worker, stream_side.without_grad, (200,)) as stream:
            for _ in range(60):
                assert next(stream) is False
                assert rpc.rpc_sync(worker, stream_side.grad_enabled)
