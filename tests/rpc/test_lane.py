"""Lanes: jobs on one thread, in order, that the pool lends and gets back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from inside_agents import ThreadPool

from rpcdist.errors import PoolExhausted
from rpcdist.ids import Identity
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.rpc._executors.lane import Lane
from rpcdist.rpc._peers.network import Loopback
from rpcdist.testing import eventually

LIMIT_S = 30.0


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(max_threads=3)
    yield pool
    assert pool.close(LIMIT_S) == []


class Source(Loopback):
    """Where the thread of a lane reads, until somebody rings."""

    def __init__(self) -> None:
        super().__init__(Identity("a", 0, 1), lambda session, messages: None)
        self.reads, self.rung = threading.Event(), threading.Event()

    def read_while_waiting(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: object = None,
        send_first: Callable[[], object] | None = None,
    ) -> bool:
        assert send_first is not None
        send_first()
        self.reads.set()
        while is_waiting():
            assert self.rung.wait(LIMIT_S)
            self.rung.clear()
        return True

    def interrupt(self) -> None:
        self.rung.set()


def test_jobs_of_several_threads_run_in_order_on_one(pool: ThreadPool) -> None:
    lane, ran, done = Lane(pool), list[tuple[int, int]](), threading.Event()

    def submit(first: int) -> None:
        for i in range(first, first + 100):
            lane.submit(lambda i=i: ran.append((i, threading.get_ident())))

    threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lane.submit(done.set)
    assert done.wait(LIMIT_S)
    assert len(ran) == 200 and len({thread for _, thread in ran}) == 1
    assert [i for i, _ in ran if i < 1000] == list(range(100))
    lane.close()
    eventually(lambda: pool.num_reserved == 0)


def test_a_job_of_a_lane_may_submit_more_and_wait_for_other_lanes(pool: ThreadPool) -> None:
    lane, other, done = Lane(pool), Lane(pool), threading.Event()
    answered = threading.Event()

    def ask() -> None:
        lane.submit(done.set)
        other.submit(answered.set)
        assert answered.wait(LIMIT_S)

    lane.submit(ask)
    assert done.wait(LIMIT_S)
    lane.close()
    other.close()


def test_a_job_that_comes_while_the_thread_reads(pool: ThreadPool) -> None:
    lane, source, sent, ran = Lane(pool), Source(), threading.Event(), threading.Event()
    lane.submit(lambda: DeferredReply([sent.set], source))
    assert source.reads.wait(LIMIT_S) and sent.is_set() and lane.is_free
    lane.submit(ran.set)
    assert ran.wait(LIMIT_S)
    lane.close()


@pytest.mark.parametrize("is_reading", [False, True])
def test_a_closed_lane_gives_its_thread_back_and_what_comes_then_runs_in_the_pool(
    pool: ThreadPool, is_reading: bool
) -> None:
    lane, source, ran, late = Lane(pool), Source(), threading.Event(), threading.Event()
    if is_reading:
        lane.submit(lambda: DeferredReply([ran.set], source))
        assert source.reads.wait(LIMIT_S)
    else:
        lane.submit(ran.set)
    assert ran.wait(LIMIT_S)
    lane.close()
    lane.close()
    eventually(lambda: pool.num_reserved == 0)
    lane.submit(late.set)
    assert late.wait(LIMIT_S)
    assert pool.num_reserved == 0


def test_lent_threads_do_not_count_and_are_no_more_than_the_cap(pool: ThreadPool) -> None:
    lanes = [Lane(pool) for _ in range(4)]
    for lane in lanes[:3]:
        started = threading.Event()
        lane.submit(started.set)
        assert started.wait(LIMIT_S)
    with pytest.raises(PoolExhausted, match="3 threads are in use"):
        lanes[3].submit(print)
    gate, ran = threading.Event(), [threading.Event() for _ in range(3)]

    def hold(event: threading.Event) -> None:
        event.set()
        assert gate.wait(LIMIT_S)

    for event in ran:
        pool.submit(hold, event)  # as many as the pool may have, beside those that are lent
    assert all(event.wait(LIMIT_S) for event in ran)
    gate.set()
    lanes[0].close()
    eventually(lambda: pool.num_reserved == 2)
    again = threading.Event()
    lanes[3].submit(again.set)
    assert again.wait(LIMIT_S)
    for lane in lanes:
        lane.close()


def test_an_error_of_a_job_ends_the_job(caplog: pytest.LogCaptureFixture, pool: ThreadPool) -> None:
    lane, done = Lane(pool), threading.Event()

    def fail() -> None:
        raise SystemExit(1)

    lane.submit(fail)
    lane.submit(done.set)
    assert done.wait(LIMIT_S)
    assert "a job of the worker pool failed" in caplog.text
    lane.close()
