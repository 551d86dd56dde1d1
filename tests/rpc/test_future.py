"""Futures: torch's behaviour where torch has one, and awaiting, cancelling and limits beyond it."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from future_helpers import (
    LIMIT_S,
    REPLY_SINKS,
    arrive,
    bring,
    complete,
    deliver,
    done_future,
    failed_future,
    is_observed,
    run_callbacks,
    settle,
)
from future_helpers import pool as pool
from inside_agents import ThreadPool

from rpcdist.errors import Cancelled, DeadlineExceeded, NotInitialized
from rpcdist.rpc import collect_all, wait_all
from rpcdist.rpc.future import Future
from rpcdist.testing import eventually

# -- one future --------------------------------------------------------------------------------------------------------


def test_it_is_a_torch_future() -> None:
    future: Future[int] = Future()
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, torch._C.Future)
    assert not future.done() and repr(future) == "<Future pending>"
    future.set_result(3)
    assert future.done() and repr(future) == "<Future done: int>"
    assert future.wait() == future.wait() == future.value() == 3
    assert future.exception() is None and not future.cancelled()


@pytest.mark.parametrize("complete", REPLY_SINKS)
def test_all_ways_to_wait_see_the_result(pool: ThreadPool, complete: Callable[..., object]) -> None:
    for _ in range(50):
        future: Future[int] = Future()
        seen: list[int] = []
        threads = [
            threading.Thread(target=lambda: seen.append(future.wait(LIMIT_S))),  # noqa: B023
            threading.Thread(target=lambda: seen.append(future.then(lambda f: f.wait()).wait(LIMIT_S))),  # noqa: B023
            threading.Thread(target=lambda: seen.append(torch.futures.wait_all([future])[0])),  # noqa: B023
        ]
        for thread in threads:
            thread.start()
        complete(pool, future, 5)
        assert future.wait(LIMIT_S) == 5
        for thread in threads:
            thread.join(LIMIT_S)
        assert seen == [5, 5, 5]


def test_a_blocked_thread_decodes_what_is_delivered(pool: ThreadPool) -> None:
    future: Future[str] = Future()
    owed: list[bool] = []

    def when_somebody_waits() -> None:
        eventually(lambda: is_observed(future), "a thread waits")
        owed.append(bring(future, lambda: threading.current_thread().name))

    pool.submit(when_somebody_waits)
    assert future.wait(LIMIT_S) == threading.current_thread().name
    assert owed == [False]


def test_nobody_waits_so_the_deliverer_owes_it() -> None:
    future: Future[int] = Future()
    assert bring(future, lambda: 4)
    assert not future.done() and not future.cancel()  # it has arrived
    assert not bring(future, lambda: 5)
    settle(future)
    settle(future)
    assert future.value() == 4


def test_a_result_that_is_made_completes_the_future_but_runs_no_callbacks() -> None:
    future: Future[int] = Future()
    seen: list[int] = []
    assert not arrive(Future[int](), 4)  # no callbacks are left to be run
    future.add_done_callback(lambda done: seen.append(done.value()))
    assert arrive(future, 5) and future.done() and future.wait() == 5 and not seen
    assert not arrive(future, 6) and not future.cancel()
    run_callbacks(future)
    assert seen == [5]


def test_an_error_of_decoding_is_the_error_of_the_call() -> None:
    future: Future[int] = Future()
    assert bring(future, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        future.wait()


def test_completing_twice() -> None:
    future = done_future(1)
    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        future.set_result(2)
    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        future.set_exception(ValueError())
    with pytest.raises(AssertionError, match="not an Exception"):
        Future().set_exception(3)  # type: ignore[arg-type]
    assert future.wait() == 1


def test_many_threads_complete_one_wins() -> None:
    for _ in range(30):
        future: Future[int] = Future()
        wins: list[int] = []
        barrier = threading.Barrier(4)

        def race(me: int, future: Future[int] = future, wins: list[int] = wins) -> None:
            barrier.wait(LIMIT_S)  # noqa: B023
            if future.cancel() if me == 0 else complete(future, me):
                wins.append(me)

        threads = [threading.Thread(target=race, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        (winner,) = wins
        assert future.cancelled() if winner == 0 else future.value() == winner


def test_the_same_exception_each_time_and_its_traceback_does_not_grow() -> None:
    error = ValueError("x")
    future = failed_future(error)
    depths = []
    for _ in range(3):
        with pytest.raises(ValueError) as caught:
            future.wait()
        assert caught.value is error
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1
    with pytest.raises(ValueError):
        future.value()
    assert future.exception() is error


def test_value_of_a_pending_future() -> None:
    with pytest.raises(RuntimeError, match="not completed yet"):
        Future().value()


def test_wait_with_a_limit_leaves_the_future_alone() -> None:
    future: Future[int] = Future()
    for timeout in (-1, 0, 0.01):
        with pytest.raises(DeadlineExceeded):
            future.wait(timeout)
        with pytest.raises(TimeoutError):
            future.exception(timeout)
    assert not is_observed(future)
    future.set_result(1)
    assert future.wait(0) == 1


@pytest.fixture
def press_ctrl_c() -> Iterator[Callable[[], None]]:
    """Sends SIGINT to the main thread until it is noticed: one that comes just before a system call does not end it."""
    pressed = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def handler(number: int, frame: object) -> None:
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt

    def press() -> None:
        pressed.clear()
        while not pressed.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            pressed.wait(0.05)

    before = signal.signal(signal.SIGINT, handler)
    pressed.set()
    yield press
    pressed.set()
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_wait_and_nothing_gets_lost(pool: ThreadPool, press_ctrl_c: Callable[[], None]) -> None:
    for _ in range(20):
        future: Future[int] = Future()

        def press_once_it_waits(future: Future[int] = future) -> None:
            eventually(lambda: is_observed(future), "a thread waits")
            press_ctrl_c()

        pool.submit(press_once_it_waits)
        with pytest.raises(KeyboardInterrupt):
            future.wait(LIMIT_S)
        assert not is_observed(future)
        deliver(pool, future, partial(int, 6))
        assert future.wait(LIMIT_S) == 6


def test_a_wait_that_times_out_while_it_is_chosen_pays_the_debt() -> None:
    for _ in range(200):
        future: Future[int] = Future()
        barrier = threading.Barrier(2)

        def waiter(future: Future[int] = future, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(LIMIT_S)
            try:
                future.wait(0.0002)
            except DeadlineExceeded:
                return

        thread = threading.Thread(target=waiter)
        thread.start()
        barrier.wait(LIMIT_S)
        time.sleep(0.0001)  # about when the other thread's time is over: sometimes before, sometimes after
        if bring(future, lambda: 1):
            settle(future)
        thread.join(LIMIT_S)
        assert future.done()


def test_cancel() -> None:
    calls: list[str] = []
    future: Future[int] = Future(on_cancel=lambda: calls.append("hook"))
    assert future.cancel() and not future.cancel()
    assert calls == ["hook"] and future.cancelled() and future.done()
    with pytest.raises(Cancelled):
        future.wait()
    assert not complete(future, 3)
    assert not done_future(1).cancel()


def test_a_failing_cancel_hook_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def hook() -> None:
        raise ValueError("hook")

    future: Future[int] = Future(on_cancel=hook)
    assert future.cancel()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("function", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_pickled(function: Callable[[object], object]) -> None:
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        function(Future())


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_then_chains_and_returns_our_class() -> None:
    future: Future[int] = Future()
    chained = future
    for _ in range(20):
        chained = chained.then(lambda f: f.wait() + 1)
    assert isinstance(chained, Future)
    future.set_result(0)
    assert chained.wait() == 20
    assert done_future(1).then(lambda f: f).value().value() == 1  # at once, with the future itself


def wrong_number(first: object, second: object) -> None: ...


@pytest.mark.parametrize(
    ("callback", "text", "cause"),
    [
        (wrong_number, r"wrong_number\(\) missing 1 required positional argument", TypeError),
        (lambda future: future + 1, r"unsupported operand type\(s\) for \+", TypeError),
        (lambda future: 1 // 0, "ZeroDivisionError", ZeroDivisionError),
    ],
)
def test_errors_of_then_callbacks_are_runtime_errors(
    callback: Callable[[Any], object], text: str, cause: type[Exception]
) -> None:
    child = done_future(1).then(callback)
    with pytest.raises(RuntimeError, match=text) as caught:
        child.wait()
    assert type(caught.value.__cause__) is cause


def test_a_runtime_error_of_a_callback_stays_itself() -> None:
    error = RuntimeError("another expected error")

    def callback(future: Future[int]) -> None:
        with pytest.raises(ValueError):
            future.wait()
        raise error

    assert failed_future(ValueError()).then(callback).exception() is error


@pytest.mark.parametrize("name", ["then", "add_done_callback"])
def test_callbacks_must_be_callable(name: str) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        getattr(Future(), name)(None)


def test_errors_of_done_callbacks_are_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    calls: list[int] = []
    future.add_done_callback(lambda f: calls.append(f.value()))
    future.add_done_callback(lambda f: 1 // 0)
    future.add_done_callback(lambda f: calls.append(f.value() + 1))
    future.set_result(1)
    assert calls == [1, 2]
    assert "Got the following error when running the callback" in caplog.text


def test_each_callback_runs_once_when_adding_races_with_completing() -> None:
    for _ in range(100):
        future: Future[int] = Future()
        calls: list[int] = []
        barrier = threading.Barrier(3)

        def add(
            first: int,
            future: Future[int] = future,
            calls: list[int] = calls,
            barrier: threading.Barrier = barrier,
        ) -> None:
            barrier.wait(LIMIT_S)
            for number in range(first, first + 10):
                future.add_done_callback(lambda f, number=number: calls.append(number))  # type: ignore[misc]

        threads = [threading.Thread(target=add, args=(first,)) for first in (0, 10)]
        for thread in threads:
            thread.start()
        barrier.wait(LIMIT_S)
        future.set_result(1)
        for thread in threads:
            thread.join(LIMIT_S)
        assert sorted(calls) == list(range(20))


def test_cancelling_a_child_cancels_the_call() -> None:
    parent: Future[int] = Future()
    child = parent.then(lambda f: f.value())
    assert child.cancel()
    assert parent.cancelled()


# -- memory and unread errors ------------------------------------------------------------------------------------------


def _wait_and_fail(wait: Callable[[Future[int]], object]) -> weakref.ref[Future[int]]:
    future = failed_future(ValueError("x"))
    with pytest.raises(ValueError):
        wait(future)
    return weakref.ref(future)


@pytest.mark.parametrize(
    "wait",
    [lambda future: future.wait(), lambda future: wait_all([future]), lambda future: torch.futures.wait_all([future])],
)
def test_a_failed_future_can_be_collected(wait: Callable[[Future[int]], object]) -> None:
    reference = _wait_and_fail(wait)
    gc.collect()
    assert reference() is None


class Thing:
    pass


def test_results_go_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        future: Future[Thing] = Future()
        child = future.then(lambda f: f.value())
        collected = collect_all([future, child])
        thing = Thing()
        reference = weakref.ref(thing)
        future.set_result(thing)
        del thing
        assert collected.wait() == [future, child]
        del future, child, collected
        assert reference() is None
    finally:
        gc.enable()


def raises_value_error(function: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(ValueError):
        function(*arguments)


LOOKS: list[tuple[str, Callable[[Future[int]], object], bool]] = [
    ("nobody", lambda future: None, True),
    ("done() is not enough", lambda future: future.done(), True),
    ("exception()", lambda future: future.exception(), False),
    ("wait_all of torch", lambda future: raises_value_error(torch.futures.wait_all, [future]), False),
    ("wait()", lambda future: raises_value_error(future.wait), False),
    ("a quiet one", lambda future: setattr(future, "is_quiet", True), False),
]


@pytest.mark.parametrize(("who", "look", "is_logged"), LOOKS, ids=[row[0] for row in LOOKS])
def test_an_error_that_nobody_looked_at_is_logged(
    who: str, look: Callable[[Future[int]], object], is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    future: Future[int] = Future()
    if who == "a quiet one":
        look(future)
    future.set_exception(ValueError("unread"))
    if who != "a quiet one":
        look(future)
    del future
    gc.collect()
    assert ("did not retrieve" in caplog.text and "unread" in caplog.text) == is_logged


def test_what_ctrl_c_or_the_end_of_rpc_leaves_unread_is_not_logged(
    pool: ThreadPool, press_ctrl_c: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what earlier tests left unread
    caplog.clear()
    future: Future[int] = Future()

    def press_once_it_waits(future: Future[int] = future) -> None:
        eventually(lambda: is_observed(future), "a thread waits")
        press_ctrl_c()

    pool.submit(press_once_it_waits)
    with pytest.raises(KeyboardInterrupt):
        future.wait(LIMIT_S)
    future.set_exception(ValueError("the cluster ends"))
    ended: Future[int] = Future()
    ended.set_exception(NotInitialized("RPC was shut down in this process"))
    del future, ended
    gc.collect()
    assert not caplog.records


def test_the_log_of_an_unread_error_says_where_it_was_raised(caplog: pytest.LogCaptureFixture) -> None:
    done_future(1).then(lambda f: 1 // 0)
    gc.collect()
    assert "ZeroDivisionError" in caplog.text and "lambda f: 1 // 0" in caplog.text
    cancelled: Future[int] = Future()
    cancelled.cancel()
    caplog.clear()
    del cancelled
    gc.collect()
    assert not caplog.records
