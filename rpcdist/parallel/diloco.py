"""DiLoCo: each rank trains separately for many steps, then the ranks exchange their parameter changes.

    inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
    optimizer = DiLoCoOptimizer(inner, period=100)

Douillard and others, 2023: https://arxiv.org/abs/2311.08105. After `period` steps of the inner optimizer each parameter
has changed by a delta. The average of the deltas over the ranks is the gradient for an outer optimizer, SGD with
Nesterov momentum, which steps from the common starting point. So the ranks communicate once in `period` steps, which
suits slow links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer

from rpcdist.collectives import ProcessGroup
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._ddp_arguments import member_group
from rpcdist.parallel._ddp._parameters import broadcast_tensors
from rpcdist.parallel.model_averaging import average_parameters
from rpcdist.torch_optimizers import take_step

__all__ = ["DiLoCoOptimizer", "MakeOptimizer"]

MakeOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]
"""Makes an optimizer for parameters."""

OUTER: Final = "outer"


def nesterov(parameters: Iterable[torch.Tensor]) -> Optimizer:
    """The paper's outer optimizer."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCoOptimizer(Optimizer):
    """Steps an inner optimizer, and after every `period` steps an outer one with the average change of all ranks.

    Do not wrap the model in `DistributedDataParallel`. All ranks make the optimizer, with the same parameters in the
    same order, and step equally often. The constructor gives all ranks rank 0's parameters. After an outer step the
    parameters are the same on all ranks; between two outer steps they differ. In addition to the inner optimizer it
    keeps two copies of the parameters.

    Args:
        optim: the inner optimizer of this rank's parameters, e.g. `AdamW`. Its state stays on this rank.
        period: inner steps between two outer ones.
        outer: makes the outer optimizer from parameters; the paper's Nesterov momentum by default.
        process_group: the ranks; all by default.

    Attributes:
        optim: the inner optimizer.
        outer: the outer optimizer.
        step_count: inner steps so far.

    Raises (constructor):
        ConfigError: the period is not positive, no parameter can be trained, or no group exists.
    """

    def __init__(
        self, optim: Optimizer, period: int, outer: MakeOptimizer = nesterov, process_group: ProcessGroup | None = None
    ) -> None:
        if period < 1:
            raise ConfigError(f"period, the number of steps between two exchanges, must be at least 1, not {period}")
        self.optim = optim
        self.period = period
        self.process_group = member_group(process_group)
        self.step_count = 0
        self.param_groups = optim.param_groups
        self.defaults = optim.defaults
        self._parameters = [each for group in optim.param_groups for each in group["params"] if each.requires_grad]
        if not self._parameters:
            raise ConfigError("the inner optimizer has no parameters that require gradients")
        broadcast_tensors(self._parameters, self.process_group, 0)
        self._anchors = [parameter.detach().clone() for parameter in self._parameters]  # the common starting point
        self.outer = outer(self._anchors)

    @property
    def state(self) -> Any:  # type: ignore[override]  # the state is that of the inner optimizer
        """The state of the inner optimizer, by parameter."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"<DiLoCoOptimizer after {self.step_count} steps, every {self.period} an outer one: {self.optim!r}>"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes an inner step on this rank, and after every `period` of them an outer step of all ranks.

        Raises:
            CollectiveError: the exchange failed; then the parameters are those of the inner steps.
        """
        loss: float | None = take_step(self.optim) if closure is None else take_step(self.optim, closure)
        self.step_count += 1
        if self.step_count % self.period == 0:
            self._outer_step()
        return loss

    @torch.no_grad()
    def _outer_step(self) -> None:
        deltas = [anchor - parameter for anchor, parameter in zip(self._anchors, self._parameters, strict=True)]
        average_parameters(deltas, self.process_group)
        for anchor, delta in zip(self._anchors, deltas, strict=True):
            anchor.grad = delta
        take_step(self.outer)
        self.outer.zero_grad()
        torch._foreach_copy_(self._parameters, self._anchors)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported, as the outer optimizer was made with the original parameters."""
        raise ConfigError("DiLoCoOptimizer needs all parameters in its constructor; make a new one, and load its state")

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the inner and the outer optimizer, the common starting point, and the number of steps.

        All except the inner optimizer's state is the same on all ranks.
        """
        outer = {"state": self.outer.state_dict(), "anchors": [anchor.clone() for anchor in self._anchors]}
        return {**self.optim.state_dict(), OUTER: {**outer, "step_count": self.step_count}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class; load the parameters of the module separately.

        Raises:
            ConfigError: the state is not one of this class.
        """
        state = dict(state_dict)
        outer = state.pop(OUTER, None)
        if outer is None or len(outer["anchors"]) != len(self._anchors):
            raise ConfigError(
                "this is not the state of a DiLoCoOptimizer with the same parameters; load a state of the inner "
                "optimizer into `optimizer.optim`"
            )
        self.optim.load_state_dict(state)
        self.param_groups = self.optim.param_groups
        torch._foreach_copy_(self._anchors, outer["anchors"])
        self.outer.load_state_dict(outer["state"])
        self.step_count = int(outer["step_count"])
