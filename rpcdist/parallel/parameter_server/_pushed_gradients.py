"""Gradients as trainers send them, and their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rpcdist.errors import ConfigError

SparseGradient = tuple[Tensor, Tensor]
"""The numbers of rows (n,) int64, in which a row may occur twice, and their gradients (n, ...)."""

Gradient = Tensor | SparseGradient | None
"""Of one parameter; None if the loss did not depend on it."""


def check_gradients(parameters: Sequence[Tensor], gradients: Sequence[Gradient]) -> None:
    """Whether one trainer's gradients fit: what does not would fail the step of all, or be written beside the rows.

    Args:
        parameters: of a server.
        gradients: one for each of them, or none at all.

    Raises:
        ConfigError: one does not fit.
    """
    if gradients and len(gradients) != len(parameters):
        raise ConfigError(f"{len(gradients)} gradients were pushed, for {len(parameters)} parameters")
    for parameter, gradient in zip(parameters, gradients, strict=False):
        if gradient is None:
            continue
        if isinstance(gradient, Tensor):
            values, shape = gradient, parameter.shape
        else:
            rows, values = gradient
            shape = torch.Size((len(rows), *parameter.shape[1:]))
            if rows.dtype != torch.int64 or rows.dim() != 1:
                raise ConfigError(f"rows are numbers (n,) of int64, but {rows.dtype} of {tuple(rows.shape)} was pushed")
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(parameter):
                raise ConfigError(f"gradients were pushed for rows beside the {len(parameter)} that this server has")
        if values.shape != shape or values.dtype != parameter.dtype:
            raise ConfigError(
                f"a gradient of {values.dtype} {tuple(values.shape)} was pushed, where {parameter.dtype} "
                f"{tuple(shape)} is needed"
            )


def mean_gradient(parameter: Tensor, gradients: Sequence[Gradient]) -> Tensor | None:
    """The gradient of one process with all inputs: the mean over the trainers, in the order given.

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
