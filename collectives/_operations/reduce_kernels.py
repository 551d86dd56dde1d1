"""The arithmetic of reductions, element by element, for all transports; and the reduce operations of callers.

Each dtype is reduced as another dtype that gives the same bits and has fast kernels in torch (`ReduceKernel.dtype`).
torch cannot add unsigned integers of 16 bits or more, but their sum has the same bits as the sum of signed ones; a sum
of complex numbers is a sum of twice as many real numbers. Tensors are viewed, not converted.

Every rank reduces in rank order, so that all ranks compute the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from rpcdist.collectives._operations.operation import Operation, ReduceOp
from rpcdist.errors import ConfigError

Combine = Callable[..., object]
"""`combine(a, b, out=out)` writes the reduction of two tensors to `out`, which may be one of them."""

_FLOAT8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
REAL_OF: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SIGNED_OF: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
SUMS: Final = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM})
_BITWISE: Final = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_ORDERED: Final = frozenset({ReduceOp.MIN, ReduceOp.MAX})


@dataclass(frozen=True, slots=True)
class ReduceKernel:
    """How to reduce tensors of one dtype by one operation.

    Attributes:
        dtype: the dtype as which tensors are viewed for `combine`; its size divides that of their dtype.
        combine: see `Combine`.
        finish: `finish(tensor, size)` finishes the reduction of `size` ranks, in place; None if not needed.
    """

    dtype: torch.dtype
    combine: Combine
    finish: Callable[[torch.Tensor, int], object] | None


def unsupported(op: ReduceOp, dtype: torch.dtype) -> str | None:
    """Returns why `op` cannot reduce tensors of `dtype`, as a clause for an error, or None if it can."""
    name = str(dtype).removeprefix("torch.")
    if dtype in _FLOAT8:
        return f"{name} tensors can be moved but not reduced; convert them to float16 or bfloat16 first"
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        return f"{op.name} needs integers or bool, not {name}"
    if op in _ORDERED and dtype.is_complex:
        return f"{op.name} needs an order, but complex numbers ({name}) have none"
    if op is ReduceOp.AVG and dtype is torch.bool:
        return "AVG of bool tensors is not defined; convert them to a floating-point dtype first"
    if op is ReduceOp.PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
        return f"PREMUL_SUM needs a floating-point or complex dtype, not {name}"
    return None


@cache
def reducer(op: ReduceOp, dtype: torch.dtype) -> ReduceKernel:
    """Returns the kernel that reduces tensors of `dtype` by `op`."""
    reason = unsupported(op, dtype)
    if reason is not None:
        raise ValueError(reason)
    if dtype is torch.bool:
        return ReduceKernel(torch.uint8, _COMBINE[BOOL_OPS[op]], None)
    if op in SUMS and dtype.is_complex:
        dtype = REAL_OF[dtype]
    view = _SIGNED_OF.get(dtype, dtype)
    combine = _COMBINE[op] if view is dtype or op not in _ORDERED else _unsigned_order(op, view)
    return ReduceKernel(view, combine, _divider(dtype) if op is ReduceOp.AVG else None)


def reduce_into(op: ReduceOp, accumulator: torch.Tensor, other: torch.Tensor) -> None:
    """Reduces `other` into `accumulator`, in place; both are dense, of one dtype and number of elements."""
    kernel = reducer(op, accumulator.dtype)
    target = accumulator.view(-1).view(kernel.dtype)
    kernel.combine(target, other.view(-1).view(kernel.dtype), out=target)


def finish(op: ReduceOp, tensor: torch.Tensor, size: int) -> None:
    """Finishes the reduction of `size` ranks, in place: AVG divides (integers towards zero), others do nothing."""
    kernel = reducer(op, tensor.dtype)
    if kernel.finish is not None:
        kernel.finish(tensor.view(-1).view(kernel.dtype), size)


def premultiply_to(operation: Operation, source: torch.Tensor, target: torch.Tensor) -> None:
    """Writes `source` times this rank's factor to `target`, which may be the source; without a factor, copies."""
    if operation.reduce_op is ReduceOp.PREMUL_SUM:
        factor = operation.factor
        assert factor is not None, "canonical_op requires a factor"
        # A factor without dimensions does not change the dtype of the product.
        torch.mul(source, factor.reshape(()) if isinstance(factor, torch.Tensor) else factor, out=target)
    elif source is not target:
        target.copy_(source)


