"""Finds and replaces the tensors in nested values: the inputs and outputs of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def find_tensors(value: object) -> list[torch.Tensor]:
    """All tensors in a value: nested lists, tuples, dicts and dataclasses, and local values of remote references."""
    found: list[torch.Tensor] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif is_dataclass(item) and not isinstance(item, type):
            pending.extend(getattr(item, field.name) for field in fields(item))
        elif callable(getattr(item, "is_owner", None)) and item.is_owner():  # type: ignore[attr-defined]
            pending.append(item.local_value())  # type: ignore[attr-defined]
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with each tensor replaced by `change(tensor)`; containers and dataclasses are copied, others kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return _map_dict(value, change)
    if is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def _map_dict(value: dict[Any, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, Any]:
    mapped = copy.copy(value)  # keeps subclasses and their attributes, such as the outputs of model libraries
    for key, item in value.items():
        mapped[key] = map_tensors(item, change)
    return mapped


def _map_dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    mapped = copy.copy(value)
    for field in fields(value):
        object.__setattr__(mapped, field.name, map_tensors(getattr(value, field.name), change))
    return mapped
