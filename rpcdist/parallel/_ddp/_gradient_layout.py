"""The memory layout of gradients: views of tensors as flat runs of elements, and of runs as tensors."""

from __future__ import annotations

from typing import Final

import torch

_OWN_USES: Final = 2
"""Use count of a storage that one tensor owns alone: the tensor's reference, and that of `untyped_storage()`."""


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie without gaps and overlaps, in any order of dimensions."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def as_run(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient's memory as a flat tensor, if it is laid out like the parameter; else None."""
    if gradient.is_contiguous() and parameter.is_contiguous():
        return gradient.view(-1)
    if gradient.stride() == parameter.stride() and fills_its_memory(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return None


def view_like(run: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of a flat tensor with the parameter's shape, and with its strides if the parameter fills its memory."""
    if not parameter.is_contiguous() and fills_its_memory(parameter):
        return run.as_strided(parameter.shape, parameter.stride(), run.storage_offset())
    return run.view(parameter.shape)


def is_private(tensor: torch.Tensor) -> bool:
    """Whether no other tensor uses its memory: the engine may give the same gradient to two parameters."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES)
