"""The functions that the ranks of `rank_pool` run in the tests of `SyncBatchNorm`."""

from __future__ import annotations

import importlib
from typing import Any

import ddp_models
import torch
from ddp_ranks import descend, difference, scenario, world
from torch import nn

from rpcdist.parallel import DistributedDataParallel, SyncBatchNorm

LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def layer_pair(shape: list[int], options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A layer for the whole batch, and one for the parts, with the same parameters that are not 1 and 0."""
    alone = LAYERS[len(shape)](shape[1], dtype=torch.float64, **options)
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    together = LAYERS[len(shape)](shape[1], dtype=torch.float64, **options)
    together.load_state_dict(alone.state_dict())
    return alone, SyncBatchNorm.convert_sync_batchnorm(together)


@scenario
def compare_with_whole_batch(rank: int, size: int, rows: list[int], rest: list[int], options: dict[str, Any]) -> float:
    """Rank i has rows[i] of a batch; returns the largest difference of outputs, gradients and running statistics."""
    torch.manual_seed(0)
    shape = [sum(rows), *rest]
    alone, together = layer_pair(shape, options)
    worst = 0.0
    for _ in range(3):
        whole = (torch.randn(shape, dtype=torch.float64) * 3 + 100).requires_grad_()
        direction = torch.randn(shape, dtype=torch.float64)
        mine = whole.detach().split(rows)[rank].clone().requires_grad_()
        for module in (alone, together):
            module.zero_grad()
        output = alone(whole)
        (output * direction).sum().backward()
        got = together(mine)
        (got * direction.split(rows)[rank]).sum().backward()
        pairs = [(output.split(rows)[rank], got), (whole.grad.split(rows)[rank], mine.grad)]  # type: ignore[union-attr]
        for one, other in zip(alone.parameters(), together.parameters(), strict=True):
            total = other.grad.clone()  # type: ignore[union-attr]
            importlib.import_module("rpcdist.collectives").all_reduce(total)
            pairs.append((one.grad, total))
        pairs += zip(alone.buffers(), together.buffers(), strict=True)
        worst = max([worst, *(float((one - other).detach().abs().max()) for one, other in pairs if one.numel())])
    probe = torch.randn(shape, dtype=torch.float64)
    return max(worst, float((alone.eval()(probe) - together.eval()(probe)).abs().max()))


def normalised() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)).double()


def train_in_parallel(rank: int, size: int, path: str, how: str) -> float:
    """`how` the layer becomes one that synchronises; returns the largest difference from training alone."""
    alone, together = normalised(), normalised()
    if how == "ours":
        together = SyncBatchNorm.convert_sync_batchnorm(together)
    else:
        together = nn.SyncBatchNorm.convert_sync_batchnorm(together)
    if how == "torch's group":
        importlib.import_module("rpcdist.collectives.torch_backend")
        torch.distributed.init_process_group("rpcdist", init_method=f"file://{path}", rank=rank, world_size=size)
        try:
            return train_both(rank, size, alone, together, torch.distributed.new_group(backend="rpcdist"))
        finally:
            torch.distributed.destroy_process_group()
    with world(rank, size, path):
        return train_both(rank, size, alone, together, None)


def train_both(rank: int, size: int, alone: nn.Module, together: nn.Module, group: Any) -> float:
    model = DistributedDataParallel(together, process_group=group)
    assert type(together[1]) is SyncBatchNorm  # type: ignore[index]
    worst = 0.0
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(6 * size, 8, dtype=torch.float64)
        for module, rows in ((alone, batch), (model, batch.chunk(size)[rank])):
            module.zero_grad()
            ddp_models.loss_of(module(rows)).backward()
        worst = max(worst, difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
        for module in (alone, model):
            descend(module)
    return max(worst, difference(dict(alone.named_buffers()), dict(together.named_buffers())))


@scenario
def one_value_per_channel(rank: int, size: int) -> str:
    layer = SyncBatchNorm(3)
    try:
        layer(torch.ones(1 if rank == 0 else 0, 3))
    except ValueError as exc:
        return str(exc)
    return "no error"
