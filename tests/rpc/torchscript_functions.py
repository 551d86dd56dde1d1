"""A function in TorchScript, and how to make others."""

import warnings
from typing import Any

import torch


def compiled(function: Any) -> Any:
    """In TorchScript, which torch has deprecated, with a warning of another category since 2.14."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is")
        return torch.jit.script(function)


@compiled
def scripted(x: torch.Tensor, number: int) -> torch.Tensor:
    return x + number
