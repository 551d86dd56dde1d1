"""Finds and replaces the tensors in nested values: the inputs and outputs of modules, and the device for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from rpcdist.errors import ConfigError


def find_tensors(value: object) -> list[torch.Tensor]:
    """Returns all tensors in a value: nested lists, tuples, dicts and dataclasses, and local values of RRefs."""
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
    """Returns the value with each tensor replaced by `change(tensor)`; copies containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        mapped: Any = copy.copy(value)  # keeps subclasses and their attributes, such as the outputs of model libraries
        for key, item in value.items():
            mapped[key] = map_tensors(item, change)
        return mapped
    if is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in fields(value):
            object.__setattr__(mapped, field.name, map_tensors(getattr(value, field.name), change))
        return mapped
    return value


def choose_device(
    parameters: Sequence[torch.Tensor],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """Returns the device to which inputs are moved, or None to leave them on their devices.

    Raises:
        ConfigError: the module's parameters are on different types of devices, or `device_ids` does not fit them.
    """
    devices = {parameter.device for parameter in parameters}
    if len({device.type for device in devices}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the module's parameters must be on the same type of devices, but are on {names}")
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigError("device_ids can only be None or contain a single element: start one process for each device")
    single = len(devices) == 1 and next(iter(devices)).type != "cpu"
    if not single and (device_ids or output_device is not None):
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"device_ids and output_device are for modules on one accelerator; this one is on {names}")
    if not device_ids:
        return None
    chosen = device_ids[0]
    return torch.device(next(iter(devices)).type, chosen) if isinstance(chosen, int) else torch.device(chosen)


def move_to(value: Any, device: torch.device) -> Any:
    """Returns the value with all its tensors on the device; copies containers, but no other objects."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))
