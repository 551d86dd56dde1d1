"""Transformers trains a small BERT under torchrun with the example of docs/clients.md, on the backend that is named."""

from __future__ import annotations

import sys
from typing import Any

import torch
from client_results import example, numbers_of, report
from transformers import BertConfig, BertForSequenceClassification


def main(backend: str) -> None:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **shape))
    dataset = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(number % 2)} for number in range(64)]
    names: dict[str, Any] = {"model": model, "dataset": dataset}
    exec(example("Transformers", backend), names)
    trainer = names["trainer"]
    assert torch.distributed.get_backend() == backend
    report(
        {
            "steps": trainer.state.global_step,
            "loss": trainer.state.log_history[-1]["train_loss"].hex(),
            "parameters": numbers_of(model),
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
