"""Futures that are done, or about to be, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc.future import Future

__all__ = ["LIMIT_S", "REPLY_SINKS", "deliver", "done_future", "failed_future", "pool"]

LIMIT_S = 30.0


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    with_pool = ThreadPool()
    yield with_pool
    assert with_pool.close(LIMIT_S) == []


def done_future(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


def failed_future(error: Exception) -> Future[int]:
    future: Future[int] = Future()
    future.set_exception(error)
    return future


def deliver(pool: ThreadPool, future: Future[Any], decode: Callable[[], Any]) -> None:
    if future._deliver(decode):
        pool.submit(future._settle)


REPLY_SINKS: list[Callable[[ThreadPool, Future[int], int], object]] = [
    lambda pool, future, value: future.set_result(value),
    lambda pool, future, value: pool.submit(future._complete, value),
    lambda pool, future, value: deliver(pool, future, lambda: value),
]
