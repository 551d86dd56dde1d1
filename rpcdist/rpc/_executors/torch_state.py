"""Saves and restores what torch keeps per thread, so that many coroutines can share one.

torch keeps grad mode, inference mode, forward-mode grad, autocast, saved-tensor hooks and the stacks of function modes
(`with torch.device(...)`) and dispatch modes in thread-local variables. On a thread that runs many coroutines,
`with torch.no_grad(): await ...` would therefore switch grad off for all the others, and `__exit__` would restore
whatever the others left. So each coroutine has a `StateSlot`, and every step runs between `swap_in` and `swap_out`.

[Note: one guard]
    `torch._C._InferenceMode(False)` sets grad mode, inference mode, forward-mode grad and the autograd dispatch keys to
    their defaults, and its destructor restores the *absolute* state from before, however guards of several coroutines
    interleave and on whichever thread it runs. So leaving is opening such a guard, and coming back is closing it.
    The destructor also runs when the guard is collected as garbage, where it would install the old state on an
    innocent thread: `StateSlot.__del__` therefore closes it inside another guard, which puts things right at once.

Not covered, because torch has no way to take them apart: functorch levels (`await` inside a function under `vmap`), the
profiler's state, and the current CUDA device and stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import torch
import torch.utils._device as torch_device

T = TypeVar("T")

_C: Final = cast(Any, torch._C)  # none of what is used here has stubs
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

Hook = Callable[..., object]


def _new_guard() -> AbstractContextManager[object]:
    guard: AbstractContextManager[object] = _C._InferenceMode(False)
    guard.__enter__()
    return guard


def is_default() -> bool:
    """Whether this thread has torch's initial state, in about half a microsecond."""
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
    """Makes this thread, which is new, compute with the number of threads that `torch.set_num_threads` was told.

    OpenMP keeps that number per thread, and starts with the number of cores. torch sets it on a thread when it first
    asks for it there, which most operators do not.
    """
    torch.get_num_threads()


def reset() -> None:
    """Gives this thread torch's initial state back, whatever a user function left behind."""
    if not is_default():
        slot = StateSlot()
        slot.swap_out()
        slot.forget()


class _Autocast:
    """Autocast of one thread: per device type on or off and the data type, the cache, and how deep it is nested."""

    __slots__ = ("cache", "devices", "nesting")

    def __init__(self) -> None:
        self.cache = torch.is_autocast_cache_enabled()
        self.devices: list[tuple[str, bool, torch.dtype]] = []
        for device in _DEVICE_TYPES:
            enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            if enabled or dtype != _DEFAULT_DTYPES[device]:
                self.devices.append((device, enabled, dtype))
        self.nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()

    def leave(self) -> None:
        for device, _, _ in self.devices:
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, _DEFAULT_DTYPES[device])
        torch.set_autocast_cache_enabled(True)
        # The cache is shared by all: casts made in one coroutine's graph must not be found by another.
        torch.clear_autocast_cache()
        for _ in range(self.nesting):
            torch.autocast_decrement_nesting()

    def enter(self) -> None:
        for _ in range(self.nesting):
            torch.autocast_increment_nesting()
        for device, enabled, dtype in self.devices:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)


_DEVICE_TYPES: Final[tuple[str, ...]] = tuple(_C._autocast_supported_devices())
_DEFAULT_DTYPES: Final = {device: torch.get_autocast_dtype(device) for device in _DEVICE_TYPES}


