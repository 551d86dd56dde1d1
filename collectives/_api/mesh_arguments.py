"""Checks the arguments of a `DeviceMesh`, and makes the world that it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from rpcdist.collectives._api.default_group import init_process_group
from rpcdist.collectives._api.group_queries import get_rank, get_world_size, is_initialized
from rpcdist.errors import ConfigError


def check_device_type(device_type: str) -> None:
    if not device_type.isalpha():
        raise ConfigError(
            f"Device type with index is not supported but got {device_type}: pass 'cpu' or 'cuda', and set the current "
            "device with torch.cuda.set_device()"
        )


def checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    unique = tuple(names)
    if len(unique) != ndim:
        raise ConfigError(f"the mesh has {ndim} dimensions, and {len(unique)} names: {unique}")
    if len(set(unique)) != len(unique):
        raise ConfigError(f"Each mesh_dim_name must be unique; found {unique}")
    return unique


def check_ranks(ranks: torch.Tensor) -> None:
    flat, size = ranks.flatten().tolist(), get_world_size()
    if len(set(flat)) != len(flat):
        raise ConfigError(f"every rank is in a mesh once; found {flat}")
    if flat and not (0 <= min(flat) and max(flat) < size):
        raise ConfigError(
            f"Mesh should not be bigger than default world size {size}, but found ranks up to {max(flat)}"
        )


def set_up_world(device_type: str) -> None:
    """Makes the default group where there is none, as torch does before it makes the first mesh."""
    if not is_initialized():
        init_process_group()
    if device_type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_initialized():
        local_rank = os.environ.get("LOCAL_RANK", "")
        number = int(local_rank) if local_rank.isdigit() else get_rank()
        torch.cuda.set_device(number % torch.cuda.device_count())
