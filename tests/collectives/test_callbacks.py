"""The callbacks of a group's futures: their order, and what they may wait for."""

from __future__ import annotations

import sys
import threading
from functools import partial

import callback_ranks
import pytest
import torch

from rpcdist.collectives._group.callbacks import Callbacks, OrderedFuture
from rpcdist.collectives.work import Work
from rpcdist.errors import RpcdistError
from rpcdist.testing import RankPool

LIMIT_S = 10.0


@pytest.fixture
def callbacks() -> Callbacks:
    return Callbacks("g")


def futures(callbacks: Callbacks, count: int) -> list[OrderedFuture[int]]:
    return [OrderedFuture(callbacks) for _ in range(count)]


def test_they_run_in_the_order_in_which_they_were_attached(callbacks: Callbacks) -> None:
    first, second, third = futures(callbacks, 3)
    seen: list[str] = []

    def note(name: str, _: object) -> None:
        seen.append(name)

    for name, future in (("second", second), ("first", first), ("first again", first), ("third", third)):
        last = future.then(partial(note, name))
    for future in (third, first, second):
        future.set_result(1)
    last.wait()
    assert seen == ["second", "first", "first again", "third"]
    assert callbacks.drain(LIMIT_S)


def test_a_chain_is_done_before_the_next_future_has_its_turn(callbacks: Callbacks) -> None:
    first, second = futures(callbacks, 2)
    seen: list[int] = []

    def note(done: torch.futures.Future[int]) -> int:
        seen.append(done.value())
        return done.value() + 1

    chain = first.then(note).then(note).then(note)
    other = second.then(note)
    second.set_result(50)
    first.set_result(1)
    assert (chain.wait(), other.wait(), seen) == (4, 51, [1, 2, 3, 50])


