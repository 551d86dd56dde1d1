"""torch's optimizers without torch's compiler, whose import is slow in each process.

torch imports `torch._dynamo` when a process makes its first optimizer and when that steps, only to exclude functions
from compilation. Our workers do not compile optimizers. So `torch.optim.Optimizer` excludes them only if something else
has imported the compiler, and `take_step` replaces torch's wrappers of `step` without the import.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch

_torch_optimizer: Any = importlib.import_module("torch.optim.optimizer")  # torch's stubs lack what is used here

_UNSEEN: Final = "__dynamo_disable"
"""The attribute in which `torch._disable_dynamo` keeps the function that it calls instead of the wrapped one."""


def take_step(optim: Any, *args: Any, **kwargs: Any) -> Any:
    """`optim.step(...)`, with its hooks and its range in a profile.

    Args:
        optim: any optimizer.
        *args, **kwargs: the arguments of `step`.
    """
    bare = _bare_step_of(optim)
    if bare is None:
        return optim.step(*args, **kwargs)
    optim._opt_called = True  # also skips the wrapper of a learning-rate scheduler, which sets this
    if is_watched(optim):
        hooked = _torch_optimizer.Optimizer.profile_hook_step(functools.partial(_without_gradients, bare))
        return hooked(optim, *args, **kwargs)
    return _without_gradients(bare, optim, *args, **kwargs)


def is_watched(optim: Any, ignores_wrapper: bool = False) -> bool:
    """Whether the wrappers of `step` are needed: for hooks, a profiler, or a wrapper in the object itself.

    Args:
        optim: any optimizer.
        ignores_wrapper: whether to ignore the wrapper that a learning-rate scheduler puts into the object.
    """
    return bool(
        optim._optimizer_step_pre_hooks
        or optim._optimizer_step_post_hooks
        or _torch_optimizer._global_optimizer_pre_hooks
        or _torch_optimizer._global_optimizer_post_hooks
        or ("step" in vars(optim) and not ignores_wrapper)  # a learning-rate scheduler puts a wrapper there
        or torch.autograd._profiler_enabled()
    )


def _bare_step_of(optim: Any) -> Callable[..., Any] | None:
    """The `step` of an optimizer's class without torch's wrappers, which take longer than the step of a small model.

    None if the step is not torch's own, or is differentiable.
    """
    if not isinstance(optim, _torch_optimizer.Optimizer):
        return None
    own: Any = vars(optim).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return None
    if any([group.get("differentiable") for group in optim.param_groups]):
        return None
    step: Any = getattr(type(optim), "step", None)
    while (inner := getattr(step, "__wrapped__", None)) is not None:
        if getattr(step, "__globals__", None) is not vars(_torch_optimizer):
            return None
        step = inner
    return step if getattr(step, "__module__", "").startswith("torch.optim.") else None


def _without_gradients(bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # As `torch.no_grad()`, which takes as long as the step of a small model.
    is_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return bare(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(is_enabled)


def _leave_compiler_out() -> None:
    """Makes torch's `Optimizer` exclude its methods from compilation only if the compiler was imported."""
    excluded = [method for method in vars(_torch_optimizer.Optimizer).values() if _is_excluded(method)]
    for function in [method.__wrapped__ for method in excluded]:
        if not hasattr(function, _UNSEEN):
            setattr(function, _UNSEEN, _until_compiler_comes(function))


def _is_excluded(method: object) -> bool:
    """Whether `torch._disable_dynamo` made a method."""
    return isinstance(method, FunctionType) and method.__code__.co_filename == torch._compile.__file__


def _until_compiler_comes(function: FunctionType) -> Callable[..., Any]:
    def direct(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        unseen: Callable[..., Any] = importlib.import_module("torch._dynamo").disable(function, True, wrapping=False)
        setattr(function, _UNSEEN, unseen)
        return unseen(*args, **kwargs)

    return direct


_leave_compiler_out()
