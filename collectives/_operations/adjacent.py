"""Tensors that lie in memory one behind the other can be moved as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["joined"]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one flat tensor over the same memory, where they lie in it one behind the other, else None."""
    first = tensors[0]
    place = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or not tensor.numel():
            return None
        place += tensor.nbytes
    if place - first.untyped_storage().data_ptr() > first.untyped_storage().nbytes():
        return None  # neighbours by chance, in memory of their own
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
