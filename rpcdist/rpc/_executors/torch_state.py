"""Saves and restores torch's thread-local state, so that many coroutines can share a thread.

torch keeps grad mode, inference mode, forward-mode grad, autocast, saved-tensor hooks and the stacks of function modes
(`with torch.device(...)`) and dispatch modes in thread-local variables. On a thread that runs many coroutines,
`with torch.no_grad(): await ...` would therefore disable grad for all the others, and `__exit__` would restore whatever
the others left. So each coroutine has a `StateSlot`, and every step runs between `swap_in` and `swap_out`.

[Note: one guard]
    `torch._C._InferenceMode(False)` sets grad mode, inference mode, forward-mode grad and the autograd dispatch keys to
    their defaults. Its destructor restores the previous *absolute* state, no matter how the guards of several
    coroutines interleave or which thread it runs on. So `swap_out` opens such a guard, and `swap_in` closes it.
    The garbage collector also runs the destructor, and would install the old state on an unrelated thread. So
    `StateSlot.__del__` closes the guard inside another one, which restores that thread's state at once.

Not covered, because torch cannot save it: functorch levels (`await` in a function under `vmap`), the profiler's state,
and the current CUDA device and stream.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch
import torch.utils._device as torch_device

T = TypeVar("T")

_C: Final = cast(Any, torch._C)  # these functions have no stubs
_autograd: Final = _C._autograd

_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_is_forward_grad_enabled = _C._is_fwd_grad_enabled
_is_any_autocast_enabled = _C._is_any_autocast_enabled
_is_autocast_cache_enabled = torch.is_autocast_cache_enabled
_num_function_modes = _C._len_torch_function_stack
_num_dispatch_modes = _C._len_torch_dispatch_stack
_top_hooks = _autograd._top_saved_tensors_default_hooks
_hooks_disabled_text = _autograd._saved_tensors_hooks_get_disabled_error_message


def _new_guard() -> AbstractContextManager[object]:
    guard: AbstractContextManager[object] = _C._InferenceMode(False)
    guard.__enter__()
    return guard


def is_default() -> bool:
    """Whether this thread has torch's initial state; takes about half a microsecond."""
    return (
        _is_grad_enabled()
        and not _is_inference_mode_enabled()
        and not _is_any_autocast_enabled()
        and _num_function_modes() == 0
        and _top_hooks(False) is None
        and _num_dispatch_modes() == 0
        and _is_forward_grad_enabled()
        and _is_autocast_cache_enabled()
        and _hooks_disabled_text() is None
    )


def adopt_num_threads() -> None:
    """Applies the value of `torch.set_num_threads` to this new thread.

    OpenMP keeps the value per thread, initially the number of cores. torch sets it on a thread when it first reads the
    value there, which most operators do not.
    """
    torch.get_num_threads()


def reset() -> None:
    if not is_default():
        slot = StateSlot()
        slot.swap_out()
        slot.forget()


_DEVICE_TYPES: Final[tuple[str, ...]] = tuple(_C._autocast_supported_devices())
_DEFAULT_DTYPES: Final = {device: torch.get_autocast_dtype(device) for device in _DEVICE_TYPES}


def _leave_autocast() -> Callable[[], None]:
    """Resets the autocast state of this thread; returns a function that installs it."""
    cache = torch.is_autocast_cache_enabled()
    states = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICE_TYPES]
    states = [(device, on, dtype) for device, on, dtype in states if on or dtype != _DEFAULT_DTYPES[device]]
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    for device, _, _ in states:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, _DEFAULT_DTYPES[device])
    torch.set_autocast_cache_enabled(True)
    # All threads share the cache: one coroutine must not find casts made in the graph of another.
    torch.clear_autocast_cache()
    for _ in range(nesting):
        torch.autocast_decrement_nesting()

    def enter() -> None:
        for _ in range(nesting):
            torch.autocast_increment_nesting()
        for device, enabled, dtype in states:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)

    return enter


def _set_device(current: torch.device | None, default: torch_device.DeviceContext | None) -> None:
    torch_device.CURRENT_DEVICE = current
    if default is not None:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = default


