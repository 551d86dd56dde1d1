"""The transport of several hosts with several ranks each equals the reference, whatever the hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from inside_groups import Control, Transport, TransportMismatch, TransportPeerLost
from transport_in_memory import MemoryControl, memory_transports, reference, run_ranks

from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._transports.hierarchical import (
    HierarchicalTransport,
    hosts_of,
    index_of_host,
    leaders_of,
)
from rpcdist.collectives._transports.transport_base import SingleRankTransport

LEADERS = [
    pytest.param([0, 0, 2, 2], id="two hosts"),
    pytest.param([0, 1, 0, 1], id="interleaved"),
    pytest.param([0, 0, 0, 3], id="uneven"),
    pytest.param([0, 1, 1, 0, 4], id="three hosts, one alone"),
]


def transports_of(leaders: list[int]) -> list[HierarchicalTransport]:
    hosts = hosts_of(leaders)
    everyone = memory_transports(len(leaders))
    between = dict(zip(leaders_of(hosts), memory_transports(len(hosts)), strict=True))
    local: dict[int, Transport] = {}
    for members in hosts:
        local.update(zip(members, memory_transports(len(members)), strict=True))
    return [
        HierarchicalTransport(rank, hosts, local[rank], between.get(rank), everyone[rank])
        for rank in range(len(leaders))
    ]


def run_all(transports: Sequence[Transport], operations: Sequence[Operation], timeout_s: float = 20.0) -> list[object]:
    """Every rank runs its operation; returns the error of each, or None."""

    def runner(transport: Transport, operation: Operation) -> Callable[[], None]:
        return lambda: transport.run(operation, MemoryControl(operation, timeout_s=timeout_s))

    return list(run_ranks([runner(*pair) for pair in zip(transports, operations, strict=True)]))


def operation_of(kind: Kind, rank: int, size: int, root: int, op: ReduceOp, uneven: bool = False) -> Operation:
    def values(count: int, start: int) -> torch.Tensor:
        return (torch.arange(count) * 7 + start * 5 + rank * 3) % 11 - 4

    if kind is Kind.BARRIER:
        return Operation(kind)
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST):
        buffer = values(5, 1)
        return Operation(kind, (buffer,), (buffer,), op if kind is not Kind.BROADCAST else None, root)
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        outputs = tuple(torch.zeros(3, dtype=torch.int64) for _ in range(size))
        return Operation(kind, (values(3, 2),), outputs if kind is Kind.ALL_GATHER or rank == root else (), root=root)
    if kind is Kind.SCATTER:
        chunks = tuple(values(3, chunk) for chunk in range(size)) if rank == root else ()
        return Operation(kind, chunks, (torch.zeros(3, dtype=torch.int64),), root=root)
    lengths = [2 + (chunk if uneven else 0) for chunk in range(size)]
    inputs = tuple(values(lengths[chunk], chunk) for chunk in range(size))
    if kind is Kind.REDUCE_SCATTER:
        return Operation(kind, inputs, (torch.zeros(lengths[rank], dtype=torch.int64),), op)
    outputs = tuple(torch.zeros(lengths[rank], dtype=torch.int64) for _ in range(size))
    return Operation(kind, inputs, outputs)


@pytest.mark.parametrize("leaders", LEADERS)
def test_every_operation_equals_the_reference(leaders: list[int]) -> None:
    size = len(leaders)
    transports = transports_of(leaders)
    for kind in [Kind(number) for number in range(Kind.ALL_REDUCE, Kind.BARRIER + 1)]:
        for root in range(size):
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
                operations = [operation_of(kind, rank, size, root, op, uneven=root % 2 == 1) for rank in range(size)]
                inputs = [[tensor.clone() for tensor in operation.inputs] for operation in operations]
                assert run_all(transports, operations) == [None] * size, (kind, root, op)
                for rank, operation in enumerate(operations):
                    expected = reference(operation, rank, inputs)
                    for output, wanted in zip(operation.outputs, expected, strict=True):
                        assert torch.equal(output, wanted), (kind, root, op, rank)


def test_empty_tensors_pass() -> None:
    transports = transports_of([0, 0, 2, 2])
    for kind in (Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
        operations = [
            Operation(
                kind,
                tuple(torch.empty(0) for _ in range(4 if kind in (Kind.SCATTER, Kind.REDUCE_SCATTER) else 1))
                if kind is not Kind.SCATTER or rank == 0
                else (),
                tuple(torch.empty(0) for _ in range(4 if kind in (Kind.ALL_GATHER, Kind.GATHER) else 1))
                if kind is not Kind.GATHER or rank == 0
                else (),
                ReduceOp.SUM if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) else None,
                root=0,
            )
            for rank in range(4)
        ]
        assert run_all(transports, operations) == [None] * 4, kind


def test_hosts_are_ordered_by_their_first_rank() -> None:
    hosts = hosts_of([0, 1, 0, 1, 4])
    assert hosts == ((0, 2), (1, 3), (4,))
    assert leaders_of(hosts) == (0, 1, 4)
    assert [index_of_host(hosts, rank) for rank in range(5)] == [0, 1, 0, 1, 2]


class _Broken(SingleRankTransport):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, operation: Operation, control: Control) -> None:
        raise self._error


def test_what_a_part_reports_is_told_by_the_ranks_of_the_group() -> None:
    hosts = hosts_of([0, 1, 0, 1])
    buffer = torch.zeros(2)
    operation = Operation(Kind.ALL_REDUCE, (buffer,), (buffer,), ReduceOp.SUM)
    transport = HierarchicalTransport(
        3, hosts, _Broken(TransportMismatch({0: "a", 1: "b"})), None, SingleRankTransport()
    )
    with pytest.raises(TransportMismatch) as mismatch:
        transport.run(operation, MemoryControl(operation))
    assert mismatch.value.views == {1: "a", 3: "b"}
    transport = HierarchicalTransport(2, hosts, _Broken(TransportPeerLost(0, "gone")), None, SingleRankTransport())
    with pytest.raises(TransportPeerLost) as lost:
        transport.run(operation, MemoryControl(operation))
    assert lost.value.rank == 0
    assert "gone" in lost.value.reason


def test_a_mismatch_shows_between_hosts_as_well() -> None:
    transports = transports_of([0, 0, 2, 2])

    def operation(rank: int) -> Operation:
        buffer = torch.zeros(4 if rank < 2 else 8)
        return Operation(Kind.ALL_REDUCE, (buffer,), (buffer,), ReduceOp.SUM)

    results = run_all(transports, [operation(rank) for rank in range(4)], timeout_s=1.0)
    assert isinstance(results[0], TransportMismatch)
    assert isinstance(results[2], TransportMismatch)
    assert set(results[0].views) == {0, 2}