def test_without_a_thread_of_their_own_who_attaches_one_waits(
    callbacks: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    [future] = futures(callbacks, 1)
    completing = threading.Timer(0.0, future.set_result, (3,))
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread is not completing:
            completing.start()
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert future.then(lambda done: done.value() + 1).wait() == 4
    completing.join(LIMIT_S)
    assert callbacks.drain(LIMIT_S)


def test_an_idle_group_calls_back_at_once(callbacks: Callbacks) -> None:
    [future] = futures(callbacks, 1)
    future.set_result(3)
    assert future.then(lambda _: threading.current_thread()).value() is threading.current_thread()
    names: list[str] = []
    future.add_done_callback(lambda _: names.append(threading.current_thread().name))
    assert names == [threading.current_thread().name]


def test_a_callback_of_what_the_program_has_waited_for_runs_at_once(callbacks: Callbacks) -> None:
    """Work that waits its turn. Programs change after `then` what the callback reads, torchft for one."""
    work, later = Work("a", [torch.ones(1)], callbacks=callbacks), Work("b", callbacks=callbacks)
    pending = [each.get_future().then(lambda _: callbacks.runs_here()) for each in (later, work)]
    work.complete()
    assert work.wait()
    seen: list[tuple[bool, bool]] = []
    for _ in range(2):
        future = work.get_future()
        future.add_done_callback(lambda done: seen.append((callbacks.runs_here(), done.value()[0].item() == 1)))
        derived = future.then(lambda done: done.value()[0] + 1)
        assert derived.done() and derived.wait() == 2
        derived.add_done_callback(lambda done: seen.append((callbacks.runs_here(), done.value().item() == 2)))
    assert seen == [(False, True)] * 4
    assert not any(each.done() for each in pending)
    later.complete()
    assert [each.wait() for each in pending] == [True, True] and callbacks.drain(LIMIT_S)


def test_a_callback_of_what_another_thread_has_waited_for_has_its_turn(callbacks: Callbacks) -> None:
    first, second = futures(callbacks, 2)
    first.add_done_callback(lambda _: None)
    second.set_result(2)
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    waiting.join(LIMIT_S)
    answer = second.then(lambda done: done.value())
    assert not answer.done()
    first.set_result(1)
    assert answer.wait() == 2 and callbacks.drain(LIMIT_S)


def test_a_callback_that_raises_at_once_is_logged(callbacks: Callbacks, caplog: pytest.LogCaptureFixture) -> None:
    [future] = futures(callbacks, 1)
    future.set_result(1)
    assert future.wait() == 1
    future.add_done_callback(lambda _: 1 // 0)  # type: ignore[arg-type]
    assert "a callback of group 'g' failed" in caplog.text


def test_futures_of_a_work_are_done_when_its_wait_ends(callbacks: Callbacks) -> None:
    """As torch's; a program may read them then."""
    for _ in range(200):
        work = Work("a", [torch.zeros(1)], callbacks=callbacks)
        future = work.get_future()
        finishing = threading.Thread(target=work.complete)
        finishing.start()
        assert work.wait(LIMIT_S) and future.done()
        finishing.join(LIMIT_S)


def test_a_callback_may_attach_another_and_wait_for_it(callbacks: Callbacks) -> None:
    first, second = futures(callbacks, 2)
    answer = first.then(lambda _: (callbacks.runs_here(), second.then(lambda done: done.value() * 2).wait()))
    assert not callbacks.runs_here()
    first.set_result(1)
    assert not callbacks.drain(0.01)
    second.set_result(21)
    assert answer.wait() == (True, 42)
    assert callbacks.drain(LIMIT_S)


def test_what_a_callback_raises_goes_to_the_next_one(callbacks: Callbacks) -> None:
    [future] = futures(callbacks, 1)

    def fails(_: object) -> int:
        raise ArithmeticError("in a callback")

    broken = future.then(fails)
    skipped = broken.then(lambda done: done.value())
    mended = broken.then(lambda done: 7)
    future.set_result(1)
    for each in (broken, skipped):
        with pytest.raises(ArithmeticError, match="in a callback"):
            each.wait()
    assert mended.wait() == 7


def test_a_done_callback_that_raises_is_logged(callbacks: Callbacks, caplog: pytest.LogCaptureFixture) -> None:
    [future] = futures(callbacks, 1)
    future.add_done_callback(lambda _: 1 // 0)  # type: ignore[arg-type]
    future.set_result(1)
    assert callbacks.drain(LIMIT_S)
    assert "a callback of group 'g' failed" in caplog.text


@pytest.mark.multiproc
@pytest.mark.parametrize("size", [2, 3])
def test_callbacks_that_communicate_have_an_order_of_their_own(rank_pool: RankPool, size: int) -> None:
    rank_pool.run(size, callback_ranks.many_chains, rank_pool.new_file())


@pytest.mark.multiproc
def test_a_group_that_fails_ends_what_callbacks_wait_for(rank_pool: RankPool) -> None:
    texts = rank_pool.run(2, callback_ranks.failing, rank_pool.new_file())
    assert "rank 1 called barrier" in texts[0] and "rank 1 called barrier" in texts[1]


@pytest.mark.multiproc
def test_a_group_that_is_aborted_ends_what_callbacks_wait_for(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, callback_ranks.aborted, rank_pool.new_file()) == ["GroupAborted", "GroupAborted"]


def test_a_callback_may_wait_for_its_own_work(callbacks: Callbacks) -> None:
    """It runs before others see the end, on the thread that brings it."""
    seen: list[object] = []

    def wait_in_callbacks() -> None:
        work = Work("x", [torch.ones(1)])
        work._callbacks_of_group = callbacks
        work.when_done(lambda done: seen.append(done.wait()))
        chained = work.get_future_result().then(lambda _: seen.append(work.wait()))
        collected = torch.futures.collect_all([work.get_future()]).then(lambda _: seen.append(work.wait()))
        work.complete()
        chained.wait()
        collected.wait()

    thread = threading.Thread(target=wait_in_callbacks, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive() and seen == [True, True, True]


@pytest.mark.parametrize("is_done", [False, True])
def test_a_callback_that_exits_ends_neither_the_thread_of_the_others_nor_what_waits_for_it(
    callbacks: Callbacks, is_done: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`SystemExit` ended the thread: later callbacks never ran, and `destroy_process_group` waited for them."""
    future, other = futures(callbacks, 2)
    if is_done:
        future.set_result(1)
    exiting, later = future.then(lambda _: sys.exit(3)), other.then(lambda _: 7)
    future.add_done_callback(lambda _: sys.exit(4))
    for each in (future, other):
        if not each.done():
            each.set_result(1)
    assert later.wait() == 7
    with pytest.raises(RpcdistError, match="when running the callback: SystemExit: 3"):
        exiting.wait()
    assert callbacks.drain(LIMIT_S)
    assert "SystemExit: 3" in caplog.text and "SystemExit: 4" in caplog.text


def test_ctrl_c_in_a_callback_ends_the_program_and_keeps_the_other_callbacks(callbacks: Callbacks) -> None:
    def interrupted(_: object) -> None:
        attaching = threading.Thread(target=lambda: waiting.append(other.then(lambda done: done.value())))
        attaching.start()
        attaching.join(LIMIT_S)
        assert not waiting[0].done()  # its turn is after this callback
        raise KeyboardInterrupt

    future, other = futures(callbacks, 2)
    waiting: list[torch.futures.Future[int]] = []
    future.set_result(1)
    other.set_result(2)
    with pytest.raises(KeyboardInterrupt):
        future.add_done_callback(interrupted)
    assert callbacks.drain(LIMIT_S)
    assert other.then(lambda done: done.value() + 1).wait() == 3 and waiting[0].wait() == 2
