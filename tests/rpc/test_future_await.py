"""Futures on event loops: awaited, cancelled with their task, refused where they would block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from future_helpers import REPLY_SINKS, failed_future
from future_helpers import pool as pool

from rpcdist.errors import BlockingInLoop
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._futures.waiting import as_completed, wait_all, wait_any
from rpcdist.rpc.future import Future


@pytest.mark.parametrize("complete", REPLY_SINKS)
async def test_await(pool: ThreadPool, complete: Callable[..., object]) -> None:
    future: Future[int] = Future()
    timer = threading.Timer(0.005, complete, (pool, future, 5))
    timer.start()
    assert await future == 5
    assert await future == 5
    timer.join()


async def test_await_an_error_and_gather(pool: ThreadPool) -> None:
    futures: list[Future[int]] = [Future() for _ in range(100)]
    pool.submit_many([(future._complete, (number,)) for number, future in enumerate(futures)])
    assert await asyncio.gather(*futures) == list(range(100))
    error = ValueError("x")
    with pytest.raises(ValueError) as caught:
        await failed_future(error)
    assert caught.value is error


async def test_cancelling_the_task_cancels_the_call() -> None:
    cancelled: list[bool] = []
    future: Future[int] = Future(on_cancel=lambda: cancelled.append(True))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future, 0.01)
    assert cancelled == [True] and future.cancelled()
    assert not future._observers


async def test_blocking_on_a_loop_raises_at_once_unless_done() -> None:
    future: Future[int] = Future()
    with pytest.raises(BlockingInLoop, match="await"):
        future.wait()
    with pytest.raises(BlockingInLoop):
        wait_all([future])
    with pytest.raises(BlockingInLoop):
        wait_any([future])
    with pytest.raises(BlockingInLoop):
        next(as_completed([future]))
    future.set_result(1)
    assert future.wait() == 1
    assert wait_all([future]) == [1]
    assert next(as_completed([future])) is future


def test_a_loop_that_was_closed_does_not_disturb_the_reply_sink() -> None:
    future: Future[int] = Future()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await future

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    observers = list(future._observers)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    other: Future[int] = Future()
    other._observers.extend(observers)
    other.set_result(1)
    assert other.wait() == 1
