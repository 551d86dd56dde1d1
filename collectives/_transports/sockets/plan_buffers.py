"""The buffers that a plan names, as bytes for sockets and as numbers for reductions."""

from __future__ import annotations

from typing import Final

import torch

from rpcdist.collectives._algorithms.steps import Region
from rpcdist.collectives._operations.reduce_kernels import ReduceKernel
from rpcdist.collectives._transports.memory import memory_of

_KEPT_BYTES: Final = 64 << 20


class PlanBuffer:
    """A dense tensor that a plan names by number.

    Args:
        tensor: dense and contiguous.
        reducer: the kernel of the operation, if it reduces.
    """

    __slots__ = ("_element_bytes", "_numbers", "_unit_bytes", "memory", "tensor")

    def __init__(self, tensor: torch.Tensor, reducer: ReduceKernel | None = None) -> None:
        self.tensor = tensor
        self.memory = memory_of(tensor)
        self._element_bytes = tensor.element_size()
        self._numbers = None if reducer is None else tensor.view(-1).view(reducer.dtype)
        self._unit_bytes = 1 if self._numbers is None else self._numbers.element_size()

    def bytes_of(self, region: Region) -> memoryview:
        """The memory of a region."""
        return self.memory[region.start * self._element_bytes : region.stop * self._element_bytes]

    def numbers(self, region: Region, start: int, stop: int) -> torch.Tensor:
        """Bytes `start` to `stop` of a region, as numbers of the dtype in which they are reduced."""
        assert self._numbers is not None
        base = region.start * self._element_bytes
        return self._numbers[(base + start) // self._unit_bytes : (base + stop) // self._unit_bytes]


class Scratch:
    """Memory that is kept from one operation to the next: fresh pages are slow."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, slot: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of `count` elements in a slot of the caller's choice. Its content is undefined."""
        size_bytes = count * dtype.itemsize
        kept = self._kept.get(slot)
        if kept is None or kept.nbytes < size_bytes:
            kept = torch.empty(-(-size_bytes // 64) * 64, dtype=torch.uint8)
            if kept.nbytes <= _KEPT_BYTES:
                self._kept[slot] = kept
        return kept[:size_bytes].view(dtype)

    def clear(self) -> None:
        """Releases the memory."""
        self._kept.clear()
