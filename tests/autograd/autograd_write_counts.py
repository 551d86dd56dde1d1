"""The layer of a worker that counts its writes; driver and workers import this module."""

from __future__ import annotations

from typing import Any

import torch
import write_counts
from torch import Tensor, nn

import rpcdist.rpc as rpc

__all__ = ["forward", "make_layer"]

_layers: list[nn.Linear] = []


def make_layer() -> list[Any]:
    """Makes the layer of this worker, and starts to count."""
    torch.manual_seed(1)
    _layers[:] = [nn.Linear(4, 4)]
    write_counts.start_counting()
    return [rpc.RRef(parameter) for parameter in _layers[0].parameters()]


def forward(x: Tensor) -> Tensor:
    """The first thing that happens here in each step."""
    write_counts.mark()
    y: Tensor = _layers[0](x)
    return y
