"""Hooks of a data parallel model: those of its parameters, and the user's hook of its buffers.

The hooks of parameters notify the reducer when a gradient is ready, after the user's hooks have changed it. They hold a
weak reference to the reducer, because the parameters may outlive the data parallel model.

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
from rpcdist.parallel._ddp._buckets import DenseBucket
from rpcdist.parallel._ddp._gradient_sources import OrdinaryPass, in_distributed_pass
from rpcdist.parallel._ddp._parameters import Trained, broadcast_tensors
from rpcdist.parallel._ddp._reducer import Reducer


class GradientHooks:
    """The hooks that notify a reducer of gradients."""

    def __init__(self, parameters: Sequence[Trained], reducer: Reducer) -> None:
        self._tensors = [each.tensor for each in parameters]
        self._reducer = weakref.ref(reducer)
        self._added = [
            tensor.register_post_accumulate_grad_hook(partial(_added, self._reducer, index))
            for index, tensor in enumerate(self._tensors)
        ]
        self._captured: list[RemovableHandle] = []
        self._all_hooks = [_hooks_of(tensor) for tensor in self._tensors]
        self._num_hooks = 0

    def watch_distributed_passes(self) -> None:
        """From now on, also notifies the reducer of gradients of distributed passes."""
        if not self._captured:
            self._captured += [
                tensor.register_hook(partial(_captured, self._reducer, index))
                for index, tensor in enumerate(self._tensors)
            ]

    def keep_last(self) -> None:
        """Moves the hooks after later ones, so that no hook changes a gradient whose reduction has begun."""
        count = sum(map(len, self._all_hooks))
        if count == self._num_hooks:
            return
        self._num_hooks = count
        for hooks, handle in zip(self._all_hooks, self._added, strict=False):
            if handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)  # the engine goes by insertion; it does not see move_to_end

    def remove(self) -> None:
        for handles in (self._added, self._captured):
            for handle in handles:
                handle.remove()
            handles.clear()


def _hooks_of(parameter: torch.Tensor) -> OrderedDict[int, object]:
    hooks = parameter._post_accumulate_grad_hooks
    assert isinstance(hooks, OrderedDict)
    return hooks


def _added(reference: weakref.ref[Reducer], index: int, parameter: torch.Tensor) -> None:
    reducer = reference()
    if reducer is not None:
        reducer.gradient_added(index)


def _captured(reference: weakref.ref[Reducer], index: int, gradient: torch.Tensor) -> None:
    reducer = reference()
    if reducer is not None and in_distributed_pass():
        reducer.gradient_captured(index, gradient)


class DelayedReduction:
    """Reduces the gradients of the delayed parameters.

    Args:
        trigger: the chosen parameter; it is an error if its gradient comes before that of a delayed parameter.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], trigger: nn.Parameter, group: ProcessGroup) -> None:
        kinds = {(parameter.dtype, parameter.device) for _, parameter in named}
        if len(kinds) != 1:
            raise ConfigError("delay_all_reduce_named_params must have parameters, all of one dtype and device")
        members = [Trained(index, name, parameter) for index, (name, parameter) in enumerate(named)]
        self._bucket = DenseBucket(0, members, flat=True)
        self._group = group
        self._source = OrdinaryPass(view=False)
        self._works: list[Work] | None = None  # of the running pass, after the chosen gradient has come
        self._late: list[str] = []
        self.enabled = True
        broadcast_tensors([parameter for _, parameter in named], group)
        for name, parameter in named:
            parameter.register_post_accumulate_grad_hook(partial(self._added, name))
        trigger.register_post_accumulate_grad_hook(self._triggered)

    def _added(self, name: str, _: torch.Tensor) -> None:
        if self._works is not None:
            self._late.append(name)

    def _triggered(self, _: torch.Tensor) -> None:
        if not self.enabled:
            return
        self._late = []  # a failed pass may have left some
        runs = self._bucket.gather(self._source.gradient, in_place=True)
        self._works = reduce_runs(runs, self._group, self._group.size(), asynchronous=True)
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        works, self._works = self._works, None
        late, self._late = self._late, []
        for work in works or ():
            work.wait()
        if late:
            raise ConfigError(
                f"the gradients of {', '.join(late)} were not averaged, because they came after that of "
                "param_to_hook_all_reduce, which starts the averaging. Choose the parameter whose gradient comes last, "
                "usually the model's first"
            )
        self._bucket.scatter(self._source.deliver)
