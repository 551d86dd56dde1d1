"""The user loop: outcomes, deadlines, cancellation, and torch state that stays with its coroutine."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rpcdist.deadline import NEVER, Deadline, current_deadline
from rpcdist.errors import BlockingInLoop, Cancelled, ConfigError, DeadlineExceeded, NotInitialized
from rpcdist.rpc import _torch_state
from rpcdist.rpc._torch_state import StateSlot
from rpcdist.rpc._user_loop import LoopKind, StatefulCoroutine, UserLoop
from rpcdist.rpc.future import Future

LIMIT_S = 30.0
KINDS: list[LoopKind] = ["uvloop", "asyncio"] if sys.platform != "win32" else ["asyncio"]


@pytest.fixture(params=KINDS)
def loop(request: pytest.FixtureRequest) -> Iterator[UserLoop]:
    user_loop = UserLoop(request.param)
    user_loop.start()
    yield user_loop
    assert user_loop.close(LIMIT_S) == []


class Outcome:
    """An `on_done` that keeps what it got."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, BaseException | None]] = []
        self.thread: str | None = None
        self._done = threading.Event()

    def __call__(self, result: object, error: BaseException | None) -> None:
        self.calls.append((result, error))
        self.thread = threading.current_thread().name
        self._done.set()

    def get(self) -> object:
        assert self._done.wait(LIMIT_S)
        ((result, error),) = self.calls
        if error is not None:
            raise error
        return result


def run(loop: UserLoop, start: Callable[[], Awaitable[Any]], deadline: Deadline = NEVER) -> Any:
    outcome = Outcome()
    loop.submit(start, outcome, deadline)
    return outcome.get()


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
    assert "the completion of five failed" in caplog.text


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
    assert "the loop goes on" in caplog.text
    reported_loop_errors.clear()


# -- deadlines, cancellation, contexts ---------------------------------------------------------------------------------


async def forever() -> None:
    await asyncio.Event().wait()


def test_the_deadline_cancels(loop: UserLoop) -> None:
    ended = threading.Event()

    async def handler() -> None:
        try:
            assert current_deadline.get().is_finite
            await forever()
        finally:
            ended.set()

    with pytest.raises(DeadlineExceeded, match="handler"):
        run(loop, handler, Deadline.after(0.02))
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
    async def handler() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            return "saved"
        return "not reached"

    assert run(loop, handler, Deadline.after(0.01)) == "saved"


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

    before = threading.active_count()
    calls = loop.submit_many([(handler, on_done, Deadline.after(60), None)] * 10_000)
    assert run(loop, five) == 5
    assert len(calls) == len(loop) == 10_000
    assert threading.active_count() <= before
    loop.loop.call_soon_threadsafe(gate.set)
    assert all_done.wait(LIMIT_S)


# -- closing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_close_cancels_what_is_left(kind: LoopKind) -> None:
    loop = UserLoop(kind)
    loop.start()
    outcomes = [Outcome() for _ in range(10)]
    for outcome in outcomes:
        loop.submit(forever, outcome)
    assert loop.close(LIMIT_S) == loop.close() == []
    for outcome in outcomes:
        with pytest.raises(Cancelled):
            outcome.get()
    with pytest.raises(NotInitialized):
        loop.submit(five, Outcome())
    with pytest.raises(NotInitialized):
        loop.submit_many([])


@pytest.mark.parametrize("kind", KINDS)
def test_close_names_a_coroutine_that_refuses_to_end(
    kind: LoopKind, caplog: pytest.LogCaptureFixture, reported_loop_errors: list[str]
) -> None:
    loop = UserLoop(kind)
    loop.start()
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
    loop = UserLoop("asyncio")
    loop.start()
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


def test_never_started_and_wrong_kind() -> None:
    loop = UserLoop()
    assert loop.close() == []
    with pytest.raises(ConfigError, match="uvloop"):
        UserLoop("tokio")  # type: ignore[arg-type]


