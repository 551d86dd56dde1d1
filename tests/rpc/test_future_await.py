"""Futures on event loops: awaited, cancelled with their task, refused where they would block."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
from future_helpers import REPLY_SINKS, arrive, complete, fail, failed_future, is_observed
from future_helpers import pool as pool
from inside_agents import ThreadPool

from rpcdist import rpc
from rpcdist.collectives import Work
from rpcdist.errors import BlockingInLoop, Cancelled, RpcdistError
from rpcdist.rpc import as_completed, wait_all, wait_any
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
    pool.submit_many([(complete, (future, number)) for number, future in enumerate(futures)])
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
    assert not is_observed(future)


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


def test_an_await_on_a_loop_of_another_library_says_what_works_there() -> None:
    """As of trio, which runs coroutines itself; the error was asyncio's "no running event loop"."""

    async def first_of(futures: list[Future[int]]) -> object:
        async for future in as_completed(futures):
            return future
        return None

    async def wait_for(future: Future[int]) -> int:
        return await future

    for waiting in (wait_for(Future()), first_of([Future()]), rpc.get_actor_async("a"), Work("barrier").__await__()):
        with pytest.raises(RpcdistError, match=r"only on an event loop of asyncio or uvloop.*trio\.to_thread"):
            waiting.send(None)


def test_a_loop_that_was_closed_does_not_disturb_the_reply_sink() -> None:
    future: Future[int] = Future()
    loop = asyncio.new_event_loop()

    async def begin_to_wait() -> Generator[Any, Any, int]:
        waiting = future.__await__()
        next(waiting)
        return waiting

    waiting = loop.run_until_complete(begin_to_wait())
    loop.close()
    future.set_result(1)
    assert future.wait() == 1
    waiting.close()


asyncio_wait: Any = asyncio.wait  # its type knows asyncio's own futures only


def complete_from_a_thread(pool: ThreadPool) -> list[Future[int]]:
    """One of each kind of end, of which another thread makes two while somebody waits, and one that stays pending."""
    early, late, failed, cancelled, pending = (Future[int]() for _ in range(5))
    early.set_result(1)
    cancelled.cancel()
    pool.submit(complete, late, 2)
    pool.submit(fail, failed, ValueError("3"))
    return [early, late, failed, cancelled, pending]


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize("until", [asyncio.ALL_COMPLETED, asyncio.FIRST_EXCEPTION, asyncio.FIRST_COMPLETED])
async def test_asyncio_wait(pool: ThreadPool, until: str, timeout_s: float | None) -> None:
    *ending, pending = complete_from_a_thread(pool)
    if until == asyncio.ALL_COMPLETED:
        done, left = await asyncio_wait(ending, timeout=timeout_s, return_when=until)
        assert (done, left) == (set(ending), set())
        assert [future.result() for future in ending[:2]] == [1, 2]
        with pytest.raises(ValueError, match="3"):
            ending[2].result()
        with pytest.raises(Cancelled):
            ending[3].result()
    elif until == asyncio.FIRST_EXCEPTION:
        done, left = await asyncio_wait([ending[1], ending[2], pending], timeout=timeout_s, return_when=until)
        assert ending[2] in done and pending in left
    else:
        done, left = await asyncio_wait([ending[1], pending], timeout=timeout_s, return_when=until)
        assert (done, left) == ({ending[1]}, {pending})
    assert not arrive(pending, 4)  # no callback is left to be run: asyncio has taken its own back


async def test_asyncio_wait_gives_up_at_its_limit() -> None:
    pending: Future[int] = Future()
    assert await asyncio_wait([pending], timeout=0.01) == (set(), {pending})
    with pytest.raises(asyncio.InvalidStateError):
        pending.result()
    assert not arrive(pending, 4)


async def test_other_functions_of_asyncio_that_wait(pool: ThreadPool) -> None:
    def later(value: int) -> Future[int]:
        future: Future[int] = Future()
        pool.submit(complete, future, value)
        return future

    assert list(await asyncio.gather(later(1), later(2))) == [1, 2]
    assert await asyncio.shield(later(3)) == 3
    assert await asyncio.wait_for(later(4), 30) == 4
    assert await asyncio.ensure_future(later(5)) == 5
    assert sorted([await one for one in asyncio.as_completed([later(6), later(7)])]) == [6, 7]
    async with asyncio.timeout(30):
        assert await later(8) == 8
    assert later(9).get_loop() is asyncio.get_running_loop()


async def test_shield_leaves_the_call_alone() -> None:
    call: Future[int] = Future()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(call), 0.01)
    assert not call.done()
    call.set_result(1)


async def test_callbacks_that_are_added_on_a_loop_run_on_it(pool: ThreadPool) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("of the task")
    seen: list[tuple[int, str, int]] = []
    all_seen = asyncio.Event()

    def callback(future: Future[int]) -> None:
        seen.append((threading.get_ident(), variable.get(), future.result()))
        if len(seen) == 3:
            all_seen.set()

    future: Future[int] = Future()
    future.add_done_callback(callback)
    future.add_done_callback(callback, context=contextvars.Context())
    pool.submit(complete, future, 1)
    await asyncio_wait([future])
    future.add_done_callback(callback)
    assert len(seen) < 3  # it never runs before `add_done_callback` returns
    await asyncio.wait_for(all_seen.wait(), 30)
    me = threading.get_ident()
    assert sorted(seen) == [(me, "of the task", 1), (me, "of the task", 1), (me, "unset", 1)]


@pytest.mark.parametrize("is_on_loop", [False, True])
def test_a_callback_is_taken_back(is_on_loop: bool) -> None:
    called: list[object] = []
    first: Future[int] = Future()

    async def add_and_remove() -> None:
        for callback in (called.append, called.clear, called.append):
            first.add_done_callback(callback)  # type: ignore[arg-type]
        assert first.remove_done_callback(called.append) == 2
        assert first.remove_done_callback(called.append) == 0
        first.remove_done_callback(called.clear)  # type: ignore[arg-type]
        first.set_result(1)
        await asyncio.sleep(0)

    if is_on_loop:
        asyncio.run(add_and_remove())
    else:
        first.add_done_callback(called.append)
        assert first.remove_done_callback(called.append) == 1
        first.set_result(1)
    assert called == []


def test_a_callback_of_a_closed_loop_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    called: list[object] = []

    async def add() -> None:
        future.add_done_callback(called.append)

    asyncio.run(add())
    future.set_result(1)
    assert not called and not caplog.records
