"""torch's state of each thread, which stays with its coroutine."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from user_loop_helpers import LIMIT_S, Outcome, forever, run
from user_loop_helpers import loop as loop

from rpcdist.deadline import NEVER, Deadline
from rpcdist.errors import Cancelled, DeadlineExceeded
from rpcdist.rpc._executors import torch_state
from rpcdist.rpc._executors.torch_state import StateSlot
from rpcdist.rpc._executors.user_loop import UserLoop


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def kept_state() -> dict[str, object]:
    """The state that torch keeps per thread, as far as it can be read."""
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
    initial = kept_state()
    assert torch_state.is_default()
    with torch.set_grad_enabled(True):
        managers = [MODES[name]() for name in names]
        for manager in managers:
            manager.__enter__()
        inside = kept_state()
        slot, copied = StateSlot(), StateSlot()
        copied.copy_current()
        assert kept_state() == inside
        for _ in range(3):
            slot.swap_out()
            assert kept_state() == initial
            slot.swap_in()
            assert kept_state() == inside
        slot.swap_out()
        copied.swap_in()
        assert kept_state() == inside
        copied.swap_out()
        copied.forget()
        assert kept_state() == initial
        slot.swap_in()
        for manager in reversed(managers):
            manager.__exit__(None, None, None)
    assert kept_state() == initial


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
    torch_state.reset()
    assert torch_state.is_default()
    with torch.no_grad():
        assert not torch_state.is_default()
    assert torch_state.is_default()


@pytest.mark.parametrize("name", ["no_grad", "inference", "autocast"])
def test_a_slot_that_is_thrown_away_harms_nobody(name: str) -> None:
    slot = StateSlot()
    manager = MODES[name]()
    manager.__enter__()
    slot.swap_out()
    del slot, manager
    gc.collect()
    assert torch_state.is_default()


def test_interleaved_coroutines_keep_their_own_state(loop: UserLoop) -> None:
    num_rounds = 5
    failures: list[str] = []

    async def handler(name: str) -> None:
        initial = kept_state()
        with MODES[name]():
            inside = kept_state()
            for _ in range(num_rounds):
                await asyncio.sleep(0)
                if kept_state() != inside:
                    failures.append(f"{name} changed while it waited")
        if kept_state() != initial:
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
        return torch_state.is_default()

    assert run(loop, is_clean)


async def suspend() -> None:
    """Waits for another turn of the loop, in which other coroutines run."""
    woken = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(woken.set_result, None)
    await woken


def test_tasks_of_user_code_inherit_and_keep_their_state(loop: UserLoop) -> None:
    async def child() -> bool:
        with torch.inference_mode():
            await suspend()
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
        return torch_state.is_default()

    assert run(loop, is_clean)


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
        seen.append(torch_state.is_default())

    for _ in range(3):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(LIMIT_S)
    slot.call(items.close)  # type: ignore[attr-defined]
    assert seen == [True] * 6
    assert torch_state.is_default()


def test_gradients_flow_across_awaits(loop: UserLoop) -> None:
    async def with_grad() -> float:
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * 2).sum()
        await suspend()
        (loss * 3).backward()
        assert weight.grad is not None
        return weight.grad.sum().item()

    async def without_grad() -> bool:
        with torch.no_grad():
            await suspend()
            return bool((torch.ones(1, requires_grad=True) * 2).requires_grad)

    outcomes = [Outcome() for _ in range(20)]
    for number, outcome in enumerate(outcomes):
        loop.submit(with_grad if number % 2 else without_grad, outcome)
    assert [outcome.get() for outcome in outcomes] == [False, 18.0] * 10
