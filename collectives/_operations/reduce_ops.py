"""Reduce operations as callers give them: ours, torch's, with a factor, and the deprecated `reduce_op`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from rpcdist.collectives._operations.operation import ReduceOp

Factor = float | torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PremulSum:
    """PREMUL_SUM with its factor, made by `make_premul_sum`."""

    factor: Factor
    op: ReduceOp = ReduceOp.PREMUL_SUM


def make_premul_sum(factor: Factor) -> PremulSum:
    """Makes an `op` that multiplies each rank's tensor by that rank's factor and then sums.

    Args:
        factor: a number, or a tensor of one element.
    """
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise TypeError(f"the factor of PREMUL_SUM is a number or a tensor of one element, not of {factor.numel()}")
    elif isinstance(factor, bool) or not isinstance(factor, int | float):
        raise TypeError(f"the factor of PREMUL_SUM is a number or a tensor of one element, not {factor!r}")
    return PremulSum(factor)


def canonical_op(op: object) -> tuple[ReduceOp, Factor | None]:
    """Returns our `ReduceOp` and the factor for a caller's `op`; scripts mix the imports of torch and of this package.

    Raises:
        TypeError: `op` is no reduce operation.
    """
    if isinstance(op, ReduceOp):
        return op, None
    if isinstance(op, PremulSum):
        return op.op, op.factor
    found = _torch_ops().get(getattr(op, "op", op)) if type(op).__module__.startswith("torch.") else None
    if found is None:
        raise TypeError(f"op is a ReduceOp, e.g. ReduceOp.SUM, not {op!r}")
    if found is ReduceOp.PREMUL_SUM:
        factor: Factor | None = op.__getstate__()[1] if hasattr(op, "op") else None  # type: ignore[index]
        return found, factor
    return found, None


@cache
def _torch_ops() -> dict[object, ReduceOp]:
    if not torch.distributed.is_available():
        return {}
    members = torch.distributed.ReduceOp.RedOpType.__members__
    return {members[op.name]: op for op in ReduceOp}


_NOT_FOR_COMPLEX: Final = frozenset(
    {ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
)


def supports_complex(reduceOp: object) -> bool:
    """Whether complex tensors can be reduced by this operation."""
    return canonical_op(reduceOp)[0] not in _NOT_FOR_COMPLEX


class _DeprecatedReduceOp:
    """`reduce_op.SUM` and so on, with a warning."""

    def __getattr__(self, name: str) -> ReduceOp:
        if name not in ReduceOp.__members__:
            raise AttributeError(f"reduce_op has no attribute {name!r}")
        warnings.warn("`reduce_op` is deprecated, please use `ReduceOp` instead", FutureWarning, stacklevel=2)
        return ReduceOp[name]


reduce_op: Final = _DeprecatedReduceOp()
