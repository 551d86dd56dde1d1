"""Futures that are done, or about to be, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from inside_agents import ThreadPool

from rpcdist.rpc.future import Future

__all__ = [
    "LIMIT_S",
    "REPLY_SINKS",
    "arrive",
    "bring",
    "complete",
    "deliver",
    "done_future",
    "fail",
    "failed_future",
    "is_observed",
    "pool",
    "run_callbacks",
    "settle",
]

LIMIT_S = 30.0

T = TypeVar("T")


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


# A call completes its future by private methods, which the rest of the tests do not name.


def complete(future: Future[T], value: T) -> bool:
    """As a call does whose result is there; False if the future had ended."""
    return future._complete(value)


def fail(future: Future[Any], error: Exception) -> None:
    future._fail(error)


def arrive(future: Future[T], value: T) -> bool:
    """As the thread does that reads a result and must run no callbacks: `run_callbacks` does."""
    return future._arrive(value)


def run_callbacks(future: Future[Any]) -> None:
    future._run_callbacks()


def bring(future: Future[T], decode: Callable[[], T]) -> bool:
    """As the thread does that reads a result which has to be made; True if no thread waits, so that others `settle`."""
    return future._deliver(decode)


def settle(future: Future[Any]) -> None:
    """Makes the result that was brought."""
    future._settle()


def deliver(pool: ThreadPool, future: Future[Any], decode: Callable[[], Any]) -> None:
    if bring(future, decode):
        pool.submit(settle, future)


def is_observed(future: Future[Any]) -> bool:
    """Whether a thread waits for it, or a loop: it has to be told of the end."""
    return bool(future._observers)


REPLY_SINKS: list[Callable[[ThreadPool, Future[int], int], object]] = [
    lambda pool, future, value: future.set_result(value),
    lambda pool, future, value: pool.submit(complete, future, value),
    lambda pool, future, value: deliver(pool, future, lambda: value),
]
