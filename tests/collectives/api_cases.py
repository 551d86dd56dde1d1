"""Random calls of the functions of `rpcdist.collectives` by the ranks of `rank_pool`, compared with plain torch.

A `Case` says what all ranks call; every rank makes the tensors of all ranks from it, and so knows the right results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from transport_in_memory import reduced, wide

import rpcdist.collectives as c
from rpcdist.collectives import ReduceOp, Work
from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation
from rpcdist.collectives._operations.reduce_kernels import unsupported
from rpcdist.collectives.tcp import TcpOptions

__all__ = ["DTYPES", "FUNCTIONS", "LAYOUTS", "REDUCING", "SHAPES", "Case", "check", "close", "open_world", "possible"]

LIMIT = timedelta(seconds=30)
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (0,), (1,), (3,), (2, 3), (0, 4), (3, 0, 2), (4, 1, 2), (7, 5), (1000,), (33, 41), (40_000,),
)  # fmt: skip
TOLERANCES = {torch.float16: 3e-2, torch.bfloat16: 6e-2, torch.float8_e4m3fn: 0.25, torch.float8_e5m2: 0.5}
NARROW = (torch.float16, torch.bfloat16, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2)

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.mT.clone(memory_format=torch.contiguous_format).mT if t.dim() > 1 else t.clone(),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "offset": lambda t: torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[-t.numel() or None :].view(t.shape),
}


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        function: one of `FUNCTIONS`.
        dtype: of all tensors.
        shape: of one rank's tensor.
        op: for those that reduce.
        layout: of what goes in; `out_layout` of what comes out.
        root: below the number of ranks.
        asynchronous: with `async_op`.
        seed: for the values.
    """

    function: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: ReduceOp
    layout: str
    out_layout: str
    root: int
    asynchronous: bool
    seed: int

    def given(self, rank: int, part: int = 0) -> torch.Tensor:
        """The input of a rank; small whole numbers, so that most sums are exact."""
        draw = torch.Generator().manual_seed(self.seed * 1000 + rank * 50 + part)
        if self.dtype is torch.bool:
            values = torch.randint(0, 2, self.shape, generator=draw).bool()
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            values = torch.randint(-3, 4, self.shape, generator=draw).to(torch.float32).to(self.dtype)
        else:
            values = torch.randint(0, 4, self.shape, generator=draw).to(self.dtype)
        return LAYOUTS[self.layout](values)

    def blank(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """For results."""
        return LAYOUTS[self.out_layout](torch.zeros(self.shape if shape is None else shape).to(self.dtype))

    def reduced(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        operation = Operation(Kind.ALL_REDUCE, tuple(tensors), tuple(tensors), self.op)
        return reduced(operation, [tensor.reshape(-1) for tensor in tensors]).view(self.shape)

    def single(self, size: int) -> tuple[int, ...]:
        """The shape of all ranks' tensors in one."""
        return (self.shape[0] * size, *self.shape[1:]) if self.shape else (size,)


def possible(function: str, op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether the function takes that operation and dtype; PREMUL_SUM has tests of its own."""
    return function not in REDUCING or (op is not ReduceOp.PREMUL_SUM and unsupported(op, dtype) is None)


# ---------------------------------------------------------------- the calls

Results = list[tuple[torch.Tensor, torch.Tensor]]
"""The actual value, and the expected one."""
Call = Callable[[Case, int, int], tuple[Work | None, Results]]


def all_reduce(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    tensor = case.given(rank)
    work = c.all_reduce(tensor, case.op, async_op=case.asynchronous)
    return work, [(tensor, case.reduced([case.given(other) for other in range(size)]))]


def reduce(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    tensor = case.given(rank)
    work = c.reduce(tensor, case.root, case.op, async_op=case.asynchronous)
    total = case.reduced([case.given(other) for other in range(size)])
    return work, [(tensor, total if rank == case.root else case.given(rank))]


def broadcast(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    tensor = case.given(rank)
    return c.broadcast(tensor, case.root, async_op=case.asynchronous), [(tensor, case.given(case.root))]


def all_gather(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    outputs = [case.blank() for _ in range(size)]
    work = c.all_gather(outputs, case.given(rank), async_op=case.asynchronous)
    return work, [(outputs[other], case.given(other)) for other in range(size)]


def all_gather_into_tensor(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    output = case.blank(case.single(size))
    work = c.all_gather_into_tensor(output, case.given(rank), async_op=case.asynchronous)
    return work, [(output, joined(case, [case.given(other) for other in range(size)]))]


def gather(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    outputs = [case.blank() for _ in range(size)] if rank == case.root else None
    work = c.gather(case.given(rank), outputs, case.root, async_op=case.asynchronous)
    return work, [(output, case.given(other)) for other, output in enumerate(outputs or [])]


def scatter(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    output = case.blank()
    inputs = [case.given(rank, part) for part in range(size)] if rank == case.root else None
    work = c.scatter(output, inputs, case.root, async_op=case.asynchronous)
    return work, [(output, case.given(case.root, rank))]


def reduce_scatter(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    output = case.blank()
    inputs = [case.given(rank, part) for part in range(size)]
    work = c.reduce_scatter(output, inputs, case.op, async_op=case.asynchronous)
    return work, [(output, case.reduced([case.given(other, rank) for other in range(size)]))]


def reduce_scatter_tensor(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    output = case.blank()
    given = LAYOUTS[case.layout](joined(case, [case.given(rank, part) for part in range(size)]))
    work = c.reduce_scatter_tensor(output, given, case.op, async_op=case.asynchronous)
    return work, [(output, case.reduced([case.given(other, rank) for other in range(size)]))]


def all_to_all(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    outputs = [case.blank() for _ in range(size)]
    work = c.all_to_all(outputs, [case.given(rank, part) for part in range(size)], async_op=case.asynchronous)
    return work, [(outputs[other], case.given(other, rank)) for other in range(size)]


def all_to_all_single(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    """With parts of different lengths: rank i sends (i + j + seed) % 3 rows to rank j."""
    rest = case.shape[1:]

    def rows(source: int, target: int) -> torch.Tensor:
        count = (source + target + case.seed) % 3
        numbers = torch.arange(count).view(count, *[1] * len(rest)) + source + 2 * target
        return (numbers.expand(count, *rest) % 2).to(torch.float32).to(case.dtype)

    sends = [rows(rank, other) for other in range(size)]
    right = [rows(other, rank) for other in range(size)]
    given = LAYOUTS[case.layout](byte_cat(sends))
    output = case.blank(tuple(byte_cat(right).shape))
    splits = [len(part) for part in right], [len(part) for part in sends]
    work = c.all_to_all_single(output, given, *splits, async_op=case.asynchronous)
    return work, [(output, byte_cat(right))]


def barrier(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    return c.barrier(async_op=case.asynchronous), []


def messages(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    """Around the ring, each rank's tensor to the next, in a batch."""
    if size == 1:
        return None, []
    output, before = case.blank(), (rank - 1) % size
    batch = [c.P2POp(c.isend, case.given(rank), (rank + 1) % size), c.P2POp(c.irecv, output, before)]
    for work in c.batch_isend_irecv(batch):
        work.wait(LIMIT)
    return None, [(output, case.given(before))]


def sparse(case: Case, rank: int, size: int) -> tuple[Work | None, Results]:
    """Rank i brings (i + seed) % 3 rows."""

    def tensor(of: int) -> torch.Tensor:
        rows = (torch.arange((of + case.seed) % 3) * (of + 1)) % 5
        values = torch.ones(len(rows), 2, dtype=torch.float64) * (of + 1)
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (5, 2), check_invariants=True)

    mine = tensor(rank)
    work = c.all_reduce(mine, async_op=case.asynchronous)
    if work is not None:
        work.wait(LIMIT)
    return None, [(mine.to_dense(), torch.stack([tensor(other).to_dense() for other in range(size)]).sum(0))]


FUNCTIONS: dict[str, Call] = {
    function.__name__: function
    for function in (
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter,
        reduce_scatter_tensor, all_to_all, all_to_all_single, barrier, messages, sparse,
    )
}  # fmt: skip
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})


