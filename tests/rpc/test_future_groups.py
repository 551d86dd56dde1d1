"""Several futures together: all, any, in order of completion; torch's functions on ours."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from future_helpers import (
    LIMIT_S,
    arrive,
    bring,
    complete,
    deliver,
    done_future,
    fail,
    failed_future,
    is_observed,
    settle,
)
from future_helpers import pool as pool
from inside_agents import ThreadPool
from torch.futures import collect_all as torch_collect_all
from torch.futures import wait_all as torch_wait_all

from rpcdist.errors import BlockingInLoop, DeadlineExceeded
from rpcdist.rpc import as_completed, collect_all, wait_all, wait_any
from rpcdist.rpc._futures.waiting import replace_torch_functions, wait_all_from
from rpcdist.rpc.future import Future


def plain_done(value: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("members", [[failed_future(ValueError("no")), Future()], [done_future(1)], []])
def test_what_a_wait_sends_is_sent_once_also_where_nothing_is_to_be_waited_for(members: list[Future[int]]) -> None:
    sent: list[None] = []
    with contextlib.suppress(ValueError):
        wait_all_from(members, LIMIT_S, None, lambda: sent.append(None))
    assert len(sent) == 1


def test_wait_all_and_collect_all(pool: ThreadPool) -> None:
    futures: list[torch.futures.Future[int]] = [Future() for _ in range(20)]
    pool.submit_many([(future.set_result, (number,)) for number, future in enumerate(futures)])
    assert wait_all(futures, LIMIT_S) == torch.futures.wait_all(futures) == list(range(20))
    assert wait_all([plain_done(1), done_future(2)]) == [1, 2]
    assert wait_all([]) == []
    with pytest.raises(TypeError, match="not a future"):
        collect_all([3])  # type: ignore[arg-type]


def test_the_first_error_ends_wait_all_at_once() -> None:
    never: Future[int] = Future()
    with pytest.raises(ValueError):
        wait_all([never, failed_future(ValueError("x")), failed_future(KeyError("y"))])
    with pytest.raises(DeadlineExceeded):
        wait_all([never], 0.01)
    assert not never.done()


async def test_collect_all_is_awaitable_and_cancels_its_members() -> None:
    members: list[Future[int]] = [Future(), Future()]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect_all(members), 0.01)
    assert all(member.cancelled() for member in members)


def test_torch_functions_can_be_replaced() -> None:
    before = torch.futures.collect_all, torch.futures.wait_all  # an agent of this process may have replaced them
    undo = replace_torch_functions()
    try:
        never: Future[int] = Future()
        with pytest.raises(ValueError):
            torch.futures.wait_all([never, failed_future(ValueError())])
        assert isinstance(torch.futures.collect_all([never]), Future)
        assert not isinstance(torch.futures.collect_all([plain_done(1)]), Future)
        assert torch.futures.wait_all([plain_done(1)]) == [1]
    finally:
        undo()
    assert (torch.futures.collect_all, torch.futures.wait_all) == before


def test_who_has_imported_them_by_name_before_gets_ours_too() -> None:
    """Else callbacks of users would hang on the C++ half of a future, which the thread that reads a reply completes."""
    never: Future[int] = Future()
    undo = replace_torch_functions()
    try:
        combined: Any = torch_collect_all([never])
        assert isinstance(combined, Future)
        with pytest.raises(ValueError):
            torch_wait_all([never, failed_future(ValueError())])
        never.set_result(1)
        assert torch_wait_all([never, done_future(2)]) == [1, 2] and combined.wait(LIMIT_S) == [never]
    finally:
        undo()


@pytest.mark.parametrize("fails", [False, True])
def test_wait_all_wakes_once_for_all_or_for_the_first_that_fails(pool: ThreadPool, fails: bool) -> None:
    """Also where the results come in the middle of its looking at them, from several threads."""
    for _ in range(50):
        futures: list[Future[int]] = [Future() for _ in range(40)]
        for number, future in enumerate(futures):
            if fails and number == 20:
                pool.submit(fail, future, ValueError("x"))
            elif not fails or number != 30:
                pool.submit(arrive, future, number)
        if fails:
            with pytest.raises(ValueError):
                wait_all(futures, LIMIT_S)
        else:
            assert wait_all(futures, LIMIT_S) == list(range(40))
        assert not any(is_observed(future) for future in futures)


def test_wait_any(pool: ThreadPool) -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    assert wait_any(futures, 0.001) == ([], futures)
    pool.submit(futures[1].set_result, 1)
    done, pending = wait_any(futures, LIMIT_S)
    assert (done, pending) == ([futures[1]], [futures[0], futures[2]])
    assert wait_any(futures) == (done, pending)
    assert wait_any([]) == ([], [])
    assert not any(is_observed(future) for future in futures)


def test_wait_any_on_an_event_loop_leaves_no_observer() -> None:
    future: Future[int] = Future()

    async def wait() -> None:
        wait_any([future])

    with pytest.raises(BlockingInLoop):
        asyncio.run(wait())
    assert not is_observed(future)


def test_a_result_that_its_reader_takes_back_is_no_error() -> None:
    class TakenBack(deque[Future[int]]):
        """Another thread takes the element away between a test for it and its use."""

        def __bool__(self) -> bool:
            there = len(self) > 0
            self.clear()
            return there

    completions = as_completed([Future[int]()], 0.01)
    completions._taken = TakenBack([Future[int]()])
    with pytest.raises(DeadlineExceeded):
        next(completions)


def test_a_result_whose_making_is_interrupted_is_made_nevertheless() -> None:
    class Interrupted(Future[int]):
        interrupts = 1

        def _settle(self) -> None:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            super()._settle()

    future, other = Interrupted(), Future[int]()
    completions = as_completed([future, other], LIMIT_S)
    completions._is_taking = True  # as if the result came while a thread waits
    assert not bring(future, partial(int, 7))
    with pytest.raises(KeyboardInterrupt):
        next(completions)
    assert future.done() and future.value() == 7


def test_as_completed_in_order_of_completion(pool: ThreadPool) -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    completions = as_completed([*futures, futures[0]], LIMIT_S)
    assert len(completions) == 3
    order = [2, 0, 1]
    seen = []
    for number in order:
        pool.submit(futures[number].set_result, number)
        seen.append(next(completions).value())
    assert seen == order
    assert list(completions) == []
    with pytest.raises(DeadlineExceeded, match="1 of 2 futures"):
        for _ in as_completed([Future(), done_future(1)], 0.01):
            pass


async def test_as_completed_async(pool: ThreadPool) -> None:
    futures: list[Future[int]] = [Future() for _ in range(200)]
    pool.submit_many([(future.set_result, (number,)) for number, future in enumerate(futures)])
    seen = [future.value() async for future in as_completed(futures, LIMIT_S)]
    assert sorted(seen) == list(range(200))
    with pytest.raises(DeadlineExceeded):
        async for _ in as_completed([Future()], 0.01):
            pass


@pytest.mark.parametrize("collect", [wait_all, torch.futures.wait_all, lambda futures: list(as_completed(futures))])
def test_a_thousand_in_flight(pool: ThreadPool, collect: Callable[[Sequence[Any]], list[Any]]) -> None:
    for _ in range(3):
        futures: list[Future[int]] = [Future() for _ in range(1000)]
        for number, future in enumerate(futures):
            if number % 2:
                pool.submit(complete, future, number)
            else:
                deliver(pool, future, partial(int, number))
        assert len(collect(futures)) == 1000
        assert [future.wait() for future in futures] == list(range(1000))


class Connection:
    """Where results of futures come from: a thread that waits calls `lead`.

    Args:
        read: what a thread that reads here finds.
    """

    def __init__(self, read: Callable[[], object]) -> None:
        self.session = self
        self.num_rings = 0
        self._read = read
        self._rung = threading.Event()

    def expect(self, num_futures: int) -> list[Future[int]]:
        futures: list[Future[int]] = [Future() for _ in range(num_futures)]
        for future in futures:
            future._expected = cast(Any, self)
        return futures

    def read_while_waiting(self, is_waiting: Callable[[], bool], timeout_s: float | None) -> bool:
        self._read()
        if is_waiting():
            self._rung.wait(LIMIT_S if timeout_s is None else timeout_s)
        return not is_waiting()

    def interrupt(self) -> None:
        self.num_rings += 1
        self._rung.set()


WAITS: list[Callable[[Sequence[Future[int]]], object]] = [
    wait_all,
    wait_any,
    lambda futures: list(as_completed(futures)),
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_thread_that_waits_for_several_reads_and_makes_what_arrives(
    wait: Callable[[Sequence[Future[int]]], object],
) -> None:
    makers: list[int] = []
    needs_the_pool: list[bool] = []

    def make(number: int) -> int:
        makers.append(_thread.get_ident())
        return number

    def read() -> None:
        needs_the_pool.extend(bring(future, partial(make, number)) for number, future in enumerate(futures))

    futures = Connection(read).expect(3)
    wait(futures)
    assert [future.value() for future in futures] == [0, 1, 2]
    assert (needs_the_pool, makers) == ([False] * 3, [_thread.get_ident()] * 3)
    assert not any(is_observed(future) for future in futures)


@pytest.mark.parametrize("wait", WAITS)
def test_a_thread_that_reads_elsewhere_is_rung(
    pool: ThreadPool, wait: Callable[[Sequence[Future[int]]], object]
) -> None:
    first = Connection(lambda: pool.submit(deliver, pool, second, lambda: 2))
    second, other = Connection(lambda: None).expect(1)[0], first.expect(1)[0]
    second.add_done_callback(lambda _: deliver(pool, other, lambda: 1))
    wait([other, second])
    assert first.num_rings > 0 and second.value() == 2 and other.wait(LIMIT_S) == 1


def test_what_arrives_while_nobody_waits_is_made_by_others() -> None:
    first, second = Connection(lambda: bring(first, lambda: 1)).expect(2)
    completions = as_completed([first, second], LIMIT_S)
    assert next(completions) is first
    assert bring(second, lambda: 2)  # by the pool, for those who await it
    settle(second)
    assert next(completions) is second


def test_results_with_callbacks_of_users_are_made_by_others() -> None:
    needs_the_pool: list[bool] = []
    (future,) = Connection(lambda: needs_the_pool.append(bring(future, lambda: 3))).expect(1)
    future.add_done_callback(lambda _: None)
    with pytest.raises(DeadlineExceeded, match="1 of 1 futures"):
        wait_all([future], 0.01)
    assert needs_the_pool == [True]


def test_an_error_while_reading_leaves_nothing_undone() -> None:
    def read() -> None:
        for number, future in enumerate(futures):
            assert not bring(future, partial(int, number))
        raise KeyboardInterrupt

    futures = Connection(read).expect(2)
    with pytest.raises(KeyboardInterrupt):
        wait_all(futures)
    assert [future.value() for future in futures] == [0, 1]
    assert not any(is_observed(future) for future in futures)
