"""Every operation over sockets equals a plain reference, for all dtypes, sizes and numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from full_sets import FULL_ONLY
from socket_ranks import Ranks, connections_of, socket_ranks

from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import finish, reduce_into, unsupported

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# Plans of all sizes are played in `test_plans_simulated.py`.
SIZES = [pytest.param(2, marks=FULL_ONLY), 3, pytest.param(4, marks=FULL_ONLY)]
COUNTS = [0, 7, 1000]
LARGE_COUNTS = [70_001, 1_500_001]  # bytes beyond the limits of the small plans, and of the buffers of sockets
MOVED = [torch.float32, torch.bool, torch.complex64, torch.float8_e5m2]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with socket_ranks(request.param, unix=False) as group:
        yield group


def tensor(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small numbers, so that sums and products are exact; the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    numbers = torch.randint(0, 3, (count,), generator=generator)
    return numbers.to(dtype) if dtype is not torch.bool else numbers > 0


def reduced(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """One rank's after the other."""
    total = inputs[0].clone()
    for other in inputs[1:]:
        reduce_into(op, total, other)
    finish(op, total, len(inputs))
    return total


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


REDUCTIONS = [
    (op, dtype)
    for op in ReduceOp
    for dtype in DTYPES
    if op is not ReduceOp.PREMUL_SUM and unsupported(op, dtype) is None
]


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=lambda value: str(value).split(".")[-1])
def test_all_reduce(ranks: Ranks, op: ReduceOp, dtype: torch.dtype) -> None:
    for count in COUNTS:
        inputs = [tensor(rank, count, dtype) for rank in range(len(ranks.transports))]
        wanted = reduced(inputs, op)
        ranks.run_well([Operation(Kind.ALL_REDUCE, (each,), (each,), op) for each in inputs])
        assert all(equal(each, wanted) for each in inputs)


@pytest.mark.parametrize("count", LARGE_COUNTS)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX], ids=lambda op: op.name)
def test_large_all_reduce_gives_the_same_bits_everywhere(ranks: Ranks, count: int, op: ReduceOp) -> None:
    inputs = [
        torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(len(ranks.transports))
    ]
    wanted = reduced([each.double() for each in inputs], op).float()
    ranks.run_well([Operation(Kind.ALL_REDUCE, (each,), (each,), op) for each in inputs])
    assert torch.allclose(inputs[0], wanted, atol=1e-5)
    assert all(equal(inputs[0], other) for other in inputs)


@pytest.mark.parametrize("count", [*COUNTS, *LARGE_COUNTS])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=lambda op: op.name)
def test_reduce_changes_the_root_only(ranks: Ranks, count: int, op: ReduceOp) -> None:
    size = len(ranks.transports)
    for root in {0, size - 1}:
        inputs = [tensor(rank, count, torch.float32) for rank in range(size)]
        before = [each.clone() for each in inputs]
        wanted = reduced(inputs, op)
        ranks.run_well([Operation(Kind.REDUCE, (each,), (each,), op, root) for each in inputs])
        assert torch.allclose(inputs[root], wanted)
        assert all(equal(inputs[rank], before[rank]) for rank in range(size) if rank != root)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("count", [*COUNTS, *LARGE_COUNTS])
