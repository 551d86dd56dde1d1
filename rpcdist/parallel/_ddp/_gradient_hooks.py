"""Hooks of parameters that tell the reducer when a gradient is ready, after the user's hooks have changed it.

A hook holds the reducer by a weak reference: the parameters may outlive the data parallel model.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from rpcdist.parallel._ddp._gradient_sources import in_distributed_pass
from rpcdist.parallel._ddp._parameters import Named
from rpcdist.parallel._ddp._reducer import Reducer


def install_accumulation_hooks(parameters: Sequence[Named], reducer: Reducer) -> list[RemovableHandle]:
    """Reports gradients of ordinary backward passes, after they were added to `.grad`."""
    reference = weakref.ref(reducer)
    handles = []
    for index, named in enumerate(parameters):
        handles.append(named.tensor.register_post_accumulate_grad_hook(partial(_added, reference, index)))
    return handles


def install_capture_hooks(parameters: Sequence[Named], reducer: Reducer) -> list[RemovableHandle]:
    """Reports gradients of distributed backward passes; in ordinary passes these hooks do nothing."""
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


class HookOrder:
    """Keeps hooks the last ones of their parameters: a reduction that has begun must not be overtaken by other hooks.

    Args:
        parameters: as given to `install_accumulation_hooks`.
        handles: what it returned.
    """

    def __init__(self, parameters: Sequence[Named], handles: Sequence[RemovableHandle]) -> None:
        self._hooks = [_hooks_of(named.tensor) for named in parameters]
        self._ids = [handle.id for handle in handles]
        self._count = 0

    def keep(self) -> None:
        """Moves the hooks to the end if others were added since the last call."""
        count = sum(map(len, self._hooks))
        if count == self._count:
            return
        self._count = count
        for hooks, id in zip(self._hooks, self._ids, strict=True):
            if id in hooks:
                hooks[id] = hooks.pop(id)  # the engine goes by insertion; it does not see move_to_end


def _hooks_of(parameter: torch.Tensor) -> OrderedDict[int, object]:
    hooks = parameter._post_accumulate_grad_hooks
    assert isinstance(hooks, OrderedDict)
    return hooks
