"""The optimizers of the stages: at a worker, and all of them as the driver sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rpcdist.errors import ConfigError
from rpcdist.parallel.pipeline._stage import Stage

if TYPE_CHECKING:
    from rpcdist.parallel.pipeline._pipeline import Pipeline

__all__ = ["PipelineOptimizer", "StageOptimizers"]


class StageOptimizers:
    """One optimizer per stage and number: the driver numbers what it makes."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._made: dict[int, dict[int, torch.optim.Optimizer]] = {}

    def make(self, number: int, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        """An optimizer for each stage that has parameters to train."""
        made = {}
        for index, stage in self._stages.items():
            parameters = [parameter for parameter in stage.module.parameters() if parameter.requires_grad]
            if parameters:
                made[index] = kind(parameters, **options)
        self._made[number] = made

    def step(self, number: int) -> None:
        for optimizer in self._made[number].values():
            optimizer.step()

    def change(self, number: int, options: dict[str, Any]) -> None:
        """Sets options of all parameter groups, the learning rate for example."""
        for optimizer in self._made[number].values():
            for group in optimizer.param_groups:
                if unknown := options.keys() - group.keys():
                    raise ConfigError(f"{type(optimizer).__name__} has no option {', '.join(sorted(unknown))}")
                group.update(options)

    def state_dict(self, number: int) -> dict[int, dict[str, Any]]:
        return {index: optimizer.state_dict() for index, optimizer in self._made[number].items()}

    def load_state_dict(self, number: int, state: Mapping[int, dict[str, Any]]) -> None:
        for index, optimizer in self._made[number].items():
            optimizer.load_state_dict(state[index])


class PipelineOptimizer:
    """The optimizers of all stages, used as one. Made by `Pipeline.make_optimizer`."""

    def __init__(self, pipeline: Pipeline, number: int) -> None:
        self._pipeline = pipeline
        self._number = number

    def step(self) -> None:
        """One step of every stage's optimizer, all at the same time."""
        self._pipeline._ask("optimizer_step", self._number)

    def zero_grad(self) -> None:
        """Sets the gradients of all parameters to None."""
        self._pipeline.zero_grad()

    def change(self, **options: Any) -> None:
        """Sets options of all parameter groups: `optimizer.change(lr=0.01)`."""
        self._pipeline._ask("optimizer_change", self._number, options)

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """That of each stage's optimizer, by stage."""
        found: dict[int, dict[str, Any]] = {}
        for of_worker in self._pipeline._ask("optimizer_state_dict", self._number):
            found.update(of_worker)
        return dict(sorted(found.items()))

    def load_state_dict(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Takes what `state_dict` returned."""
        self._pipeline._ask("optimizer_load_state_dict", self._number, dict(state))
