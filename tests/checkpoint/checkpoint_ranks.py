"""The functions that the ranks of `rank_pool` run in the tests of checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rpcdist import checkpoint, collectives
from rpcdist.checkpoint import _folders
from rpcdist.checkpoint._storage import CheckpointPart
from rpcdist.parallel import DistributedDataParallel

__all__ = ["go_on", "save_and_die", "train_and_save"]


def new_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batches on all ranks, so that their number does not matter."""
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def state_of(rank: int, size: int) -> dict[str, Any]:
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "step": 0, f"rank{rank} of {size}": torch.full((3,), float(rank))}


def join(rank: int, size: int, path: str) -> None:
    collectives.init_process_group("tcp", init_method=f"file://{path}", rank=rank, world_size=size)


def train_and_save(rank: int, size: int, path: str, target: str) -> list[str]:
    """Saves after 3 steps; the names of the files in the folder."""
    join(rank, size, path)
    try:
        state = state_of(rank, size)
        train(DistributedDataParallel(state["model"]), state["optimizer"], range(3))
        checkpoint.save(target, {**state, "step": 3})
        return sorted(os.listdir(target))
    finally:
        collectives.destroy_process_group()


def go_on(rank: int, size: int, path: str, target: str) -> tuple[int, dict[str, Tensor]]:
    """Takes 2 steps more, on another number of ranks; the step it began with, and the parameters after that."""
    join(rank, size, path)
    try:
        state = state_of(rank, size)
        wanted = {key: state[key] for key in ("model", "optimizer", "step")}
        checkpoint.load(target, wanted)
        train(DistributedDataParallel(state["model"]), state["optimizer"], range(3, 5))
        return wanted["step"], state["model"].state_dict()
    finally:
        collectives.destroy_process_group()


def save_and_die(rank: int, size: int, path: str, target: str, victim: int, moment: str) -> str:
    """Saves once, then again with other values, while one rank is killed; returns the errors of the others."""
    join(rank, size, path)
    try:
        checkpoint.save(target, {"value": torch.zeros(1000), "step": 0})
        if rank == victim:
            kill_at(moment)
        try:
            checkpoint.save(target, {"value": torch.ones(1000), "step": 1})
        except Exception as exc:
            return type(exc).__name__
        return "saved"
    finally:
        collectives.destroy_process_group()


def kill_at(moment: str) -> None:
    """Ends this process when it begins to write, has written, or is about to publish."""

    def die(*_: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    write = CheckpointPart.write

    def write_and_die(part: CheckpointPart, plan: Any) -> Any:
        write(part, plan)
        die()

    if moment == "publish":
        patch.object(_folders, "publish", die).start()
    else:
        patch.object(CheckpointPart, "write", die if moment == "write" else write_and_die).start()


def value_of(target: Path) -> tuple[float, int]:
    """The values that are stored now."""
    state: dict[str, Any] = {"value": torch.full((1000,), -1.0), "step": -1}
    checkpoint.load(target, state)
    values = state["value"].unique()
    assert len(values) == 1
    return values.item(), state["step"]