def test_a_forked_child_is_refused() -> None:
    script = """
        import os
        from rpcdist.errors import ForkedProcess
        from rpcdist.rpc._user_loop import UserLoop
        from rpcdist.transport import fork
        fork.mark_running()
        loop = UserLoop()
        loop.start()
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
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


# -- torch state -------------------------------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def torch_state() -> dict[str, object]:
    """What torch keeps per thread, as far as it can be asked for."""
    c: Any = torch._C
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward grad": c._is_fwd_grad_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autocast dtype": [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "hooks": c._autograd._top_saved_tensors_default_hooks(False),
        "hooks disabled": c._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "function modes": [c._get_function_stack_at(i) for i in range(c._len_torch_function_stack())],
        "dispatch modes": [c._get_dispatch_stack_at(i) for i in range(c._len_torch_dispatch_stack())],
        "included keys": str(c._dispatch_tls_local_include_set()),
        "excluded keys": str(c._dispatch_tls_local_exclude_set()),
        "device": (torch.ones(1).device, torch.get_default_device()),
        "product dtype": torch.ones(2, 2).mm(torch.ones(2, 2)).dtype,
    }


MODES: dict[str, Callable[[], Any]] = {
    "default": lambda: torch.set_grad_enabled(True),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "cuda autocast": lambda: torch.autocast("cuda", enabled=False),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(pack, pack),
    "hooks disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not now"),
    "device": lambda: torch.device("meta"),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "forward grad": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
}
PAIRS = [("no_grad", "inference"), ("inference", "no_grad"), ("autocast", "no_grad"), ("inference", "autocast"),
         ("device", "autocast"), ("dispatch mode", "inference"), ("hooks", "hooks"), ("function mode", "device"),
         ("no_grad", "default"), ("inference", "default")]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # autocast for CUDA without CUDA
@pytest.mark.parametrize("names", [*[(name,) for name in MODES], *PAIRS], ids="+".join)
def test_a_slot_takes_the_state_away_and_brings_it_back(names: tuple[str, ...]) -> None:
    initial = torch_state()
    assert _torch_state.is_default()
    with torch.set_grad_enabled(True):
        managers = [MODES[name]() for name in names]
        for manager in managers:
            manager.__enter__()
        inside = torch_state()
        slot, copied = StateSlot(), StateSlot()
        copied.copy_current()
        assert torch_state() == inside
        for _ in range(3):
            slot.swap_out()
            assert torch_state() == initial
            slot.swap_in()
            assert torch_state() == inside
        slot.swap_out()
        copied.swap_in()
        assert torch_state() == inside
        copied.swap_out()
        copied.forget()
        assert torch_state() == initial
        slot.swap_in()
        for manager in reversed(managers):
            manager.__exit__(None, None, None)
    assert torch_state() == initial


def test_default_device_belongs_to_the_coroutine(loop: UserLoop) -> None:
    async def handler() -> object:
        torch.set_default_device("meta")
        await asyncio.sleep(0)
        return torch.get_default_device(), torch.ones(1).device

    async def other() -> object:
        return torch.get_default_device(), torch.ones(1).device

    meta, cpu = torch.device("meta"), torch.device("cpu")
    assert run(loop, handler) == (meta, meta)
    assert run(loop, other) == (cpu, cpu)


def test_reset_takes_away_what_was_left_behind() -> None:
    torch.set_grad_enabled(False)
    torch.inference_mode().__enter__()
    _torch_state.reset()
    assert _torch_state.is_default()
    with torch.no_grad():
        assert not _torch_state.is_default()
    assert _torch_state.is_default()


@pytest.mark.parametrize("name", ["no_grad", "inference", "autocast"])
def test_a_slot_that_is_thrown_away_harms_nobody(name: str) -> None:
    slot = StateSlot()
    manager = MODES[name]()
    manager.__enter__()
    slot.swap_out()
    del slot, manager
    gc.collect()
    assert _torch_state.is_default()


def test_interleaved_coroutines_keep_their_own_state(loop: UserLoop) -> None:
    num_rounds = 5
    failures: list[str] = []

    async def handler(name: str) -> None:
        initial = torch_state()
        with MODES[name]():
            inside = torch_state()
            for _ in range(num_rounds):
                await asyncio.sleep(0)
                if torch_state() != inside:
                    failures.append(f"{name} changed while it waited")
        if torch_state() != initial:
            failures.append(f"{name} left something behind")

    names = [name for name in MODES if name not in ("cuda autocast", "forward grad")] * 3
    outcomes = []
    for name in names:
        outcome = Outcome()
        loop.submit(lambda name=name: handler(name), outcome)  # type: ignore[misc]
        outcomes.append(outcome)
    for outcome in outcomes:
        assert outcome.get() is None
    assert failures == []

    async def is_clean() -> bool:
        return _torch_state.is_default()

    assert run(loop, is_clean)


def test_tasks_of_user_code_inherit_and_keep_their_state(loop: UserLoop) -> None:
    async def child() -> bool:
        with torch.inference_mode():
            await asyncio.sleep(0.001)
            assert torch.is_inference_mode_enabled()
        return torch.is_grad_enabled()

    async def handler() -> tuple[list[bool], bool]:
        with torch.no_grad():
            inside = list(await asyncio.gather(child(), child()))
        task = asyncio.create_task(child())
        await asyncio.sleep(0)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        return inside, await task

    assert run(loop, handler) == ([False, False], True)


@pytest.mark.parametrize("end", ["cancel", "deadline", "error", "forgotten"])
def test_state_that_was_open_at_the_end_stays_with_nobody(loop: UserLoop, end: str) -> None:
    async def handler() -> None:
        torch.set_grad_enabled(False)
        with torch.inference_mode():
            if end == "error":
                raise ValueError
            if end != "forgotten":
                await forever()

    outcome = Outcome()
    call = loop.submit(handler, outcome, Deadline.after(0.01) if end == "deadline" else NEVER)
    if end == "cancel":
        call.cancel()
    with pytest.raises((Cancelled, DeadlineExceeded, ValueError)) if end != "forgotten" else torch.no_grad():
        outcome.get()

    async def is_clean() -> bool:
        return _torch_state.is_default()

    assert run(loop, is_clean)


async def test_items_of_an_async_generator_share_a_slot() -> None:
    async def generator() -> AsyncIterator[bool]:
        with torch.no_grad():
            for _ in range(3):
                await asyncio.sleep(0)
                yield torch.is_grad_enabled()

    slot = StateSlot()
    items = generator()
    seen = []
    for _ in range(3):
        seen.append(await StatefulCoroutine.of(anext(items), slot))
        assert torch.is_grad_enabled()
    with pytest.raises(StopAsyncIteration):
        await StatefulCoroutine.of(anext(items), slot)
    assert seen == [False] * 3
    assert _torch_state.is_default() and slot.is_empty


def test_a_generator_may_be_continued_on_another_thread() -> None:
    def generator() -> Iterator[bool]:
        with torch.inference_mode():
            while True:
                yield torch.is_inference_mode_enabled()

    slot = StateSlot()
    items = generator()
    seen: list[bool] = []

    def step() -> None:
        seen.append(slot.call(next, items))
        seen.append(_torch_state.is_default())

    for _ in range(3):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(LIMIT_S)
    slot.call(items.close)  # type: ignore[attr-defined]
    assert seen == [True] * 6
    assert _torch_state.is_default()


def test_gradients_flow_across_awaits(loop: UserLoop) -> None:
    async def with_grad() -> float:
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * 2).sum()
        await asyncio.sleep(0.001)
        (loss * 3).backward()
        assert weight.grad is not None
        return weight.grad.sum().item()

    async def without_grad() -> bool:
        with torch.no_grad():
            await asyncio.sleep(0.0005)
            return bool((torch.ones(1, requires_grad=True) * 2).requires_grad)

    outcomes = [Outcome() for _ in range(20)]
    for number, outcome in enumerate(outcomes):
        loop.submit(with_grad if number % 2 else without_grad, outcome)
    assert [outcome.get() for outcome in outcomes] == [False, 18.0] * 10
