"""The worker pool: nothing starves, nothing is lost, and a hand-over is cheap."""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inside_agents import ThreadPool

from rpcdist.errors import NotInitialized, PoolExhausted
from rpcdist.rpc._executors import torch_state
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._executors.pool_monitor import LoadHistory, threads_to_start
from rpcdist.rpc._executors.thread_pool import MAX_EMPTY_LINES, JobLine
from rpcdist.testing import eventually
from rpcdist.time_limits import POOL_STALL_S
from rpcdist.transport.io_loop import IoLoop

LIMIT_S = 30.0


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    with_pool = ThreadPool(num_cores=2)
    yield with_pool
    assert with_pool.close(LIMIT_S) == []


def load(
    queued: int = 1, oldest_ms: float = 0, running: int = 1, stalled_ms: float = 0, burst: int = 1, num_cores: int = 2
) -> dict[str, Any]:
    return {
        "queued": queued,
        "oldest_s": oldest_ms / 1000,
        "running": running,
        "stalled_s": stalled_ms / 1000,
        "burst": burst,
        "num_cores": num_cores,
    }


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (load(queued=0, stalled_ms=100), 0),
        (load(running=0), 1),  # whatever went wrong, somebody must run
        (load(oldest_ms=0.5), 0),  # young: the running thread gets there
        (load(oldest_ms=1), 1),  # a second core is free
        (load(oldest_ms=4, running=2, stalled_ms=4), 0),
        (load(oldest_ms=5, running=2, stalled_ms=5), 1),
        (load(oldest_ms=5, running=2, stalled_ms=5, burst=8), 1),  # no more threads than jobs
        (load(queued=100, oldest_ms=5, running=2, stalled_ms=5, burst=8), 8),
        (load(queued=100, oldest_ms=500, running=2, stalled_ms=1), 0),  # long, but it moves
        (load(queued=3, oldest_ms=0.1, running=2, stalled_ms=50), 0),  # stalled, but nobody waits
    ],
)
def test_when_another_thread_is_started(seen: dict[str, Any], expected: int) -> None:
    assert threads_to_start(**seen) == expected


def test_bursts_double_while_the_threads_only_wait_and_begin_anew_when_a_job_ends() -> None:
    cpu_s = 0.0
    history = LoadHistory(lambda: cpu_s, num_cores=2, max_threads=1000, stall_limit_s=30.0, now=0.0)
    now, started = 0.0, []
    for _ in range(4):
        now += 2 * POOL_STALL_S
        started.append(history.num_to_start(now, 100, now, 5, has_progress=False))
    assert started == [2, 4, 8, 16]
    cpu_s += 1.0  # they compute
    now += 2 * POOL_STALL_S
    assert history.num_to_start(now, 100, now, 5, has_progress=False) == 1
    now += 2 * POOL_STALL_S
    assert history.num_to_start(now, 100, now, 5, has_progress=True) == 0
    assert history.last_progress == now


def test_a_pool_is_exhausted_at_its_cap_when_no_job_has_ended_for_the_limit() -> None:
    history = LoadHistory(lambda: 0.0, num_cores=2, max_threads=4, stall_limit_s=30.0, now=0.0)
    assert not history.is_exhausted(29.9, 4)
    assert not history.is_exhausted(30.0, 3)
    assert history.is_exhausted(30.0, 4)


def test_jobs_are_taken_in_order() -> None:
    one = ThreadPool(max_threads=1)
    seen: list[int] = []
    done = threading.Event()
    for number in range(20):
        one.submit(seen.append, number)
    one.submit(done.set)
    assert done.wait(LIMIT_S)
    assert seen == list(range(20))
    assert one.close(LIMIT_S) == []


