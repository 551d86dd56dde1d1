"""Fabric trains under torchrun with the example of docs/clients.md: `client_fabric.py BACKEND`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from client_results import batches, example, make_model, numbers_of, report
from torch.nn.functional import mse_loss


def main(backend: str) -> None:
    model = make_model()
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}
    exec(example("Fabric", backend), names)
    fabric, wrapped, optimizer = names["fabric"], names["model"], names["optimizer"]
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = mse_loss(wrapped(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item().hex())
    gathered = fabric.all_gather(torch.tensor([fabric.global_rank])).tolist()
    assert torch.distributed.get_backend() == backend
    report({"losses": losses, "gathered": gathered, "parameters": numbers_of(model)})


if __name__ == "__main__":
    main(*sys.argv[1:])
