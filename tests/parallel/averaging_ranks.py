"""The functions that the ranks of `rank_pool` run in the tests of model averaging: torch's on Gloo, and ours."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections import OrderedDict
from typing import Any

import ddp_models
import torch
from ddp_ranks import difference, scenario, world
from torch import nn

from rpcdist import collectives
from rpcdist.parallel import DiLoCoOptimizer, DistributedDataParallel, model_averaging

STEPS = 9
AVERAGING = "torch.distributed.algorithms.model_averaging"


def make_averager(kind: str, theirs: bool) -> Any:
    if kind == "periodic":
        module: Any = importlib.import_module(f"{AVERAGING}.averagers") if theirs else model_averaging
        return module.PeriodicModelAverager(period=3, warmup_steps=2)
    module = importlib.import_module(f"{AVERAGING}.hierarchical_model_averager") if theirs else model_averaging
    return module.HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=1)


def train(rank: int, kind: str, theirs: bool) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    module[2].bias.requires_grad_(False)
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's module
        maker: Any = importlib.import_module("torch.distributed.optim") if theirs else model_averaging
    optimizer = maker.PostLocalSGDOptimizer(inner, make_averager(kind, theirs))
    torch.manual_seed(rank)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        module(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        if step == STEPS // 2:
            optimizer.load_state_dict(optimizer.state_dict())
        steps.append({name: each.detach().clone() for name, each in module.named_parameters()})
    assert optimizer.averager.step == STEPS
    return steps


def compare(rank: int, size: int, path: str, kind: str) -> float:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}t", rank=rank, world_size=size)
    try:
        theirs = train(rank, kind, theirs=True)
    finally:
        torch.distributed.destroy_process_group()
    with world(rank, size, path):
        ours = train(rank, kind, theirs=False)
    return max(map(difference, theirs, ours))


@scenario
def on_meshes(rank: int, size: int) -> list[str]:
    """Models on a mesh of one dimension, and on what is none."""
    mesh = collectives.init_device_mesh("cpu", (1, size), mesh_dim_names=("shards", "replicas"))
    model = DistributedDataParallel(nn.Linear(2, 1), device_mesh=mesh["replicas"])
    assert model.process_group is mesh.get_group("replicas") and model.process_group.size() == size
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert next(iter(ddp_models.gradients(model).values())).tolist() == [[(size - 1) / 2] * 2]
    errors = []
    for options in ({"device_mesh": mesh}, {"device_mesh": 3}, {"device_mesh": mesh, "process_group": 1}):
        try:
            DistributedDataParallel(nn.Linear(2, 1), **options)
        except ValueError as exc:
            errors.append(str(exc))
    return errors


def solve_together(rank: int, size: int, path: str, period: int) -> dict[str, Any]:
    """Fits a linear model, of which each rank sees one half well, by DiLoCo and by the paper's algorithm alone."""
    target = torch.linspace(-1, 1, 8)
    rounds, inner_lr = 100, 0.003

    def data(of_rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * size + of_rank))
        inputs[:, of_rank * 4 : of_rank * 4 + 4] *= 0.1
        return inputs, inputs @ target

    def descend_by(weight: torch.Tensor, optimizer: torch.optim.Optimizer, of_rank: int, step: int) -> None:
        inputs, wanted = data(of_rank, step)
        optimizer.zero_grad()
        (inputs @ weight - wanted).square().mean().backward()
        optimizer.step()

    start = torch.zeros(8)
    weights = [start.clone().requires_grad_() for _ in range(size)]
    inners = [torch.optim.AdamW([weight], lr=inner_lr) for weight in weights]
    anchor, momentum = start.clone(), torch.zeros(8)
    for round_number in range(rounds):
        for step in range(round_number * period, (round_number + 1) * period):
            for other in range(size):
                descend_by(weights[other], inners[other], other, step)
        delta = sum((anchor - weight.detach() for weight in weights), torch.zeros(8)) / size
        momentum = 0.9 * momentum + delta if round_number else delta
        anchor = anchor - 0.7 * (delta + 0.9 * momentum)
        for weight in weights:
            weight.data.copy_(anchor)

    with world(rank, size, path):
        mine = (start + rank).requires_grad_()  # rank 0's counts
        optimizer = DiLoCoOptimizer(torch.optim.AdamW([mine], lr=inner_lr), period)
        for step in range(rounds * period):
            descend_by(mine, optimizer, rank, step)
            if step == rounds * period // 2:
                half, state = mine.detach().clone(), copy.deepcopy(optimizer.state_dict())
        end = mine.detach().clone()
        mine.data.copy_(half)
        again = DiLoCoOptimizer(torch.optim.AdamW([mine], lr=inner_lr), period)
        mine.data.copy_(half)
        again.load_state_dict(state)
        for step in range(rounds * period // 2 + 1, rounds * period):
            descend_by(mine, again, rank, step)
    return {
        "as in one process": bool(torch.allclose(end, anchor, atol=1e-4)),
        "resumed": torch.equal(mine, end),
        "distance": float((end - target).abs().max()),
    }
