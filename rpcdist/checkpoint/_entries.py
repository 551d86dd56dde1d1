"""Converts a value to the entries that `torch.distributed.checkpoint` stores, tensors and objects by key, and back.

A tensor is one entry. A module has one for each tensor of its state. The state of any other value is a structure (an
entry in which markers replace the tensors), and one entry for each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from rpcdist.errors import ConfigError

Entries = dict[str, Any]
"""Tensors, which may be the model's own, and other objects."""


@dataclass(frozen=True, slots=True)
class TensorAt:
    """Stands in a structure for the tensor of an entry."""

    key: str


def entries_of(key: str, value: object) -> Entries:
    """The entries of a value.

    Raises:
        ConfigError: two entries would have one key, or a checkpoint cannot hold a tensor of that kind.
    """
    if isinstance(value, Tensor):
        return {key: _plain(key, value)}
    if isinstance(value, nn.Module):
        return of_module(key, value)
    entries: Entries = {}
    entries[key] = _taken_apart(key, value.state_dict() if is_stateful(value) else value, entries)
    return entries


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether a value, such as an optimizer or a pipeline, has a state that is saved instead of the value."""
    return isinstance(value, Stateful) and not isinstance(value, type)


def of_module(key: str, module: nn.Module) -> Entries:
    """The entries of a module: its parameters and buffers themselves."""
    return {
        f"{key}.{name}": _plain(f"{key}.{name}", entry) if isinstance(entry, Tensor) else entry
        for name, entry in module.state_dict().items()
    }


def _plain(key: str, tensor: Tensor) -> Tensor:
    """The tensor of an entry, without its graph.

    Raises:
        ConfigError: a checkpoint cannot hold a tensor of that kind.
    """
    problem = _unsupported(tensor)
    if problem:
        raise ConfigError(
            f"{key!r} is {problem}; checkpoint.save() does not support that. Save a dense tensor of numbers (to_dense, "
            "dequantize), or several, and make this one from them after checkpoint.load()"
        )
    return tensor.detach()


def _unsupported(tensor: Tensor) -> str:
    """The kind of a tensor that cannot be saved, as a clause; empty if it can."""
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return "a lazy parameter or buffer, which has no values before the first forward pass"
    if not type(tensor).__module__.startswith("torch.distributed.") and type(tensor.detach()) is not Tensor:
        return f"a {type(tensor).__name__}, a subclass of torch.Tensor"  # e.g. fake, masked, and jagged tensors
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "" if _has_numbers(tensor.dtype) else f"a tensor of {tensor.dtype}"


def _has_numbers(dtype: torch.dtype) -> bool:
    """Whether torch computes with a dtype; for bits, and for integers below a byte, it has little but the name."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return True
    try:
        torch.iinfo(dtype)
    except TypeError:
        return False
    return True


def _taken_apart(key: str, value: Any, tensors: Entries) -> Any:
    """The structure of a value; adds its tensors to `tensors`."""
    if isinstance(value, Tensor):
        if key in tensors:
            raise ConfigError(f"two tensors of the state would have the key {key!r}: rename one")
        tensors[key] = _plain(key, value)
        return TensorAt(key)
    if type(value) is dict:
        return {name: _taken_apart(f"{key}.{name}", item, tensors) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(f"{key}.{number}", item, tensors) for number, item in enumerate(value))
    return value