@dataclass(slots=True, eq=False, repr=False)
class StateSlot:
    """Where a coroutine's torch state is kept while it does not run.

    Empty means torch's initial state; nothing is then done at all, which is what makes the common case cheap. A slot
    may go from thread to thread (a generator that is continued by pool threads), but serves one step at a time.
    """

    _guard: AbstractContextManager[object] | None = None
    _autocast: _Autocast | None = None
    _hooks: list[tuple[Hook, Hook]] = field(default_factory=list)  # the innermost last
    _hooks_disabled: str | None = None
    _function_modes: list[object] = field(default_factory=list)
    _dispatch_modes: list[object] = field(default_factory=list)
    _device: torch.device | None = None
    _default_device: torch_device.DeviceContext | None = None

    @property
    def is_empty(self) -> bool:
        return self._guard is None

    def swap_in(self) -> None:
        """Installs the kept state on this thread, which must have torch's initial state."""
        guard = self._guard
        if guard is None:
            return
        # The guard was opened first and is closed last: it restores the dispatch keys of autocast and the modes, too.
        self._push_stacks()
        self._guard = None
        guard.__exit__(None, None, None)
        self._clear()

    def swap_out(self) -> None:
        """Keeps this thread's state and leaves torch's initial state in its place."""
        if is_default():
            return
        self._guard = _new_guard()
        if _is_any_autocast_enabled() or not _is_autocast_cache_enabled():
            self._autocast = _Autocast()
            self._autocast.leave()
        self._hooks_disabled = _hooks_disabled_text()
        if self._hooks_disabled is not None:
            _autograd._saved_tensors_hooks_enable()
        while (hooks := _top_hooks(False)) is not None:
            self._hooks.insert(0, hooks)
            _autograd._pop_saved_tensors_default_hooks()
        if _num_function_modes():
            self._device = torch_device.CURRENT_DEVICE
            torch_device.CURRENT_DEVICE = None
            # The context of `torch.set_default_device` is stored here as well as on the stack.
            self._default_device = torch._GLOBAL_DEVICE_CONTEXT.__dict__.pop("device_context", None)
            while _num_function_modes():
                self._function_modes.append(_C._pop_torch_function_stack())
        while _num_dispatch_modes():
            self._dispatch_modes.append(_C._pop_torch_dispatch_stack(None))

    def _push_stacks(self) -> None:
        for mode in reversed(self._dispatch_modes):
            _C._push_on_torch_dispatch_stack(mode)
        for mode in reversed(self._function_modes):
            _C._push_on_torch_function_stack(mode)
        if self._function_modes:
            torch_device.CURRENT_DEVICE = self._device
            if self._default_device is not None:
                torch._GLOBAL_DEVICE_CONTEXT.device_context = self._default_device
        for pack, unpack in self._hooks:
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
        if self._hooks_disabled is not None:
            _autograd._saved_tensors_hooks_disable(self._hooks_disabled)
        if self._autocast is not None:
            self._autocast.enter()

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Calls `function` with the kept state installed, and keeps the state that it leaves."""
        self.swap_in()
        try:
            return function(*arguments)
        finally:
            self.swap_out()

    def copy_current(self) -> None:
        """Fills this empty slot with a copy of this thread's state, which stays installed; tasks inherit it so."""
        if is_default():
            return
        grad, inference, forward_grad = _is_grad_enabled(), _is_inference_mode_enabled(), _is_forward_grad_enabled()
        original = StateSlot()
        original.swap_out()
        try:
            # A guard can be closed once only, so the copy is made by building the same state again and leaving that.
            scaffold: AbstractContextManager[object] = _C._InferenceMode(inference)
            scaffold.__enter__()
            torch._C._set_grad_enabled(grad)
            _C._set_fwd_grad_enabled(forward_grad)
            original._push_stacks()
            self.swap_out()
            scaffold.__exit__(None, None, None)
        finally:
            original.swap_in()

    def forget(self) -> None:
        """Drops the kept state without installing it anywhere."""
        guard, self._guard = self._guard, None
        if guard is not None:
            here = _new_guard()
            guard.__exit__(None, None, None)
            here.__exit__(None, None, None)
        self._clear()

    def _clear(self) -> None:
        self._autocast = None
        self._hooks = []
        self._hooks_disabled = None
        self._function_modes = []
        self._dispatch_modes = []
        self._device = None
        self._default_device = None

    def __del__(self) -> None:
        if self._guard is not None:
            self.forget()  # [Note: one guard]


class StatefulCoroutine(Coroutine[Any, Any, T]):
    """A coroutine that takes its torch state with it: every step swaps it in and out.

    Args:
        slot: where the state is kept between steps. Give several the same to let them share one state, e.g. those that
            draw the items of one async generator.
    """

    __slots__ = ("__weakref__", "_coroutine", "slot")

    def __init__(self, coroutine: Coroutine[Any, Any, T], slot: StateSlot | None = None) -> None:
        self._coroutine = coroutine
        self.slot = slot if slot is not None else StateSlot()

    @classmethod
    def of(cls, awaitable: Awaitable[T], slot: StateSlot | None = None) -> StatefulCoroutine[T]:
        """The same for any awaitable, such as what `anext(generator)` returns."""
        return cls(awaitable if isinstance(awaitable, Coroutine) else _await(awaitable), slot)

    def send(self, value: Any, /) -> Any:
        slot = self.slot
        if slot.is_empty:  # nothing to install, which is nearly always so
            try:
                return self._coroutine.send(value)
            finally:
                slot.swap_out()
        return slot.call(self._coroutine.send, value)

    def throw(self, *arguments: Any) -> Any:
        return self.slot.call(self._coroutine.throw, *arguments)

    def close(self) -> None:
        self.slot.call(self._coroutine.close)  # its `with` blocks are left in the state that they know

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
        return getattr(self._coroutine, name)  # cr_frame, cr_await, ...: for stack dumps and for repr of tasks

    def __repr__(self) -> str:
        return repr(self._coroutine)


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable
