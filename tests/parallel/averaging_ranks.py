"""What the ranks of `rank_pool` are asked to do by the tests of model averaging: torch's on Gloo, and ours."""

from __future__ import annotations

import importlib
import warnings
from collections import OrderedDict
from typing import Any

import ddp_models
import torch
from ddp_ranks import difference, scenario, world
from torch import nn

from rpcdist import collectives
from rpcdist.parallel import DistributedDataParallel, model_averaging

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