def test_a_named_thread_is_used_again(pool: ThreadPool) -> None:
    seen: list[str] = []

    def note(ended: threading.Event) -> None:
        seen.append(threading.current_thread().name)
        ended.set()

    for _ in range(20):
        ended = [threading.Event(), threading.Event()]
        pool.submit(note, ended[0])
        pool.submit(ended[1].set)
        assert all(event.wait(LIMIT_S) for event in ended)
    assert all(name.startswith("rpcdist-worker-") for name in seen)
    assert len(set(seen)) < 20  # mostly the same thread; more where the machine is busy


def test_jobs_that_an_io_loop_submits_hold_no_signals_back(pool: ThreadPool) -> None:
    """A command that a job runs, as `yes | head`, ends by SIGPIPE."""
    io = IoLoop()
    io.start_thread()
    found: list[set[int]] = []
    done = threading.Event()

    def job() -> None:
        found.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        done.set()

    io.call_soon(pool.submit, job)
    assert done.wait(LIMIT_S)
    io.close()
    assert signal.SIGPIPE not in found[0]


def test_submit_many_runs_all(pool: ThreadPool) -> None:
    numbers: list[int] = []
    all_done = threading.Event()

    def job(number: int) -> None:
        numbers.append(number)
        if len(numbers) == 1000:
            all_done.set()

    pool.submit_many([])
    pool.submit_many((job, (number,)) for number in range(1000))
    assert all_done.wait(LIMIT_S)
    assert sorted(numbers) == list(range(1000))


def test_the_lines_of_owners_take_turns(pool: ThreadPool) -> None:
    seen: list[str] = []
    for owner, num_jobs in (("flooding", 1000), ("other", 3), ("third", 2)):
        pool._lines[owner] = line = JobLine((seen.append, (owner,), 0.0) for _ in range(num_jobs))
        pool._turns[line] = None
    assert pool.facts().queued == 1005 and pool.has_queue
    pool.submit(seen.append, "own")
    eventually(lambda: len(seen) == 1006)
    assert seen.index("own") <= 8  # two threads may have begun
    last = len(seen) - 1 - seen[::-1].index("other")
    assert last <= 16 and seen[20:] == ["flooding"] * (len(seen) - 20)


def test_lines_of_owners_that_are_gone_do_not_stay(pool: ThreadPool) -> None:
    seen: list[int] = []
    for owner in range(10 * MAX_EMPTY_LINES):
        pool.submit_many([(seen.append, (owner,))], owner)
        if owner % 100 == 0:
            eventually(lambda: not pool.has_queue)
    eventually(lambda: len(seen) == 10 * MAX_EMPTY_LINES)
    assert len(pool._lines) <= MAX_EMPTY_LINES + 100 and sorted(seen) == list(range(10 * MAX_EMPTY_LINES))


def test_the_jobs_of_many_owners_are_all_run(pool: ThreadPool) -> None:
    seen: dict[int, list[int]] = {owner: [] for owner in range(8)}

    def submit(owner: int) -> None:
        for number in range(500):
            pool.submit_many([(seen[owner].append, (number,))], owner)

    submitting = [threading.Thread(target=submit, args=(owner,)) for owner in seen]
    for thread in submitting:
        thread.start()
    for thread in submitting:
        thread.join(LIMIT_S)
    eventually(lambda: all(len(numbers) == 500 for numbers in seen.values()))
    assert all(sorted(numbers) == list(range(500)) for numbers in seen.values())
    eventually(lambda: not pool.has_queue)


def _wait_event(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)


def _wait_event_and_say_so(event: threading.Event) -> None:
    with blocking():
        assert event.wait(LIMIT_S)


@pytest.mark.parametrize("wait", [_wait_event, _wait_event_and_say_so])
def test_64_jobs_that_wait_for_later_jobs_3_levels_deep(
    pool: ThreadPool, wait: Callable[[threading.Event], None]
) -> None:
    def job(level: int, done: threading.Event) -> None:
        if level:
            inner = threading.Event()
            pool.submit(job, level - 1, inner)
            wait(inner)
        done.set()

    events = [threading.Event() for _ in range(64)]
    start = time.monotonic()
    for event in events:
        pool.submit(job, 3, event)
    for event in events:
        assert event.wait(LIMIT_S)
    assert time.monotonic() - start < LIMIT_S