def premultiplied(operation: Operation, source: torch.Tensor) -> torch.Tensor:
    """Returns `source` times this rank's factor, in new memory; for operations without a factor, the source itself."""
    if operation.reduce_op is not ReduceOp.PREMUL_SUM:
        return source
    product = torch.empty_like(source)
    premultiply_to(operation, source, product)
    return product


# ------------------------------------------------------------ kernels


_COMBINE: Final[dict[ReduceOp, Combine]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
BOOL_OPS: Final = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), ReduceOp.BOR),
    **dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), ReduceOp.BAND),
    ReduceOp.BXOR: ReduceOp.BXOR,
}
"""The operation on bytes of 0 or 1 that reduces bools."""


def _unsigned_order(op: ReduceOp, signed: torch.dtype) -> Combine:
    """MIN and MAX of unsigned numbers as signed ones of the same bits: flipping the top bit keeps the order."""
    top = torch.iinfo(signed).min
    combine = _COMBINE[op]

    def flipped(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
        first = a ^ top
        combine(first, b ^ top, out=first)
        return torch.bitwise_xor(first, top, out=out)

    return flipped


def _divider(dtype: torch.dtype) -> Callable[[torch.Tensor, int], object]:
    """Returns the function that divides sums in place; `dtype` is their own, even if they are viewed as another."""
    if dtype in _SIGNED_OF:
        return _divide_unsigned
    rounding = None if dtype.is_floating_point else "trunc"
    return lambda tensor, size: torch.div(tensor, size, rounding_mode=rounding, out=tensor)


def _divide_unsigned(tensor: torch.Tensor, size: int) -> object:
    """Divides unsigned numbers of up to 64 bits that are stored as signed ones.

    Half of the number is not negative and can be divided; twice that quotient is correct or 1 too small.
    """
    half = (tensor >> 1) & torch.iinfo(tensor.dtype).max
    quotient = torch.div(half, size, rounding_mode="trunc") * 2
    rest = tensor - quotient * size  # below 2 * size, as unsigned
    top = torch.iinfo(tensor.dtype).min
    return torch.add(quotient, ((rest ^ top) >= (size ^ top)).to(tensor.dtype), out=tensor)


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
            raise TypeError(f"the factor of PREMUL_SUM must be a number or have one element, not {factor.numel()}")
    elif isinstance(factor, bool) or not isinstance(factor, int | float):
        raise TypeError(f"the factor of PREMUL_SUM must be a number or a tensor of one element, not {factor!r}")
    return PremulSum(factor)


def canonical_op(op: object) -> tuple[ReduceOp, Factor | None]:
    """Returns our `ReduceOp` and the factor for a caller's `op`, which may be torch's, as scripts mix imports."""
    found = _operation_of(op)
    if found is not ReduceOp.PREMUL_SUM:
        return found, None
    factor: Factor | None = None
    if isinstance(op, PremulSum):
        factor = op.factor
    elif not isinstance(op, ReduceOp) and hasattr(op, "op"):
        factor = op.__getstate__()[1]  # type: ignore[index]
    if factor is None:
        text = "PREMUL_SUM needs a factor: a number, or a tensor of one element. Pass op=_make_nccl_premul_sum(factor)"
        raise ConfigError(text)
    return found, factor


def _operation_of(op: object) -> ReduceOp:
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, PremulSum):
        return op.op
    found = _torch_ops().get(getattr(op, "op", op)) if type(op).__module__.startswith("torch.") else None
    if found is None:
        raise TypeError(f"op must be a ReduceOp, e.g. ReduceOp.SUM, not {op!r}")
    return found


@cache
def _torch_ops() -> dict[object, ReduceOp]:
    if not torch.distributed.is_available():
        return {}
    members = torch.distributed.ReduceOp.RedOpType.__members__
    return {members[op.name]: op for op in ReduceOp}


def supports_complex(reduceOp: object) -> bool:
    """Whether complex tensors can be reduced by this operation."""
    return _operation_of(reduceOp) in SUMS


class _DeprecatedReduceOp:
    """`reduce_op.SUM` and so on, with a warning."""

    def __getattr__(self, name: str) -> ReduceOp:
        if name not in ReduceOp.__members__:
            raise AttributeError(f"reduce_op has no attribute {name!r}")
        warnings.warn("`reduce_op` is deprecated, please use `ReduceOp` instead", FutureWarning, stacklevel=2)
        return ReduceOp[name]


reduce_op: Final = _DeprecatedReduceOp()
"""torch's old name for `ReduceOp`; each use warns."""
