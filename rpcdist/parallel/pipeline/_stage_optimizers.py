"""The optimizers of the stages of one worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rpcdist.errors import ConfigError
from rpcdist.parallel.pipeline._stage import Stage
from rpcdist.torch_optimizers import take_step


class StageOptimizers:
    """One optimizer per stage and number. The driver numbers the optimizers that it makes."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._made: dict[int, dict[int, torch.optim.Optimizer]] = {}

    def make(self, number: int, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        """Makes an optimizer for each stage that has parameters to train."""
        made = {}
        for index, stage in self._stages.items():
            parameters = [parameter for parameter in stage.module.parameters() if parameter.requires_grad]
            if parameters:
                made[index] = kind(parameters, **options)
        self._made[number] = made

    def step(self, number: int) -> None:
        for optimizer in self._made[number].values():
            take_step(optimizer)

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