def byte_cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` for every dtype."""
    dense = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    rows = sum(len(tensor) for tensor in dense)
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in dense])
    return flat.view(dense[0].dtype).view(rows, *dense[0].shape[1:])


def joined(case: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    return byte_cat([tensor.reshape(-1) for tensor in tensors]).view(case.single(len(tensors)))


# ---------------------------------------------------------------- on the ranks


def open_world(rank: int, size: int, path: str, shared_memory: bool) -> None:
    """Makes the default group, or replaces it if there is one."""
    close(rank, size)
    options = TcpOptions(shared_memory=shared_memory)
    c.init_process_group("tcp", f"file://{path}", timeout=LIMIT, world_size=size, rank=rank, pg_options=options)


def close(rank: int, size: int) -> None:
    if c.is_initialized():
        c.destroy_process_group()
        c.close_stores()


def check(rank: int, size: int, cases: list[Case]) -> None:
    """Calls what the cases say, asynchronous ones in one go, and compares."""
    waiting: list[tuple[Case, Work | None, Results]] = []
    for case in cases:
        waiting.append((case, *FUNCTIONS[case.function](case, rank, size)))
    for case, work, results in waiting:
        if work is not None:
            work.wait(LIMIT)
        for found, right in results:
            compare(case, found, right)


def compare(case: Case, found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape and found.dtype is right.dtype, (case, found, right)
    one, other = wide(found.contiguous()), wide(right.contiguous())
    if torch.equal(one, other):
        return
    tolerance = TOLERANCES.get(found.dtype, 1e-5)
    inexact = one.is_floating_point() or one.is_complex()
    assert inexact and torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True), (case, found, right)
