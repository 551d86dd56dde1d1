"""The operations of ranks in tests of transports, and the expected results, by plain arithmetic on all ranks'
inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch

from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp

__all__ = ["Case", "check", "make_operation"]

REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
FOLDS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
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


@dataclass(frozen=True, slots=True)
class Case:
    """One operation; the same on all ranks.

    Attributes:
        count: elements in each tensor.
        uneven: chunks differ: chunk i has `count + i` elements (ALL_TO_ALL from rank j: `count + i + 2 * j`).
        in_place: uses the aliases that an operation allows.
    """

    kind: Kind
    dtype: torch.dtype
    count: int
    op: ReduceOp | None = None
    root: int = -1
    uneven: bool = False
    in_place: bool = False

    def factor(self, rank: int) -> float | None:
        return rank + 1.0 if self.op is ReduceOp.PREMUL_SUM else None

    def chunk(self, rank: int, index: int) -> int:
        """Elements that rank `rank` sends in chunk `index`."""
        if not self.uneven:
            return self.count
        return self.count + index + (2 * rank if self.kind is Kind.ALL_TO_ALL else 0)


def values(case: Case, rank: int, index: int = 0) -> torch.Tensor:
    """Chunk `index` of the input of `rank`, as numbers that every dtype can hold."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.kind} {rank} {index} {case.count}".encode()))
    count = case.chunk(rank, index)
    low, high = (0, 2) if case.dtype is torch.bool else (1, 4)
    numbers = torch.randint(low, high, (count,), generator=generator)
    if case.dtype.is_complex:
        return torch.complex(numbers.double(), torch.randint(low, high, (count,), generator=generator).double())
    return numbers


def as_dtype(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor."""
    if dtype is torch.complex32:
        return torch.view_as_real(numbers).to(torch.float16).view(-1).view(dtype)
    return numbers.to(dtype, copy=True)


def reduced(case: Case, size: int, index: int = 0) -> torch.Tensor:
    assert case.op is not None
    rows = [values(case, rank, index) for rank in range(size)]
    if case.op is ReduceOp.PREMUL_SUM:
        rows = [row.to(row.dtype if row.is_complex() else torch.float64) * (rank + 1) for rank, row in enumerate(rows)]
    if case.dtype is torch.bool and case.op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return reduce({ReduceOp.SUM: torch.bitwise_or, ReduceOp.PRODUCT: torch.bitwise_and}[case.op], rows)
    result = reduce(FOLDS[case.op], rows)
    if case.op is not ReduceOp.AVG:
        return result
    if case.dtype.is_complex:
        return torch.view_as_complex(torch.view_as_real(result) / size)
    return result.double() / size if case.dtype.is_floating_point else torch.div(result, size, rounding_mode="trunc")


# ------------------------------------------------------------ operations


def make_operation(case: Case, rank: int, size: int) -> Operation:
    """The operation as `rank` calls it, with new tensors; outputs hold what must not be there afterwards."""
    inputs = tuple(as_dtype(values(case, rank, index), case.dtype) for index in range(_num_inputs(case, rank, size)))
    return Operation(
        case.kind, inputs, _outputs(case, rank, size, inputs), case.op, case.root, factor=case.factor(rank)
    )


def _num_inputs(case: Case, rank: int, size: int) -> int:
    if case.kind is Kind.BARRIER or (case.kind is Kind.SCATTER and rank != case.root):
        return 0
    return size if case.kind in (Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1


def _outputs(case: Case, rank: int, size: int, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    kind = case.kind
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST, Kind.BARRIER):
        return inputs
    if kind is Kind.GATHER and rank != case.root:
        return ()
    if kind in (Kind.SCATTER, Kind.REDUCE_SCATTER):
        own = inputs[rank] if kind is Kind.REDUCE_SCATTER and case.in_place else None
        return (_blank(case, case.chunk(rank, rank)) if own is None else own,)
    outputs = [_blank(case, case.chunk(peer, rank)) for peer in range(size)]
    if kind is Kind.ALL_GATHER and case.in_place:
        outputs[rank] = inputs[0]
    return tuple(outputs)


def _blank(case: Case, count: int) -> torch.Tensor:
    return torch.full((count * case.dtype.itemsize,), 0x55, dtype=torch.uint8).view(case.dtype)


# ------------------------------------------------------------ results


def check(case: Case, rank: int, size: int, operation: Operation) -> str:
    """The errors in the tensors after the operation; empty when all is well."""
    untouched = tuple(as_dtype(values(case, rank, index), case.dtype) for index in range(len(operation.inputs)))
    in_place = operation.inputs is operation.outputs
    if not in_place:
        for index, (tensor, before) in enumerate(zip(operation.inputs, untouched, strict=True)):
            if not (case.in_place and index == rank) and not same(tensor, before):
                return f"{case} rank {rank}/{size}: input {index} was changed"
    expected = untouched if case.kind is Kind.REDUCE and rank != case.root else _expected(case, rank, size)
    for index, (tensor, numbers) in enumerate(zip(operation.outputs, expected, strict=True)):
        if not same(tensor, as_dtype(numbers, case.dtype) if numbers.dtype is not case.dtype else numbers):
            return f"{case} rank {rank}/{size}: output {index} is {tensor[:8]}..., expected {numbers[:8]}..."
    return ""


def _expected(case: Case, rank: int, size: int) -> list[torch.Tensor]:
    match case.kind:
        case Kind.ALL_REDUCE | Kind.REDUCE:
            return [reduced(case, size)]
        case Kind.BROADCAST:
            return [values(case, case.root)]
        case Kind.ALL_GATHER:
            return [values(case, peer) for peer in range(size)]
        case Kind.GATHER:
            return [values(case, peer) for peer in range(size)] if rank == case.root else []
        case Kind.SCATTER:
            return [values(case, case.root, rank)]
        case Kind.REDUCE_SCATTER:
            return [reduced(case, size, rank)]
        case Kind.ALL_TO_ALL:
            return [values(case, peer, rank) for peer in range(size)]
        case _:
            return []


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(tensor.view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
