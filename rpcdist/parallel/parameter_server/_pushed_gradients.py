"""Gradients as trainers send them, and their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Gradient", "SparseGradient", "mean_gradient"]

SparseGradient = tuple[Tensor, Tensor]
"""The numbers of rows (n,) int64, in which a row may occur twice, and their gradients (n, ...)."""

Gradient = Tensor | SparseGradient | None
"""Of one parameter; None if the loss did not depend on it."""


def mean_gradient(parameter: Tensor, gradients: Sequence[Gradient]) -> Tensor | None:
    """What one process would have had: the mean over the trainers, in the order given.

    Where some trainers have a gradient and others have none, the latter count as zeros.

    Args:
        parameter: gives shape and device.
        gradients: of each trainer, all dense or all sparse.

    Returns:
        A dense tensor, or a sparse one (COO); None if no trainer has a gradient.
    """
    present = [each for each in gradients if each is not None]
    if not present:
        return None
    if isinstance(present[0], Tensor):
        dense = [each.to(parameter.device) for each in present if isinstance(each, Tensor)]
        total = dense[0]
        for other in dense[1:]:
            total = total + other
        return total if len(gradients) == 1 else total / len(gradients)
    sparse = [each for each in present if not isinstance(each, Tensor)]
    rows = torch.cat([rows for rows, _ in sparse]).to(parameter.device)
    values = torch.cat([values for _, values in sparse]).to(parameter.device)
    if len(gradients) > 1:
        values = values / len(gradients)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, parameter.shape, check_invariants=False).coalesce()
