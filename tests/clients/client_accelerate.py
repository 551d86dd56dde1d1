"""Accelerate trains under torchrun with the example of docs/clients.md: `client_accelerate.py BACKEND`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from client_results import batches, example, make_model, numbers_of, report
from torch.nn.functional import mse_loss


def main(backend: str) -> None:
    model = make_model()
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}
    exec(example("Accelerate", backend), names)
    accelerator, wrapped, optimizer = names["accelerator"], names["model"], names["optimizer"]
    losses = []
    for inputs, targets in batches():
        with accelerator.accumulate(wrapped):
            loss = mse_loss(wrapped(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item().hex())
    gathered = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    assert torch.distributed.get_backend() == backend
    report({"losses": losses, "gathered": gathered, "parameters": numbers_of(model)})
    accelerator.wait_for_everyone()  # a rank of Gloo's that ends first may leave the other in its destructor
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
