"""Lightning trains under torchrun with the example of docs/clients.md: `client_lightning.py BACKEND`."""

from __future__ import annotations

import sys

import lightning
import torch
from client_results import batches, example, make_model, numbers_of, report
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.losses: list[str] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


def main(backend: str) -> None:
    names = {"module": Module(), "loader": DataLoader(list(batches()), batch_size=None)}
    exec(example("Lightning", backend), names)
    trainer = names["trainer"]
    module, mean_loss = names["module"], trainer.callback_metrics["loss"].item().hex()
    assert torch.distributed.get_backend() == backend
    report({"losses": module.losses, "mean of the ranks": mean_loss, "parameters": numbers_of(module)})


if __name__ == "__main__":
    main(*sys.argv[1:])
