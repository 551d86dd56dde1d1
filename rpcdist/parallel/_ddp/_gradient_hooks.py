"""Hooks of parameters that tell the reducer when a gradient is ready, after the user's hooks have changed it.

A hook holds the reducer by a weak reference: the parameters may outlive the data parallel model.

The gradients of delayed parameters are reduced together, when the gradient of a chosen parameter is ready.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from rpcdist.collectives import ProcessGroup, Work
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._bucket_reduction import reduce_runs
from rpcdist.parallel._ddp._buckets import BucketEntry, DenseBucket
from rpcdist.parallel._ddp._gradient_sources import OrdinaryPass, in_distributed_pass
from rpcdist.parallel._ddp._parameters import Named, broadcast_tensors
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
    """Keeps hooks the last ones of their parameters: no other hook may change a gradient whose reduction has begun."""

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


class DelayedReduction:
    """Reduces the gradients of the delayed parameters.

    Args:
        named: the delayed parameters by name.
        trigger: the chosen parameter; its gradient must become ready after those of all delayed parameters.
        group: the ranks that reduce.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], trigger: nn.Parameter, group: ProcessGroup) -> None:
        kinds = {(parameter.dtype, parameter.device) for _, parameter in named}
        if len(kinds) != 1:
            raise ConfigError("delay_all_reduce_named_params must not be empty, and be of one dtype and device")
        members = [BucketEntry(index, Named(name, parameter, False)) for index, (name, parameter) in enumerate(named)]
        self._bucket = DenseBucket(0, members, flat=True)
        self._group = group
        self._source = OrdinaryPass(view=False)
        self._works: list[Work] = []
        self.enabled = True
        broadcast_tensors([parameter for _, parameter in named], group)
        self.handle: RemovableHandle = trigger.register_post_accumulate_grad_hook(self._triggered)

    def _triggered(self, _: torch.Tensor) -> None:
        if not self.enabled:
            return
        runs = self._bucket.gather(self._source.gradient, in_place=True)
        self._works = reduce_runs(runs, self._group, self._group.size(), asynchronous=True)
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        for work in self._works:
            work.wait()
        self._bucket.scatter(self._source.deliver)
