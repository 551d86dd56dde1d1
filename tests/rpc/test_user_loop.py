"""The user loop: outcomes, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import gc
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
from peer_timeouts import CALM_S
from threads_at_once import problems_of_threads
from user_loop_helpers import LIMIT_S, Outcome, forever, run
from user_loop_helpers import loop as loop

from rpcdist import rpc
from rpcdist.deadline import NEVER, Deadline, current_deadline
from rpcdist.errors import (
    BlockingInLoop,
    Cancelled,
    DeadlineExceeded,
    NotInitialized,
    RpcdistError,
    TransportError,
)
from rpcdist.own_shortage import LOOP_DESCRIPTORS
from rpcdist.rpc._executors import user_loop
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc.future import Future
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.testing.limits import UNIT_S

# -- outcomes ----------------------------------------------------------------------------------------------------------


async def five() -> int:
    await asyncio.sleep(0)
    return 5


async def value_error() -> None:
    raise ValueError("x")


async def cancelled_error() -> None:
    raise asyncio.CancelledError


async def system_exit() -> None:
    await asyncio.sleep(0)
    sys.exit(3)


async def keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def not_awaitable() -> Any:
    return 3


def fails_to_start() -> Any:
    raise KeyError("start")


async def expired() -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (value_error, ValueError),
        (cancelled_error, Cancelled),
        (system_exit, SystemExit),
        (keyboard_interrupt, KeyboardInterrupt),
        (not_awaitable, TypeError),
        (fails_to_start, KeyError),
        (expired, TimeoutError),
    ],
)
def test_errors_are_outcomes(loop: UserLoop, start: Callable[[], Awaitable[Any]], kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        run(loop, start)
    assert run(loop, five) == 5  # and the loop goes on


def test_result_and_thread(loop: UserLoop) -> None:
    outcome = Outcome()
    call = loop.submit(five, outcome)
    assert outcome.get() == 5
    assert outcome.thread == "rpcdist-user-loop"
    assert call.done() and "five ended" in repr(call)
    assert len(loop) == 0
    call.cancel()  # too late, and harmless


def test_any_awaitable_will_do(loop: UserLoop) -> None:
    future: Future[int] = Future()
    future.set_result(4)
    assert run(loop, lambda: future) == 4


def test_a_failing_on_done_is_logged(loop: UserLoop, caplog: pytest.LogCaptureFixture) -> None:
    def on_done(result: object, error: BaseException | None) -> None:
        raise ValueError("on_done")

    loop.submit(five, on_done)
    assert run(loop, five) == 5
    assert "completing the call of five failed" in caplog.text


def test_asyncio_tools_work_inside(loop: UserLoop) -> None:
    async def handler() -> list[int]:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(five()) for _ in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(LIMIT_S), 0.01)
        task = asyncio.current_task()
        assert task is not None and "handler" in task.get_name()
        assert task.get_stack() and "running" in repr(task.get_coro())
        return [task.result() for task in tasks]

    assert run(loop, handler) == [5, 5, 5]


def test_blocking_waits_are_refused(loop: UserLoop) -> None:
    async def handler() -> None:
        Future[int]().wait()

    with pytest.raises(BlockingInLoop):
        run(loop, handler)


def test_a_task_of_user_code_that_exits_does_not_end_the_loop(
    loop: UserLoop, caplog: pytest.LogCaptureFixture, reported_loop_errors: list[str]
) -> None:
    async def handler() -> str:
        task = asyncio.create_task(system_exit())
        await asyncio.wait([task])
        return repr(task.exception())

    assert run(loop, handler) == "SystemExit(3)"
    assert run(loop, five) == 5
    assert "the loop continues" in caplog.text
    reported_loop_errors.clear()


# -- deadlines, cancellation, contexts ---------------------------------------------------------------------------------


def test_the_deadline_cancels(loop: UserLoop) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def handler() -> None:
        begun.set()
        try:
            assert current_deadline.get().is_finite
            await forever()
        finally:
            ended.set()

    limit_s = 0.02
    while not begun.is_set():  # on a busy machine a deadline may be over before the handler begins
        with pytest.raises(DeadlineExceeded, match="handler"):
            run(loop, handler, Deadline.after(limit_s))
        limit_s *= 4
    assert ended.is_set()
    with pytest.raises(DeadlineExceeded, match="before"):
        run(loop, handler, Deadline.after(0))


def test_cancel_from_another_thread(loop: UserLoop) -> None:
    started = threading.Event()

    async def handler() -> None:
        started.set()
        await forever()

    outcome = Outcome()
    call = loop.submit(handler, outcome)
    assert started.wait(LIMIT_S)
    call.cancel()
    call.cancel()
    with pytest.raises(Cancelled):
        outcome.get()


def test_cancel_before_the_first_step(loop: UserLoop) -> None:
    for _ in range(200):
        outcome = Outcome()
        loop.submit(forever, outcome).cancel()
        with pytest.raises(Cancelled):
            outcome.get()


def test_a_coroutine_may_answer_its_cancellation(loop: UserLoop) -> None:
    started = threading.Event()

    async def handler() -> str:
        started.set()
        try:
            await forever()
        except asyncio.CancelledError:
            return "saved"
        return "not reached"

    outcome = Outcome()
    call = loop.submit(handler, outcome)
    assert started.wait(LIMIT_S)  # a deadline may be over before the handler begins
    call.cancel()
    assert outcome.get() == "saved"


def test_contexts_are_copied(loop: UserLoop) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(1)
    context = contextvars.copy_context()

    async def handler() -> int:
        before = variable.get()
        variable.set(before + 1)
        await asyncio.sleep(0)
        assert variable.get() == before + 1
        return before

    for _ in range(2):
        outcome = Outcome()
        loop.submit(handler, outcome, NEVER, context)
        assert outcome.get() == 1
    assert run(loop, handler) == 0  # none given: an empty one


def test_ten_thousand_waiting_handlers_cost_no_thread(loop: UserLoop) -> None:
    gate = asyncio.Event()
    num_done = 0
    all_done = threading.Event()

    async def handler() -> None:
        await gate.wait()

    def on_done(result: object, error: BaseException | None) -> None:
        nonlocal num_done
        num_done += 1
        if num_done == 10_000:
            all_done.set()

    assert run(loop, five) == 5  # the first coroutine starts the thread
    before = threading.active_count()
    calls = [loop.submit(handler, on_done, Deadline.after(60)) for _ in range(10_000)]
    assert run(loop, five) == 5
    assert len(calls) == len(loop) == 10_000
    assert threading.active_count() <= before
    loop.loop.call_soon_threadsafe(gate.set)
    assert all_done.wait(LIMIT_S)


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def starts_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.12 `start` would start it."""
    monkeypatch.setattr(user_loop, "STARTS_NO_THREAD", False)


