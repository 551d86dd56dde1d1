"""The contract of every backend, whatever carries it: each function is called on all ranks, with that rank's backend.

`device` is where the tensors live. References are computed in plain, wider numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rpcdist.collectives._group.backend_contract import GroupBackend
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp

__all__ = ["MOVED", "REDUCED", "check_moves", "check_reductions", "reduced", "same", "values"]

MOVED = (torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e5m2, torch.uint64)
REDUCED: dict[torch.dtype, list[ReduceOp]] = {
    torch.int64: [op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM],
    torch.int16: [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN],
    torch.uint16: [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BXOR],
    torch.float32: [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PREMUL_SUM],
    torch.bfloat16: [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.PREMUL_SUM],
    torch.float16: [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX],
    torch.complex64: [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT],
    torch.complex32: [ReduceOp.SUM, ReduceOp.AVG],
    torch.bool: [op for op in ReduceOp if op not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)],
}
CPU = torch.device("cpu")


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0, device: torch.device = CPU) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly, and also their sums and products."""
    numbers = (torch.arange(count) * 7 + rank * 3 + salt) % 3 + (dtype is not torch.bool)
    return numbers.to(dtype).to(device)


def reduced(op: ReduceOp, tensors: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    """The plain reference."""
    dtype = tensors[0].dtype
    numbers = [tensor.to(torch.complex128 if dtype.is_complex else torch.int64) for tensor in tensors]
    if op is ReduceOp.PREMUL_SUM:
        numbers = [tensor.to(torch.float64) * factor for tensor, factor in zip(tensors, factors, strict=True)]
    combine: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor,
    }  # fmt: skip
    result = numbers[0]
    for number in numbers[1:]:
        result = combine.get(op, torch.add)(result, number)
    if op is ReduceOp.AVG:
        whole = not (dtype.is_complex or dtype.is_floating_point)
        result = torch.div(result, len(tensors), rounding_mode="trunc") if whole else result / len(tensors)
    return result.to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Bit by bit."""
    assert torch.equal(got.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8)), (what, got, wanted)


def check_reductions(backend: GroupBackend, device: torch.device = CPU, counts: tuple[int, ...] = (0, 1, 130)) -> None:
    """Every operation that reduces, with every dtype and ReduceOp of the table above."""
    factors = [float(rank + 2) for rank in range(backend.context.size)]
    for dtype, ops in REDUCED.items():
        for op in ops:
            for count in counts:
                _one_reduction(backend, device, op, dtype, count, factors)


def _one_reduction(
    backend: GroupBackend, device: torch.device, op: ReduceOp, dtype: torch.dtype, count: int, factors: list[float]
) -> None:
    me, size = backend.context.rank, backend.context.size
    what = (me, op, dtype, count)
    factor = factors[me] if op is ReduceOp.PREMUL_SUM else None
    everyone = [values(rank, count, dtype) for rank in range(size)]
    wanted = reduced(op, everyone, factors)
    mine = everyone[me].to(device, copy=True)
    backend.submit(Operation(Kind.ALL_REDUCE, (mine,), (mine,), op, factor=factor))
    same(mine, wanted, what)
    out = torch.empty_like(mine)
    mine = everyone[me].to(device, copy=True)
    backend.submit(Operation(Kind.REDUCE, (mine,), (out,) if me == size - 1 else (mine,), op, size - 1, factor))
    same(mine, everyone[me], what)
    if me == size - 1:
        same(out, wanted, what)
    for step in (0, 1):  # equal chunks in one piece, and chunks of different lengths
        lengths = [count + step * index for index in range(size)]
        chunks = [[values(rank, length, dtype, length) for length in lengths] for rank in range(size)]
        given = torch.cat([chunk.reshape(-1) for chunk in chunks[me]]).to(device).split(lengths)
        out = torch.empty(lengths[me], dtype=dtype, device=device)
        backend.submit(Operation(Kind.REDUCE_SCATTER, given, (out,), op, factor=factor))
        same(out, reduced(op, [chunks[rank][me] for rank in range(size)], factors), what)


def check_moves(backend: GroupBackend, device: torch.device = CPU, counts: tuple[int, ...] = (0, 1, 1000)) -> None:
    """Every operation that only moves, and a barrier."""
    for dtype in MOVED:
        for count in counts:
            for root in range(backend.context.size):
                _rooted_moves(backend, device, dtype, count, root)
            _all_moves(backend, device, dtype, count)
    backend.submit(Operation(Kind.BARRIER))


def _rooted_moves(backend: GroupBackend, device: torch.device, dtype: torch.dtype, count: int, root: int) -> None:
    me, size = backend.context.rank, backend.context.size
    everyone = [values(rank, count, dtype, device=device) for rank in range(size)]
    mine = everyone[me].clone()
    backend.submit(Operation(Kind.BROADCAST, (mine,), (mine,), root=root))
    same(mine, everyone[root], "broadcast")
    outs = tuple(torch.empty(count, dtype=dtype, device=device) for _ in range(size)) if me == root else ()
    backend.submit(Operation(Kind.GATHER, (everyone[me],), outs, root=root))
    for out, wanted in zip(outs, everyone, strict=False):
        same(out, wanted, "gather")
    out = torch.empty(count, dtype=dtype, device=device)
    backend.submit(Operation(Kind.SCATTER, tuple(everyone) if me == root else (), (out,), root=root))
    same(out, everyone[me], "scatter")


def _all_moves(backend: GroupBackend, device: torch.device, dtype: torch.dtype, count: int) -> None:
    me, size = backend.context.rank, backend.context.size
    everyone = [values(rank, count, dtype, device=device) for rank in range(size)]
    whole = torch.empty(count * size, dtype=dtype, device=device)
    chunks = whole.split(count) if count else tuple(whole for _ in range(size))
    chunks[me].copy_(everyone[me])
    backend.submit(Operation(Kind.ALL_GATHER, (chunks[me],), chunks))
    same(whole, torch.cat(everyone), "all_gather in place")
    outs = tuple(torch.empty(count, dtype=dtype, device=device) for _ in range(size))
    backend.submit(Operation(Kind.ALL_GATHER, (everyone[me],), outs))
    same(torch.cat(outs), torch.cat(everyone), "all_gather")
    ins = tuple(values(me, count + 2 * me + to, dtype, to, device) for to in range(size))
    outs = tuple(torch.empty(count + 2 * source + me, dtype=dtype, device=device) for source in range(size))
    backend.submit(Operation(Kind.ALL_TO_ALL, ins, outs))
    for source, out in enumerate(outs):
        same(out, values(source, count + 2 * source + me, dtype, me), "all_to_all")
