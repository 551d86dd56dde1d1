"""The functions that the ranks of `rank_pool` run in the tests of `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ddp_models
import torch
from ddp_ranks import difference, scenario
from torch import nn

from rpcdist import collectives
from rpcdist.parallel import DistributedDataParallel, Join, ZeroRedundancyOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
}


def deep(num_layers: int = 6, width: int = 16) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.Tanh())))


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, one with an option of its own."""
    parameters = list(module.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.01}]


def gradients_of(step: int, module: nn.Module) -> None:
    torch.manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)


@scenario
def compare(rank: int, size: int, name: str, grouped: bool) -> tuple[float, int, int]:
    """Steps beside the optimizer alone, with a scheduler; returns the difference, and the bytes of both states."""
    kind, options = OPTIMIZERS[name]
    alone, together = deep(), deep()
    plain = kind(groups_of(alone) if grouped else alone.parameters(), **options)
    sharded = ZeroRedundancyOptimizer(groups_of(together) if grouped else together.parameters(), kind, **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (plain, sharded)]
    for step in range(5):
        for module, optimizer in ((alone, plain), (together, sharded)):
            optimizer.zero_grad()
            gradients_of(step, module)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert [group["lr"] for group in sharded.param_groups] == [group["lr"] for group in plain.param_groups]
    away = difference(dict(alone.named_parameters()), dict(together.named_parameters()))
    return away, state_bytes(plain), state_bytes(sharded.optim)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(each.nbytes for state in optimizer.state.values() for each in state.values() if each.dim())


@scenario
def save_and_load(rank: int, size: int, to: int) -> list[float]:
    """A complete state goes into a new optimizer of this class and into a plain one, and training goes on equally."""
    module = deep()
    sharded = ZeroRedundancyOptimizer(groups_of(module), torch.optim.Adam, lr=0.01)
    for step in range(3):
        gradients_of(step, module)
        sharded.step()
    sharded.consolidate_state_dict(to)
    box: list[Any] = [None]
    if rank == to:
        box = [(sharded.state_dict(), module.state_dict())]
    else:
        try:
            sharded.state_dict()
        except RuntimeError as exc:
            assert f"consolidate_state_dict(to={rank})" in str(exc)
    collectives.broadcast_object_list(box, to)
    state, weights = box[0]
    makers: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
        lambda module: ZeroRedundancyOptimizer(groups_of(module), torch.optim.Adam, lr=0.5),
        lambda module: torch.optim.Adam(groups_of(module), lr=0.5),
    ]
    away = []
    others = []
    for make in makers:
        other = deep()
        other.load_state_dict(weights)
        optimizer = make(other)
        optimizer.load_state_dict(copy.deepcopy(state))  # torch's optimizers go on with the tensors that they load
        others.append((other, optimizer))
    gradients_of(3, module)
    sharded.step()
    for other, optimizer in others:
        gradients_of(3, other)
        optimizer.step()
        away.append(difference(dict(module.named_parameters()), dict(other.named_parameters())))
    return away


@scenario
def thaw(rank: int, size: int) -> float:
    """A group that is added later."""
    alone, together = deep(), deep()
    plain = torch.optim.Adam(list(alone.parameters())[:4], lr=0.01)
    sharded = ZeroRedundancyOptimizer(list(together.parameters())[:4], torch.optim.Adam, lr=0.01)
    for step in range(4):
        if step == 2:
            for module, optimizer in ((alone, plain), (together, sharded)):
                optimizer.add_param_group({"params": list(module.parameters())[4:], "lr": 0.1})
        for module, optimizer in ((alone, plain), (together, sharded)):
            gradients_of(step, module)
            optimizer.step()
    return difference(dict(alone.named_parameters()), dict(together.named_parameters()))


@scenario
def uneven(rank: int, size: int, sharded: bool) -> list[list[float]]:
    """Rank i has 1 + 2i batches; the parameters at the end."""
    model = DistributedDataParallel(deep())
    parameters = model.parameters()
    optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9) if sharded else (
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )  # fmt: skip
    torch.manual_seed(rank)
    with Join([model, optimizer] if sharded else [model]):
        for _ in range(1 + 2 * rank):
            optimizer.zero_grad()
            ddp_models.loss_of(model(torch.randn(4, 16))).backward()
            optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]