@pytest.mark.usefixtures("starts_late")
def test_the_first_coroutine_starts_the_loop() -> None:
    threads, num_open = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    loop = UserLoop()
    loop.register_at_exit()
    assert loop.ident is None and set(threading.enumerate()) <= threads  # others may end meanwhile
    assert len(os.listdir("/proc/self/fd")) <= num_open
    assert not loop.on_thread()
    outcomes = [Outcome() for _ in range(8)]

    def submit(number: int) -> list[str]:
        loop.submit(five, outcomes[number])
        return []

    assert problems_of_threads(submit, len(outcomes)) == []
    assert [outcome.get() for outcome in outcomes] == [5] * 8
    assert len(set(threading.enumerate()) - threads) == 1
    assert loop.close(LIMIT_S) == []


@pytest.mark.usefixtures("starts_late")
@pytest.mark.parametrize("short_of", ["descriptors", "threads"])
def test_a_loop_that_cannot_start_refuses_the_coroutine_and_starts_later(
    short_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = UserLoop()
    loop.register_at_exit()
    with monkeypatch.context() as patch:
        if short_of == "descriptors":
            patch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        else:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(TransportError, match=r"event loop of user functions cannot start: .*(descriptor|thread)"):
            loop.submit(five, Outcome())
    assert len(loop) == 0 and loop.ident is None
    assert run(loop, five) == 5
    assert loop.close(LIMIT_S) == []


@pytest.mark.usefixtures("starts_late")
def test_the_loop_of_a_running_worker_starts_with_few_free_descriptors() -> None:
    """A worker that had 31 free ones could not host the shutdown, and all workers waited for it until its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    loop = UserLoop()
    loop.register_at_exit()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 600), hard))
        with suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        for _ in range(LOOP_DESCRIPTORS):
            os.close(held.pop())
        assert run(loop, five) == 5
        assert loop.close(LIMIT_S) == []
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def items() -> AsyncIterator[int]:
    yield 5


@pytest.mark.usefixtures("starts_late")
def test_calls_whose_coroutines_get_no_loop_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a function that was known for its coroutines, and of async generators, were not, nor was a shutdown."""
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        calls: list[Callable[[], object]] = [
            lambda: rpc.rpc_sync("b", five, timeout=LIMIT_S),
            lambda: rpc.remote("b", five).to_here(LIMIT_S),
            lambda: next(rpc.rpc_sync("b", items, timeout=LIMIT_S)),
        ]
        with monkeypatch.context() as patch:
            patch.setattr(UserLoop, "_run_new_loop", Mock(side_effect=TransportError("no thread is left")))
            for call in calls * 2:
                with pytest.raises(RpcdistError, match="no thread is left"):
                    cluster.run("a", call)
            with cluster.use("b") as agent:
                eventually(lambda: not len(agent.dispatcher.calls), "no call is left", LIMIT_S)
        assert [cluster.run("a", call) for call in calls] == [5, 5, 5]


# -- closing -----------------------------------------------------------------------------------------------------------


def test_close_cancels_what_is_left() -> None:
    loop = UserLoop()
    loop.register_at_exit()
    outcomes = [Outcome() for _ in range(10)]
    for outcome in outcomes:
        loop.submit(forever, outcome)
    assert loop.close(LIMIT_S) == loop.close() == []
    for outcome in outcomes:
        with pytest.raises(Cancelled):
            outcome.get()
    with pytest.raises(NotInitialized):
        loop.submit(five, Outcome())


def test_close_names_a_coroutine_that_refuses_to_end(
    caplog: pytest.LogCaptureFixture, reported_loop_errors: list[str]
) -> None:
    loop = UserLoop()
    loop.register_at_exit()
    started = threading.Event()

    async def stubborn() -> None:
        started.set()
        while True:
            try:
                await asyncio.sleep(LIMIT_S)
            except asyncio.CancelledError:
                pass

    outcome = Outcome()
    loop.submit(stubborn, outcome)
    assert started.wait(LIMIT_S)
    (left,) = loop.close(0.1)
    assert "stubborn" in left and os.path.basename(__file__) in left
    assert "stubborn" in caplog.text
    with pytest.raises(Cancelled, match="did not end"):
        outcome.get()
    del loop, outcome
    gc.collect()
    reported_loop_errors.clear()  # "Task was destroyed but it is pending": so it was


def test_close_names_the_place_where_the_thread_is_blocked() -> None:
    loop = UserLoop()
    loop.register_at_exit()
    gate, started = threading.Event(), threading.Event()

    async def blocked() -> None:
        started.set()
        gate.wait(LIMIT_S)

    outcome = Outcome()
    loop.submit(blocked, outcome)
    assert started.wait(LIMIT_S)
    (left,) = loop.close(0.05)
    gate.set()
    assert "gate.wait" in left
    with pytest.raises(Cancelled):
        outcome.get()


def test_a_loop_that_never_started_closes() -> None:
    loop = UserLoop()
    assert loop.close() == []


def test_a_forked_child_is_refused() -> None:
    script = """
        import os
        from rpcdist.errors import ForkedProcess
        from rpcdist.rpc._executors.user_loop import UserLoop
        from rpcdist.transport import fork
        fork.mark_running()
        loop = UserLoop()
        loop.register_at_exit()
        child = os.fork()
        if child == 0:
            try:
                loop.submit(None, None)
            except ForkedProcess:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600 * UNIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
