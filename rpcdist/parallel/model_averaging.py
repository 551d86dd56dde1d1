"""Local SGD: averages the model's parameters every few steps, instead of the gradients in every step.

    model.register_comm_hook(comm_hooks.PostLocalSGDState(None, group, 100), comm_hooks.post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)

The names are those of `torch.distributed.algorithms.model_averaging` and `torch.distributed.optim`, and so are the
numbers. Lin and others, 2018: https://arxiv.org/abs/1808.07217.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel._ddp._ddp_arguments import member_group
from rpcdist.torch_optimizers import take_step

__all__ = [
    "HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager", "PostLocalSGDOptimizer",
    "average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average",
]  # fmt: skip

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
"""Parameters, or an optimizer's groups of parameters."""


def average_parameters(params: Iterable[torch.Tensor], process_group: ProcessGroup | None = None) -> None:
    """Replaces parameters by their averages over the ranks, in one all_reduce for each dtype and device."""
    group = member_group(process_group)
    packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in params:
        packs.setdefault((parameter.dtype, parameter.device), []).append(parameter.detach())
    for pack in packs.values():
        flat = torch.cat([each.reshape(-1) for each in pack]).div_(group.size())
        collectives.all_reduce(flat, group=group)
        for each, part in zip(pack, flat.split([each.numel() for each in pack]), strict=True):
            each.copy_(part.view_as(each))


def get_params_to_average(params: Parameters) -> list[torch.Tensor]:
    """Returns the parameters that have gradients."""
    found: list[torch.Tensor] = []
    for each in params:
        found += [each] if isinstance(each, torch.Tensor) else each["params"]
    return [parameter for parameter in found if parameter.grad is not None]


def average_parameters_or_parameter_groups(params: Parameters, process_group: ProcessGroup | None = None) -> None:
    """Averages the parameters that have gradients, which must be the same on all ranks."""
    average_parameters(get_params_to_average(params), process_group)


class ModelAverager(ABC):
    """Decides in which steps parameters are averaged, and in which group.

    Args:
        process_group: the ranks; all by default.
        warmup_steps: the number of first steps without averages.

    Attributes:
        step: the number of steps so far.
    """

    def __init__(self, process_group: ProcessGroup | None = None, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")
        self.process_group = member_group(process_group)
        self.warmup_steps = warmup_steps
        self.step = 0

    @abstractmethod
    def group_of_step(self) -> ProcessGroup | None:
        """Returns the ranks that average in this step, after the warm-up; None if none does."""

    def average_parameters(self, params: Parameters) -> None:
        """Averages if this step requires it, and counts the step; all ranks call it after each optimizer step."""
        group = self.group_of_step() if self.step >= self.warmup_steps else None
        if group is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1


class PeriodicModelAverager(ModelAverager):
    """Averages over all ranks in every `period`-th step."""

    def __init__(self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None) -> None:
        if period < 1:
            raise ValueError("Arg ``period`` must be a positive value.")
        super().__init__(process_group, warmup_steps)
        _advise(period)
        self.period = period

    def group_of_step(self) -> ProcessGroup | None:
        return self.process_group if (self.step - self.warmup_steps) % self.period == 0 else None


class HierarchicalModelAverager(ModelAverager):
    """Averages often in small groups of consecutive ranks, and rarely in larger groups.

    Args:
        period_group_size_dict: periods, from the shortest to the longest, and the sizes of their groups; the last size
            is that of `process_group`. In a step of several periods the longest applies.
        warmup_steps: the number of first steps without averages.
        process_group: the ranks; all by default. All of them make the averager.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if not period_group_size_dict:
            raise ValueError("Arg ``period_group_size_dict`` must not be empty.")
        periods = list(period_group_size_dict)
        if periods[0] <= 0 or periods != sorted(periods):
            raise ValueError(
                "The minimum period in arg ``period_group_size_dict`` must be a positive value, and the first one; "
                f"the periods are {periods}"
            )
        super().__init__(process_group, warmup_steps)
        if list(period_group_size_dict.values())[-1] != self.process_group.size():
            raise ValueError(
                "The last value in arg ``period_process_group_dict`` must be equal to the size of arg "
                f"``process_group``, which is {self.process_group.size()}."
            )
        _advise(periods[-1])
        self.period_process_group_dict: dict[int, ProcessGroup] = {}
        for period, size in period_group_size_dict.items():
            own = self.process_group
            if size != own.size():
                own = member_group(collectives.new_subgroups(group_size=size, group=self.process_group)[0])
            self.period_process_group_dict[period] = own

    def group_of_step(self) -> ProcessGroup | None:
        for period, group in reversed(self.period_process_group_dict.items()):
            if self.step % period == 0:
                return group
        return None


def _advise(period: int) -> None:
    if period == 1:
        warnings.warn(
            "When period is 1, no need to use model averaging because the communication cost of all-reducing "
            "parameters will be no less than the cost of all-reducing gradients by DistributedDataParallel in the "
            "backward pass. Therefore, only DistributedDataParallel should be used for this case.",
            stacklevel=3,
        )


class PostLocalSGDOptimizer(Optimizer):
    """An optimizer that averages the parameters after steps that the averager chooses.

    Args:
        optim: the optimizer of this rank's parameters.
        averager: see `ModelAverager`; its step is part of the state.
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        self.optim = optim
        self.averager = averager
        self.param_groups = optim.param_groups
        self.defaults = optim.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]  # the state is that of the optimizer inside
        """The state of the inner optimizer, by parameter."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"<PostLocalSGDOptimizer after {self.averager.step} steps: {self.optim!r}>"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps on this rank, then averages if this step requires it."""
        loss: float | None = take_step(self.optim) if closure is None else take_step(self.optim, closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner optimizer, and the number of steps."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class, or one of the inner optimizer, with which the averager starts at step 0."""
        state = dict(state_dict)
        if "step" not in state:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0: the "
                "state has no step.",
                stacklevel=2,
            )
        self.averager.step = int(state.pop("step", 0))
        self.optim.load_state_dict(state)
        self.param_groups = self.optim.param_groups
