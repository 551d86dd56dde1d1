"""What the ranks of `group_pool` are asked to do by the tests of data parallel training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import ddp_models
import torch
from torch import nn

from rpcdist import collectives
from rpcdist.parallel import DistributedDataParallel

LIMIT_S = 30.0
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def world(rank: int, size: int, path: str, timeout_s: float = LIMIT_S) -> Iterator[None]:
    collectives.init_process_group(
        "tcp", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
    finally:
        collectives.destroy_process_group()


def part(batch: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return batch.chunk(size)[rank]


def compare_with_single(rank: int, size: int, path: str, name: str, options: dict[str, Any], steps: int = 3) -> float:
    """Trains in parallel and alone; returns the largest difference of gradients and parameters over all steps."""
    case = ddp_models.CASES[name]
    alone, together = case.model(), case.model()
    worst = 0.0
    with world(rank, size, path):
        if rank:
            with torch.no_grad():
                for parameter in together.parameters():
                    parameter.zero_()  # rank 0's values count
        model = DistributedDataParallel(together, **options)
        for batch in ddp_models.batches(case, steps):
            for module, rows in ((alone, batch), (model, part(batch, rank, size))):
                module.zero_grad()
                ddp_models.loss_of(module(rows)).backward()
            worst = max(worst, difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
            for module in (alone, model):
                descend(module)
    return max(worst, difference(dict(alone.named_parameters()), dict(together.named_parameters())))


def descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad.to_dense()


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert list(one) == list(other), (list(one), list(other))
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)
