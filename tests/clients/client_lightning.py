"""Lightning trains under torchrun with the example of docs/clients.md: `client_lightning.py BACKEND`."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from client_results import batches, example, make_model, numbers_of, report
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.batches = list(batches())

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batches[index]


class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning is installed elsewhere
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.losses: list[str] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(loss).hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


def main(backend: str) -> None:
    names: dict[str, Any] = {"module": Module(), "loader": DataLoader(Batches(), batch_size=None)}
    exec(example("Lightning", backend), names)
    trainer = names["trainer"]
    module, mean_loss = names["module"], trainer.callback_metrics["loss"].item().hex()
    assert torch.distributed.get_backend() == backend
    report({"losses": module.losses, "mean of the ranks": mean_loss, "parameters": numbers_of(module)})


if __name__ == "__main__":
    main(*sys.argv[1:])
