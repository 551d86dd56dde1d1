"""Chooses the device of a model's inputs, and moves inputs to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._tensor_tree import map_tensors


def choose_device(
    parameters: Sequence[torch.Tensor],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """The device to which inputs are moved, or None to leave them where they are.

    Raises:
        ConfigError: the module's parameters are on different types of devices, or `device_ids` does not fit them.
    """
    devices = {parameter.device for parameter in parameters}
    if len({device.type for device in devices}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the module's parameters must be on the same type of devices, and they are on {names}")
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
    """A value with all its tensors on the device; containers are copied, other objects kept."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))
