"""Stages and losses for the tests of pipelines; the workers import them from here."""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor, nn

__all__ = ["Block", "Failing", "Head", "Loss", "Mixer", "Sleeping", "make_blocks", "sum_loss"]

WIDTH = 6


class Block(nn.Module):
    """A linear layer of some width in double precision, and a non-linearity."""

    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def make_blocks(count: int) -> list[nn.Module]:
    return [Block(seed) for seed in range(count)]


class Mixer(Block):
    """Takes and returns two tensors, one that carries gradients and one that cannot, and a number."""

    def forward(self, x: Tensor, ids: Tensor | None = None, scale: int = 1) -> tuple[Tensor, Tensor, int]:  # type: ignore[override]
        if ids is None:
            ids = torch.arange(len(x)) % 3
        return super().forward(x) + ids[:, None] * scale, ids, scale + 1


class Head(Block):
    """Takes what `Mixer` returns; returns one tensor."""

    def forward(self, x: Tensor, ids: Tensor, scale: int) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale + ids[:, None]


class Loss(nn.Module):
    """The mean squared error, as a module."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean()


def sum_loss(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Two targets, summed over the examples."""
    return ((output - target).pow(2) * weight[:, None]).sum()


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("backward was told to fail")


class Failing(Block):
    """Fails for micro-batches that hold a negative first value: -1 forward, -2 backward, -3 by the death of the worker."""

    def forward(self, x: Tensor) -> Tensor:
        sign = round(float(x.detach()[0, 0]))
        if sign == -1:
            raise ValueError("forward was told to fail")
        if sign == -3:
            os._exit(7)
        y = super().forward(x)
        return _BadBackward.apply(y) if sign == -2 else y  # type: ignore[no-any-return,no-untyped-call]


class Sleeping(Block):
    """Waits until `wake` is called on its worker, if its first value is negative."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach()[0, 0]) < 0:
            _awake.wait(20)
        return super().forward(x)


_awake = threading.Event()


def wake() -> None:
    _awake.set()


def fall_asleep() -> None:
    _awake.clear()
