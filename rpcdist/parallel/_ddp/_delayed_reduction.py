"""Delayed parameters: their gradients are reduced together when the gradient of a chosen parameter is ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from rpcdist.collectives import ProcessGroup, Work
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._bucket_reduction import reduce_runs
from rpcdist.parallel._ddp._dense_bucket import BucketEntry, DenseBucket
from rpcdist.parallel._ddp._gradient_sources import OrdinaryPass
from rpcdist.parallel._ddp._parameters import Named, broadcast_tensors


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
