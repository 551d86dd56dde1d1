"""Optimizers that step while the backward pass runs: with the averaged gradients, or not at all.

`torch.distributed.optim._apply_optimizer_in_backward` gives parameters optimizers of their own, and hooks that step
them as soon as a gradient is there, which is this rank's alone. Its hooks are removed, and the optimizers step when the
gradients are averaged. Hooks of the user's own that step cannot be told from others, but parameters that change can.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter

from torch import nn

from rpcdist.parallel._ddp._ddp_errors import DataParallelError, list_names
from rpcdist.parallel._ddp._parameters import Named


def take_over(parameters: Sequence[Named]) -> list[nn.Parameter]:
    """Removes the hooks of torch's optimizers in backward; returns the parameters that have such optimizers."""
    found = [named.tensor for named in parameters if hasattr(named.tensor, "_in_backward_optimizers")]
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = {} if module is None else module.param_to_optim_hook_handle_map
    for parameter in found:
        for handle in handles.get(parameter, ()):
            handle.remove()
    return found


def step_and_clear(parameters: Sequence[nn.Parameter]) -> None:
    """Steps the optimizers of parameters, and clears the gradients, as torch does."""
    for parameter in parameters:
        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        parameter.grad = None


class ChangeCheck:
    """Notices that a parameter was changed while a backward pass ran.

    Args:
        parameters: those that are averaged.
    """

    def __init__(self, parameters: Sequence[Named]) -> None:
        self._parameters = parameters
        self._tensors = [named.tensor for named in parameters]
        self._before = self._versions()

    def begin(self) -> None:
        """A backward pass begins."""
        self._before = self._versions()

    def _versions(self) -> list[int]:
        return list(map(_version_of, self._tensors))

    def end(self, iteration: int, rank: int) -> None:
        """A backward pass has ended.

        Raises:
            DataParallelError: a parameter was changed since it began.
        """
        after = self._versions()
        if after == self._before:
            return
        pairs = zip(self._parameters, self._before, after, strict=True)
        names = [named.name for named, old, new in pairs if old != new]
        raise DataParallelError(
            f"parameters were changed during the backward pass of iteration {iteration} on rank {rank}, before their "
            f"gradients were averaged: {list_names(names)}. A hook steps an optimizer with this rank's gradients, "
            "so the ranks' copies differ now: step after backward, or use "
            "torch.distributed.optim._apply_optimizer_in_backward, which DistributedDataParallel takes over"
        )


_version_of = attrgetter("_version")
