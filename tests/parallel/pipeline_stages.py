"""Stages and losses for the tests of pipelines; the workers import them from here."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rpcdist.rpc import RRef

__all__ = ["Block", "Failing", "Head", "Loss", "Mixer", "Pass", "Sleeping", "make_blocks", "sum_loss"]

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


class Pass(Block):
    """Passes the first value on, for a `Failing` or `Sleeping` stage behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], super().forward(x)[:, 1:]], dim=1)


class Failing(Block):
    """Fails where the first value is -1 (in the forward), -2 (in the backward) or -3 (by the death of the worker)."""

    def forward(self, x: Tensor) -> Tensor:
        sign = round(float(x.detach()[0, 0]))
        if sign == -1:
            raise ValueError("forward was told to fail")
        if sign == -3:
            os._exit(7)
        y = super().forward(x)
        return _BadBackward.apply(y) if sign == -2 else y  # type: ignore[no-untyped-call]


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


def step_of_doom(workers: Sequence[str], doomed: int) -> tuple[str, str, float]:
    """A good step, then one in which the worker of stage `doomed` dies: the error, and how long it took."""
    from rpcdist.parallel.pipeline import Pipeline, PipelineError

    stages = [Failing(stage) if stage == doomed else Block(stage) for stage in range(len(workers))]
    pipe = Pipeline(stages, workers, num_microbatches=4, loss_fn=Loss())
    inputs = torch.rand(8, WIDTH, dtype=torch.float64)
    pipe.step(inputs, inputs)
    # Stages pass on what `tanh` leaves between -1 and 1, so that only the first stage sees this number.
    inputs[4, 0] = -3
    begin = time.monotonic()
    try:
        pipe.step(inputs, inputs)
    except PipelineError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


def num_runners() -> int:
    """How many pipelines have stages on this worker."""
    from rpcdist.parallel.pipeline._step_messages import receivers

    gc.collect()  # an exception and the frames that it passed hold one another
    return len(receivers())


def gradients_at(context: int, parameter: RRef[Tensor]) -> Tensor:
    """The gradient of a parameter in a context, at its owner."""
    import rpcdist.autograd as dist_autograd

    return dist_autograd.get_gradients(context)[parameter.local_value()]
