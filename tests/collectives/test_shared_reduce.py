"""The arithmetic of reductions, against Python's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import pytest
import torch

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation, ReduceOp

SIZE = 3
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)

FOLDS: dict[ReduceOp, Callable[[complex, complex], complex]] = {
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.AVG: lambda a, b: a + b,
    ReduceOp.PRODUCT: lambda a, b: a * b,
}
INTEGER_FOLDS: dict[ReduceOp, Callable[[int, int], int]] = {
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.AVG: lambda a, b: a + b,
    ReduceOp.PRODUCT: lambda a, b: a * b,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: lambda a, b: a & b,
    ReduceOp.BOR: lambda a, b: a | b,
    ReduceOp.BXOR: lambda a, b: a ^ b,
}


def wrapped(value: int, dtype: torch.dtype) -> int:
    """`value` as an integer of that many bits holds it."""
    bits = dtype.itemsize * 8
    value &= (1 << bits) - 1
    return value if dtype in UNSIGNED or value < 1 << (bits - 1) else value - (1 << bits)


def reduced(op: ReduceOp, tensors: list[torch.Tensor]) -> torch.Tensor:
    result = tensors[0].clone()
    for other in tensors[1:]:
        reduce_kernels.reduce_into(op, result, other)
    reduce_kernels.finish(op, result, len(tensors))
    return result


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", INTEGER_FOLDS, ids=lambda op: op.name)
def test_integers_are_those_of_python(op: ReduceOp, dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    low = torch.iinfo(dtype).min
    rows = [[0, 1, 7, top, top, low, top - 3, 100], [0, 2, 9, 1, top, low, top // 2, 11], [1, 3, 6, 2, 5, 1, 9, 120]]
    expected = [wrapped(reduce(INTEGER_FOLDS[op], column), dtype) for column in zip(*rows, strict=True)]
    if op is ReduceOp.AVG:
        expected = [math.trunc(value / SIZE) if abs(value) < 2**50 else _truncated(value) for value in expected]
    assert reduced(op, [torch.tensor(row, dtype=dtype) for row in rows]).tolist() == expected


def _truncated(value: int) -> int:
    return value // SIZE if value >= 0 else -(-value // SIZE)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [*FOLDS, ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
def test_floats(op: ReduceOp, dtype: torch.dtype) -> None:
    rows = [[0.0, 1.5, -2.0, 4.0], [3.0, 0.5, -8.0, 4.0], [6.0, 1.0, 1.0, 4.0]]
    folds: dict[ReduceOp, Callable[[float, float], float]] = {
        ReduceOp.MIN: min,
        ReduceOp.MAX: max,
        ReduceOp.PRODUCT: lambda a, b: a * b,
    }
    expected = [reduce(folds.get(op, lambda a, b: a + b), column) for column in zip(*rows, strict=True)]
    if op is ReduceOp.AVG:
        expected = [value / SIZE for value in expected]
    result = reduced(op, [torch.tensor(row, dtype=dtype) for row in rows])
    assert result.tolist() == torch.tensor(expected, dtype=dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("op", FOLDS, ids=lambda op: op.name)
def test_complex_numbers(op: ReduceOp, dtype: torch.dtype) -> None:
    rows = [[1 + 2j, 3j, 4.0], [2 - 1j, 1 + 1j, 2.0], [0.5 + 0j, 1j, -4.0]]
    expected = [reduce(FOLDS[op], column) for column in zip(*rows, strict=True)]
    if op is ReduceOp.AVG:
        expected = [value / SIZE for value in expected]
    result = reduced(op, [torch.tensor(row, dtype=dtype) for row in rows])
    torch.testing.assert_close(result, torch.tensor(expected, dtype=dtype))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("op", FOLDS, ids=lambda op: op.name)
def test_complex_numbers_of_half_precision(op: ReduceOp) -> None:
    rows = [torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([[2.0, -1.0], [1.0, 1.0]])]
    halves = [torch.view_as_complex(row.half()) for row in rows]
    expected = reduced(op, [torch.view_as_complex(row) for row in rows])
    torch.testing.assert_close(torch.view_as_real(reduced(op, halves)).float(), torch.view_as_real(expected))


@pytest.mark.parametrize("op", [op for op in INTEGER_FOLDS if op is not ReduceOp.AVG], ids=lambda op: op.name)
def test_bools_are_any_and_all(op: ReduceOp) -> None:
    rows = [torch.tensor([0, 0, 1, 1], dtype=torch.bool), torch.tensor([0, 1, 0, 1], dtype=torch.bool)]
    expected = {ReduceOp.PRODUCT: [0, 0, 0, 1], ReduceOp.MIN: [0, 0, 0, 1], ReduceOp.BAND: [0, 0, 0, 1]}
    expected[ReduceOp.BXOR] = [0, 1, 1, 0]
    assert reduced(op, rows).int().tolist() == expected.get(op, [0, 1, 1, 1])


@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0), torch.tensor([2.0], dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64], ids=str)
def test_premultiplication(dtype: torch.dtype, factor: float | torch.Tensor) -> None:
    tensor = torch.tensor([1.0, 2.0], dtype=dtype)
    operation = Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.PREMUL_SUM, factor=factor)
    reduce_kernels.premultiply_to(operation, tensor, tensor)
    assert tensor.tolist() == [2.0, 4.0]
    reduce_kernels.premultiply_to(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM), tensor, tensor)
    assert tensor.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("op", [ReduceOp.PREMUL_SUM, torch.distributed.ReduceOp.PREMUL_SUM], ids=["ours", "torch's"])
def test_premultiplication_without_a_factor_is_refused(op: object) -> None:
    with pytest.raises(ValueError, match="needs a factor"):
        reduce_kernels.canonical_op(op)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ReduceOp, ids=lambda op: op.name)
def test_what_is_supported_has_a_kernel(op: ReduceOp, dtype: torch.dtype) -> None:
    """Either there is a reason in words, or the kernels of torch are really there."""
    reason = reduce_kernels.unsupported(op, dtype)
    tensor = torch.zeros(8 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    if reason is None:
        reduce_kernels.reduce_into(op, tensor, tensor.clone())
        reduce_kernels.finish(op, tensor, SIZE)
        return
    assert str(dtype).removeprefix("torch.") in reason
    with pytest.raises(ValueError, match=r"\w+"):
        reduce_kernels.reduce_into(op, tensor, tensor)


def test_empty_and_shaped_tensors() -> None:
    empty = torch.empty(0)
    reduce_kernels.reduce_into(ReduceOp.SUM, empty, empty)
    scalar = torch.tensor(2.0)
    reduce_kernels.reduce_into(ReduceOp.SUM, scalar, torch.tensor([3.0]))
    assert scalar.item() == 5.0
    square = torch.ones(2, 2)
    reduce_kernels.reduce_into(ReduceOp.SUM, square, torch.ones(4))
    assert square.tolist() == [[2.0, 2.0], [2.0, 2.0]]