def test_broadcast(ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    size = len(ranks.transports)
    for root in {0, size - 1}:
        tensors = [tensor(rank, count, dtype) for rank in range(size)]
        wanted = tensors[root].clone()
        ranks.run_well([Operation(Kind.BROADCAST, (each,), (each,), root=root) for each in tensors])
        assert all(equal(each, wanted) for each in tensors)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("count", [*COUNTS, 70_001])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(ranks: Ranks, count: int, dtype: torch.dtype, in_place: bool) -> None:
    size = len(ranks.transports)
    wanted = [tensor(rank, count, dtype) for rank in range(size)]
    operations = []
    for rank in range(size):
        outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
        if in_place:
            outputs[rank].copy_(wanted[rank])
        operations.append(Operation(Kind.ALL_GATHER, (outputs[rank] if in_place else wanted[rank],), tuple(outputs)))
    ranks.run_well(operations)
    for operation in operations:
        assert all(equal(a, b) for a, b in zip(operation.outputs, wanted, strict=True))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("count", [*COUNTS, 70_001])
def test_gather_and_scatter(ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    size = len(ranks.transports)
    for root in {0, size - 1}:
        chunks = [tensor(rank, count, dtype) for rank in range(size)]
        outputs = tuple(torch.empty(count, dtype=dtype) for _ in range(size))
        ranks.run_well(
            [
                Operation(Kind.GATHER, (chunks[rank],), outputs if rank == root else (), root=root)
                for rank in range(size)
            ]
        )
        assert all(equal(a, b) for a, b in zip(outputs, chunks, strict=True))
        arrived = [torch.empty(count, dtype=dtype) for _ in range(size)]
        ranks.run_well(
            [
                Operation(Kind.SCATTER, tuple(chunks) if rank == root else (), (arrived[rank],), root=root)
                for rank in range(size)
            ]
        )
        assert all(equal(a, b) for a, b in zip(arrived, chunks, strict=True))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=lambda op: op.name)
@pytest.mark.parametrize("lengths", ["even", "uneven", "empty", "large"])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(ranks: Ranks, op: ReduceOp, lengths: str, in_place: bool) -> None:
    size = len(ranks.transports)
    counts = {
        "even": [5] * size,
        "uneven": [(3 * rank) % 4 for rank in range(size)],
        "empty": [0] * size,
        "large": [100_000 + rank for rank in range(size)],
    }[lengths]
    inputs = [
        [tensor(rank, count, torch.float32, salt=chunk) for chunk, count in enumerate(counts)] for rank in range(size)
    ]
    before = [[chunk.clone() for chunk in chunks] for chunks in inputs]
    outputs = [inputs[rank][rank] if in_place else torch.empty(counts[rank]) for rank in range(size)]
    ranks.run_well([Operation(Kind.REDUCE_SCATTER, tuple(inputs[rank]), (outputs[rank],), op) for rank in range(size)])
    for rank in range(size):
        assert torch.allclose(outputs[rank], reduced([before[other][rank] for other in range(size)], op))
        for chunk in range(size):
            assert equal(inputs[rank][chunk], before[rank][chunk]) or (in_place and chunk == rank)


@pytest.mark.parametrize("scale", [1, 30_000])
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_to_all_with_chunks_of_any_length(ranks: Ranks, scale: int, dtype: torch.dtype) -> None:
    size = len(ranks.transports)

    def chunk(source: int, destination: int) -> torch.Tensor:
        return tensor(source, scale * ((source + 2 * destination) % 4), dtype, salt=destination)

    operations = [
        Operation(
            Kind.ALL_TO_ALL,
            tuple(chunk(rank, peer) for peer in range(size)),
            tuple(torch.empty_like(chunk(peer, rank)) for peer in range(size)),
        )
        for rank in range(size)
    ]
    ranks.run_well(operations)
    for rank, operation in enumerate(operations):
        assert all(equal(arrived, chunk(peer, rank)) for peer, arrived in enumerate(operation.outputs))


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER], ids=lambda kind: kind.title)
def test_premultiplied_sums(ranks: Ranks, kind: Kind) -> None:
    size = len(ranks.transports)
    inputs = [[tensor(rank, 6, torch.float64, salt=chunk) for chunk in range(size)] for rank in range(size)]
    used = inputs if kind is Kind.REDUCE_SCATTER else [[chunks[0]] for chunks in inputs]
    wanted = [
        sum((used[rank][index] * (rank + 1) for rank in range(size)), torch.zeros(6)) for index in range(len(used[0]))
    ]
    before = [[chunk.clone() for chunk in chunks] for chunks in used]
    outputs = [
        torch.empty(6, dtype=torch.float64) if kind is Kind.REDUCE_SCATTER else used[rank][0] for rank in range(size)
    ]
    ranks.run_well(
        [
            Operation(
                kind,
                tuple(used[rank]),
                (outputs[rank],),
                ReduceOp.PREMUL_SUM,
                0 if kind is Kind.REDUCE else -1,
                rank + 1.0,
            )
            for rank in range(size)
        ]
    )
    for rank in range(size):
        if kind is Kind.REDUCE and rank:
            assert equal(outputs[rank], before[rank][0])
        else:
            assert equal(outputs[rank], wanted[rank if kind is Kind.REDUCE_SCATTER else 0])


def test_many_operations_in_a_row(ranks: Ranks) -> None:
    size = len(ranks.transports)
    for number in range(50):
        ranks.run_well([Operation(Kind.BARRIER)] * size)
        tensors = [torch.full((), rank + number) for rank in range(size)]
        ranks.run_well([Operation(Kind.ALL_REDUCE, (each,), (each,), ReduceOp.SUM) for each in tensors])
        assert {int(each) for each in tensors} == {sum(rank + number for rank in range(size))}


def test_eight_ranks() -> None:
    size = 8
    with socket_ranks(size, unix=False) as group:
        for count in (1, 5000, 100_001):
            inputs = [tensor(rank, count, torch.int64) for rank in range(size)]
            wanted = reduced(inputs, ReduceOp.SUM)
            reductions = [each.clone() for each in inputs]
            group.run_well([Operation(Kind.ALL_REDUCE, (each,), (each,), ReduceOp.SUM) for each in reductions])
            assert all(equal(each, wanted) for each in reductions)
            copies = [each.clone() for each in inputs]
            group.run_well([Operation(Kind.BROADCAST, (each,), (each,), root=5) for each in copies])
            assert all(equal(each, inputs[5]) for each in copies)
            outputs = [tuple(torch.empty(count, dtype=torch.int64) for _ in range(size)) for _ in range(size)]
            group.run_well([Operation(Kind.ALL_GATHER, (inputs[rank],), outputs[rank]) for rank in range(size)])
            assert all(equal(a, b) for mine in outputs for a, b in zip(mine, inputs, strict=True))


@pytest.mark.parametrize("count", [600_000, 1_500_001])
def test_large_messages_in_stripes_on_several_sockets(count: int) -> None:
    with socket_ranks(2, unix=False, sockets_per_pair=3) as group:
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            inputs = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
            wanted = reduced(inputs, op)
            group.run_well([Operation(Kind.ALL_REDUCE, (each,), (each,), op) for each in inputs])
            assert all(equal(each, wanted) for each in inputs)
            group.run_well([Operation(Kind.BARRIER)] * 2)
            tensors = [tensor(rank, count, torch.float32) for rank in range(2)]
            copy = tensors[0].clone()
            group.run_well([Operation(Kind.BROADCAST, (each,), (each,), root=0) for each in tensors])
            assert all(equal(each, copy) for each in tensors)
        used = len(connections_of(group.transports[0]))
        assert used == (3 if count > 1_000_000 else 2)


@pytest.mark.parametrize("unix", [True, None])
def test_over_unix_sockets(unix: bool | None) -> None:
    with socket_ranks(3, unix) as group:
        for count in (1, 300_000):
            tensors = [torch.ones(count) for _ in range(3)]
            group.run_well([Operation(Kind.ALL_REDUCE, (each,), (each,), ReduceOp.SUM) for each in tensors])
            assert all(torch.equal(each, torch.full((count,), 3.0)) for each in tensors)
