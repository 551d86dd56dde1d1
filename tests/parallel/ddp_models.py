"""Models and data for the tests of data parallel training; each makes a batch and trains on this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS = 24  # divisible by 1, 2, 3 and 4 ranks


class Shared(nn.Module):
    """One weight used by two layers, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.twice = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.twice(self.first(rows)))
        out: torch.Tensor = self.second(torch.tanh(self.twice(hidden)))
        return out


class Embedded(nn.Module):
    """A sparse embedding below a dense layer; ranks see different words."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=sparse)
        self.out = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(words).mean(1))
        return out


class Convolved(nn.Module):
    """A convolution in channels-last order with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.relu(self.norm(self.conv(images))).mean((2, 3)))
        return out


class Branches(nn.Module):
    """Uses one of its branches; returns a nested structure."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor, left: bool, right: bool = False) -> Output:
        hidden = rows
        if left:
            hidden = hidden + self.left(rows)
        if right:
            hidden = hidden + self.right(rows)
        return Output({"scores": [self.out(hidden)]}, "note")


@dataclass
class Output:
    """The result of `Branches`."""

    values: dict[str, list[torch.Tensor]]
    note: str


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


@dataclass(frozen=True)
class Case:
    """A model with inputs whose rows are divided among the ranks."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    evaluate: bool = False  # batch statistics differ between parts and the whole

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        made = self.make().double()
        return made.eval() if self.evaluate else made


def _rows() -> torch.Tensor:
    return torch.randn(ROWS, 8, dtype=torch.float64)


def _images() -> torch.Tensor:
    return torch.randn(ROWS, 3, 6, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)


def _words() -> torch.Tensor:
    return torch.randint(50, (ROWS, 4))


CASES: dict[str, Case] = {
    "mlp": Case(mlp, _rows),
    "wide": Case(lambda: mlp(500), _rows),  # 500 * 500 doubles are reduced in place
    "shared": Case(Shared, _rows),
    "sparse": Case(Embedded, _words),
    "dense embedding": Case(lambda: Embedded(sparse=False), _words),
    "cnn": Case(lambda: Convolved().to(memory_format=torch.channels_last), _images, evaluate=True),  # type: ignore[call-overload]
}


def batches(case: Case, count: int) -> list[torch.Tensor]:
    torch.manual_seed(11)
    return [case.inputs() for _ in range(count)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over the rows."""
    return output.square().sum(1).mean()


def gradients(model: nn.Module) -> dict[str, Any]:
    return {
        name.removeprefix("module."): parameter.grad.to_dense().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
