"""Copies of many small tensors: a call of torch for each takes longer than copying 4 KiB."""

from __future__ import annotations

import ctypes
import operator
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor

from rpcdist.errors import ConfigError
from rpcdist.parallel._published._layout import VersionLayout
from rpcdist.parallel._published._parts import MANY_TENSORS

_MAX_BYTES: Final = 16 << 10
_AT_ONCE: Final = 256  # other threads get the interpreter's lock between two steps of this many
_ALL: Final = slice(None)
_set_bytes: Final[Any] = operator.setitem
_is_on_cpu: Final[Callable[[Tensor], bool]] = operator.attrgetter("is_cpu")


def small_ones(layout: VersionLayout) -> list[int]:
    """The indices of a layout's small tensors, if it has many."""
    starts, end = layout.offsets()
    found = [
        index
        for index, (start, stop) in enumerate(zip(starts, (*starts[1:], end), strict=True))
        if start < stop <= start + _MAX_BYTES and not layout.dtypes[index].is_complex
    ]
    return found if len(found) >= MANY_TENSORS else []


class SmallTensors:
    """Where tensors lie in this process's memory.

    Args:
        tensors: their memory has to stay as long as this object is used.
        addresses: of the tensors.
        seen: see `Pieces`.
    """

    __slots__ = ("addresses", "memory", "seen")

    def __init__(self, tensors: Sequence[Tensor], addresses: list[int], seen: object = None) -> None:
        self.addresses = addresses
        self.seen = seen
        self.memory = [
            memoryview((ctypes.c_char * tensor.nbytes).from_address(address)).cast("B")
            for tensor, address in zip(tensors, addresses, strict=True)
        ]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], last: SmallTensors | None, seen: object = None) -> SmallTensors | None:
        """The memory of tensors; None if one is strided, on another device, has none, or was made in inference mode.

        Args:
            tensors: of the sizes of a layout.
            last: the memory of tensors of the same sizes; mostly they are the same again.
            seen: see `Pieces`.
        """
        if (last is None or seen is None or last.seen is not seen) and not (
            all(map(Tensor.is_contiguous, tensors))
            and not any(map(Tensor.is_neg, tensors))
            and not any(map(Tensor.is_inference, tensors))  # torch does not count writes to those
        ):
            return None
        if last is not None and all(map(operator.eq, map(Tensor.data_ptr, tensors), last.addresses)):
            last.seen = seen
            return last
        addresses = list(map(Tensor.data_ptr, tensors))
        return cls(tensors, addresses, seen) if all(addresses) and all(map(_is_on_cpu, tensors)) else None

    def copy_to(self, targets: SmallTensors) -> None:
        """Copies all bytes into tensors of the same sizes."""
        for begin in range(0, len(self.memory), _AT_ONCE):
            end = begin + _AT_ONCE
            steps = map(_set_bytes, targets.memory[begin:end], repeat(_ALL), self.memory[begin:end])
            deque(steps, maxlen=0)


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors by torch, which converts them where that is needed.

    Raises:
        ConfigError: one has no memory, where torch would end the process; nothing was copied.
    """
    for tensor in (*targets, *sources) if not all(map(Tensor.data_ptr, (*targets, *sources))) else ():
        if tensor.numel() and not tensor.data_ptr():
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} has lost its memory since the last call: its storage "
                f"has the size {tensor.untyped_storage().size()}. Give it memory again, or leave it out"
            )
    if targets:
        with torch.inference_mode():  # which may write to targets that were made in it, as to all others
            torch._foreach_copy_(targets, sources)