@dataclass(slots=True, eq=False, repr=False)
class StateSlot:
    """Holds a coroutine's torch state between its steps.

    Empty means torch's initial state, which costs nothing to swap. A slot may move between threads (e.g. if pool
    threads continue a generator), but serves one step at a time.
    """

    _guard: AbstractContextManager[object] | None = None
    _installers: list[Callable[[], object]] = field(default_factory=list)  # each installs a part of the state

    @property
    def is_empty(self) -> bool:
        return self._guard is None

    def swap_in(self) -> None:
        """Installs the saved state on this thread, which must have torch's initial state."""
        guard = self._guard
        if guard is None:
            return
        # The guard was opened first and is closed last: it also restores the dispatch keys of autocast and the modes.
        self._install()
        self._guard = None
        guard.__exit__(None, None, None)
        self._installers = []

    def swap_out(self) -> None:
        """Saves this thread's state and resets the thread to torch's initial state."""
        if is_default():
            return
        self._guard = _new_guard()
        installers: list[Callable[[], object]] = []
        if _is_any_autocast_enabled() or not _is_autocast_cache_enabled():
            installers.append(_leave_autocast())
        if (text := _hooks_disabled_text()) is not None:
            _autograd._saved_tensors_hooks_enable()
            installers.append(partial(_autograd._saved_tensors_hooks_disable, text))
        while (hooks := _top_hooks(False)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            installers.append(partial(_autograd._push_saved_tensors_default_hooks, *hooks))
        if _num_function_modes():
            # torch stores the context of `torch.set_default_device` here as well as on the stack.
            default = torch._GLOBAL_DEVICE_CONTEXT.__dict__.pop("device_context", None)
            installers.append(partial(_set_device, torch_device.CURRENT_DEVICE, default))
            torch_device.CURRENT_DEVICE = None
            while _num_function_modes():
                installers.append(partial(_C._push_on_torch_function_stack, _C._pop_torch_function_stack()))
        while _num_dispatch_modes():
            installers.append(partial(_C._push_on_torch_dispatch_stack, _C._pop_torch_dispatch_stack(None)))
        self._installers = installers[::-1]  # each stack from its outermost entry

    def _install(self) -> None:
        for install in self._installers:
            install()

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Calls `function` with the saved state installed, and saves the state that it leaves."""
        self.swap_in()
        try:
            return function(*arguments)
        finally:
            self.swap_out()

    def copy_current(self) -> None:
        """Copies this thread's state, which stays installed, into this empty slot; so new tasks inherit the state."""
        if is_default():
            return
        grad, inference, forward_grad = _is_grad_enabled(), _is_inference_mode_enabled(), _is_forward_grad_enabled()
        original = StateSlot()
        original.swap_out()
        try:
            # A guard can be closed only once, so build the same state a second time and swap that out.
            scaffold: AbstractContextManager[object] = _C._InferenceMode(inference)
            scaffold.__enter__()
            torch._C._set_grad_enabled(grad)
            _C._set_fwd_grad_enabled(forward_grad)
            original._install()
            self.swap_out()
            scaffold.__exit__(None, None, None)
        finally:
            original.swap_in()

    def forget(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            here = _new_guard()
            guard.__exit__(None, None, None)
            here.__exit__(None, None, None)
        self._installers = []

    def __del__(self) -> None:
        if self._guard is not None:
            self.forget()  # [Note: one guard]


class StatefulCoroutine(Coroutine[Any, Any, T]):
    """A coroutine with its own torch state, which `slot` holds between its steps."""

    __slots__ = ("__weakref__", "_coroutine", "slot")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.slot = StateSlot()

    def send(self, value: Any, /) -> Any:
        slot = self.slot
        if slot.is_empty:  # nearly always
            try:
                return self._coroutine.send(value)
            finally:
                slot.swap_out()
        return slot.call(self._coroutine.send, value)

    def throw(self, *arguments: Any) -> Any:
        return self.slot.call(self._coroutine.throw, *arguments)

    def close(self) -> None:
        self.slot.call(self._coroutine.close)  # so that its `with` blocks exit in their own state

    def __await__(self) -> Generator[Any, Any, T]:
        step, argument = self.send, None
        try:
            while True:
                awaited = step(argument)
                try:
                    step, argument = self.send, (yield awaited)
                except GeneratorExit:
                    self.close()
                    raise
                except BaseException as error:
                    step, argument = self.throw, error
        except StopIteration as stop:
            result: T = stop.value
            return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # cr_frame, cr_await, ...: for stack dumps and the repr of tasks

    def __repr__(self) -> str:
        return repr(self._coroutine)