def test_jobs_that_wait_in_cpp_for_later_jobs(pool: ThreadPool) -> None:
    def job(level: int, future: torch.futures.Future[int]) -> None:
        if level:
            inner: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(2)]
            for member in inner:
                pool.submit(job, level - 1, member)
            future.set_result(sum(torch.futures.wait_all(inner)))
        else:
            future.set_result(1)

    futures: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(16)]
    for future in futures:
        pool.submit(job, 3, future)
    assert torch.futures.wait_all(futures) == [8] * 16


def test_submitters_on_many_threads_lose_nothing() -> None:
    pool = ThreadPool(idle_s=0.0005)  # threads retire all the time, which is where jobs could get lost
    counts = [0] * 8
    waits = [threading.Semaphore(0) for _ in range(8)]

    def submitter(me: int) -> None:
        for number in range(300):
            pool.submit(waits[me].release)
            if number % 3 == 0:
                assert waits[me].acquire(timeout=LIMIT_S)
                counts[me] += 1
        for _ in range(300 - counts[me]):
            assert waits[me].acquire(timeout=LIMIT_S)
            counts[me] += 1

    threads = [threading.Thread(target=submitter, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert counts == [300] * 8
    assert pool.close(LIMIT_S) == []


def test_idle_threads_end() -> None:
    pool = ThreadPool(idle_s=0.01, keeps_one=False)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(LIMIT_S)
    for thread in threading.enumerate():
        if thread.name == "rpcdist-worker-0":
            thread.join(LIMIT_S)
    assert pool.facts().threads == 0
    pool.submit(done.set)  # and it starts again
    assert pool.close(LIMIT_S) == []


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_job_raises_goes_to_the_hook_and_the_thread_goes_on(error: BaseException) -> None:
    errors: list[BaseException] = []
    pool = ThreadPool(on_error=lambda error, function: errors.append(error))
    done: list[int] = []

    def fail() -> None:
        raise error

    pool.submit_many([(fail, ()), (done.append, (1,))] * 3)
    assert pool.close(LIMIT_S) == []
    assert errors == [error] * 3 and done == [1] * 3


def test_by_default_errors_are_logged(pool: ThreadPool, caplog: pytest.LogCaptureFixture) -> None:
    pool.submit(int, "no number")
    assert pool.close(LIMIT_S) == []
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "ValueError: invalid literal" in record.getMessage()


def test_context_variables_do_not_leak_from_job_to_job(pool: ThreadPool) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen: list[int] = []

    def job() -> None:
        seen.append(variable.get())
        variable.set(1)

    pool.submit_many([(job, ())] * 10)
    assert pool.close(LIMIT_S) == []
    assert seen == [0] * 10


def test_an_idle_thread_keeps_nothing_alive(pool: ThreadPool) -> None:
    class Thing:
        def use(self) -> None:
            pass

    thing = Thing()
    alive = weakref.ref(thing)
    pool.submit(thing.use)
    del thing
    deadline = time.monotonic() + LIMIT_S
    while pool.facts().idle != pool.facts().threads or pool.facts().queued:
        assert time.monotonic() < deadline
        os.sched_yield()
    gc.collect()
    assert alive() is None


def test_a_thread_is_prepared_once_and_cleaned_up_after_each_job_even_a_failed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch_state, "adopt_num_threads", lambda: calls.append("prepare"))
    monkeypatch.setattr(torch_state, "reset", lambda: calls.append("cleanup"))
    pool = ThreadPool(max_threads=1, on_error=lambda error, function: calls.append("error"))
    pool.submit_many([(int, ("no number",)), (int, ())])
    assert pool.close(LIMIT_S) == []
    assert calls == ["prepare", "error", "cleanup", "cleanup"]


def test_at_the_cap_the_error_names_the_option_and_stuck_jobs_get_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    answers: list[tuple[str, object]] = []

    def exhausted(error: PoolExhausted, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        answers.append((str(error), arguments))
        gate.set()

    pool = ThreadPool(max_threads=3, stall_limit_s=0.1, on_exhausted=exhausted)
    pool.submit_many([(gate.wait, (LIMIT_S,))] * 3 + [(print, ("never printed",))])
    assert gate.wait(LIMIT_S)
    assert pool.close(LIMIT_S) == []
    ((text, arguments),) = answers
    assert "max_worker_threads" in text
    assert arguments == ("never printed",)
    assert ["max_worker_threads" in record.getMessage() for record in caplog.records] == [True]


def test_a_stuck_job_that_gets_no_answer_stays_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """A job that waits at the cap may get a thread of its own. If the system has none, the job was lost."""
    gate, ran = threading.Event(), threading.Event()

    def exhausted(error: PoolExhausted, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        gate.set()
        raise RuntimeError("can't start new thread")

    pool = ThreadPool(max_threads=2, stall_limit_s=0.1, on_exhausted=exhausted)
    pool.submit_many([(gate.wait, (LIMIT_S,))] * 2 + [(ran.set, ())])
    assert ran.wait(LIMIT_S)
    assert pool.close(LIMIT_S) == []
    assert "can't start new thread" in caplog.text


def test_the_cap_is_kept(pool: ThreadPool) -> None:
    pool.max_threads = 4
    gate = threading.Event()
    started = threading.Semaphore(0)

    def job() -> None:
        started.release()
        assert gate.wait(LIMIT_S)

    pool.submit_many([(job, ())] * 10)
    for _ in range(4):
        assert started.acquire(timeout=LIMIT_S)
    assert not started.acquire(timeout=0.05)
    assert pool.facts().threads == 4
    gate.set()


def test_close_drains_then_refuses() -> None:
    pool = ThreadPool()
    done: list[int] = []
    pool.submit_many((done.append, (number,)) for number in range(100))
    assert pool.close(LIMIT_S) == []
    assert sorted(done) == list(range(100))
    assert pool.close() == []
    with pytest.raises(NotInitialized):
        pool.submit(print)
    with pytest.raises(NotInitialized):
        pool.submit_many([])


def test_close_is_bounded_and_names_what_hangs(caplog: pytest.LogCaptureFixture) -> None:
    pool = ThreadPool(max_threads=1)
    gate, started = threading.Event(), threading.Event()

    def hanging_job() -> None:
        started.set()
        assert gate.wait(LIMIT_S)

    pool.submit_many([(hanging_job, ()), (print, ("never printed",))])
    assert started.wait(LIMIT_S)
    left = pool.close(0.05)
    gate.set()
    assert len(left) == 2
    assert "hanging_job" in left[0] and "never started" in left[1]
    assert "gate.wait" in caplog.text  # the place where it hangs


def test_close_may_be_called_by_a_job() -> None:
    pool = ThreadPool()
    results: list[list[str]] = []
    done = threading.Event()

    def job() -> None:
        results.append(pool.close(1.0))
        done.set()

    pool.submit(job)
    assert done.wait(LIMIT_S)
    assert results == [[]]


def test_a_forked_child_is_refused_and_an_exit_with_running_threads_is_clean() -> None:
    script = """
        import os, threading
        from rpcdist.errors import ForkedProcess
        from rpcdist.rpc._executors.thread_pool import ThreadPool
        from rpcdist.transport import fork
        fork.mark_running()
        pool = ThreadPool()
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(30)
        child = os.fork()
        if child == 0:
            try:
                pool.submit(print)
            except ForkedProcess:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        pool.submit(print, "the last words")
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "the last words\n"), ended.stderr
