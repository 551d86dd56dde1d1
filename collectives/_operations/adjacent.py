"""Views of tensors that are adjacent in memory as one tensor, so that they can be moved as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns one flat tensor over the memory of all tensors if each begins where the last one ends, else None."""
    first = tensors[0]
    place = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or not tensor.numel():
            return None
        place += tensor.nbytes
    if place - first.untyped_storage().data_ptr() > first.untyped_storage().nbytes():
        return None  # adjacent by chance, in different storages
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
