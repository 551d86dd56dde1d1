"""Checks of callers' arguments, with torch's messages where scripts may match them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeGuard

import torch

from rpcdist.errors import ConfigError


def check_tensor(value: object, name: str) -> TypeGuard[torch.Tensor]:
    """Raises TypeError unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type torch.Tensor "
            f"but got {type(value)} instead."
        )
    return True


def check_tensor_list(value: object, name: str) -> TypeGuard[list[torch.Tensor]]:
    """Raises TypeError unless it is a list, not another sequence, of tensors."""
    if not isinstance(value, list) or not all(isinstance(each, torch.Tensor) for each in value):
        got = f"{type(value)}"
        if isinstance(value, list):
            got += f" with elements of type {[type(each) for each in value]}"
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor] but got {got} instead."
        )
    return True


def check_same_dtype(tensors: Iterable[torch.Tensor]) -> None:
    """Raises unless all dtypes are equal; a complex dtype may be mixed with the real one of the same width."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 and len({dtype.to_real() for dtype in dtypes}) > 1:
        raise ConfigError(
            f"Invalid usage of tensors with different dtypes. Found {', '.join(sorted(map(str, dtypes)))}"
        )


def check_num_tensors(tensors: Sequence[torch.Tensor], size: int, what: str, name: str) -> None:
    """Raises unless the list has a tensor for each rank of the group."""
    if len(tensors) != size:
        raise ConfigError(
            f"{what}: `{name}` has {len(tensors)} tensors, but the group has {size} ranks; give one for each rank"
        )


def check_same_count(tensor: torch.Tensor, count: int, what: str, name: str, other: str) -> None:
    """Raises unless the tensor has `count` elements."""
    if tensor.numel() != count:
        raise ConfigError(
            f"{what}: `{name}` has {tensor.numel()} elements (shape {tuple(tensor.shape)}), "
            f"but {other} has {count}; they have to be equal"
        )


def check_group_rank(rank: int, size: int, what: str) -> None:
    """Raises unless it is a rank of the group."""
    if not 0 <= rank < size:
        raise ConfigError(f"{what}: invalid root rank: {rank}; the group's ranks are 0 to {size - 1}")


def check_whole_number(value: object, name: str) -> None:
    """Raises TypeError unless it is an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` is a whole number, not {value!r}")


def check_timeout(timeout: object) -> timedelta:
    """Raises TypeError unless it is a timedelta."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout}")
    return timeout


def barrier_timeout(timeout: object, stacklevel: int = 3) -> timedelta | None:
    """The timeout of a monitored barrier, which torch also takes as seconds, with a warning at that level."""
    if timeout is None:
        return None
    if isinstance(timeout, float):
        warnings.warn(
            f"Please specify timeout arg as a timedelta. Converting current value of {timeout} assuming it represents "
            "seconds",
            stacklevel=stacklevel,
        )
        return timedelta(seconds=timeout)
    return check_timeout(timeout)
