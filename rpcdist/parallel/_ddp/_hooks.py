"""Hooks: of parameters, that feed the reducer, and of the user, for communication."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._parameters import Named
from rpcdist.parallel._ddp._reducer import Reducer
from rpcdist.parallel._ddp._sources import in_distributed_pass

__all__ = ["BufferHook", "BufferHookLocation", "check_comm_hook", "install_capture_hooks", "install_hooks"]


def install_hooks(parameters: Sequence[Named], reducer: Reducer) -> list[RemovableHandle]:
    """Has ordinary backward passes tell the reducer; the hooks do not keep it alive."""
    reference = weakref.ref(reducer)
    handles = []
    for index, named in enumerate(parameters):
        handles.append(named.tensor.register_post_accumulate_grad_hook(partial(_added, reference, index)))
    return handles


def install_capture_hooks(parameters: Sequence[Named], reducer: Reducer) -> list[RemovableHandle]:
    """Has distributed backward passes tell it; in ordinary passes these hooks do nothing."""
    reference = weakref.ref(reducer)
    return [named.tensor.register_hook(partial(_captured, reference, index)) for index, named in enumerate(parameters)]


def _added(reference: weakref.ref[Reducer], index: int, parameter: torch.Tensor) -> None:
    reducer = reference()
    if reducer is not None:
        reducer.gradient_added(index)


def _captured(reference: weakref.ref[Reducer], index: int, gradient: torch.Tensor) -> None:
    reducer = reference()
    if reducer is not None and in_distributed_pass():
        reducer.gradient_captured(index, gradient)


def check_comm_hook(hook: object) -> None:
    """Raises TypeError or ConfigError for what cannot be one."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        names = list(inspect.signature(hook).parameters)
    except ValueError:  # no signature to look at
        return
    if len(names) != 2:
        raise ConfigError(f"a communication hook takes two arguments, state and bucket; this one takes {names}")


class BufferHookLocation(Enum):
    """When a buffer hook is called."""

    PRE_FORWARD = 1
    POST_FORWARD = 2


@dataclass(frozen=True, slots=True)
class BufferHook:
    """What synchronises buffers instead of the broadcast.

    Attributes:
        state: its first argument.
        hook: gets the state and the buffers by name; returns futures to wait for, or None.
        location: before or after the forward pass.
    """

    state: object
    hook: Callable[[object, dict[str, torch.Tensor]], list[torch.futures.Future[object]] | None]
    location: BufferHookLocation

    def call(self, buffers: dict[str, torch.Tensor]) -> None:
        """Calls it and waits."""
        for future in self.hook(self.state, buffers) or ():
            future.wait()
