"""`all_reduce` of sparse tensors, and messages in the flight recorder; ranks are threads, also of the `tcp` backend."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from collectives_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from inside_groups import current_world

import rpcdist.collectives as c
from rpcdist.collectives import ReduceOp
from rpcdist.collectives._group.flight_records import FlightRecorder
from rpcdist.errors import CollectiveMismatch, ConfigError, RankLost

BACKENDS = ["tcp", "local"]  # operations with parts, and without
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)


def sparse(indices: list[list[int]], values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    sparse_dim = len(shape) - values.dim() + 1
    places = torch.tensor(indices, dtype=torch.int64).view(sparse_dim, -1)
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True)


def drawn(
    draw: torch.Generator, shape: tuple[int, ...], sparse_dim: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    rows = [torch.randint(0, length, (count,), generator=draw).tolist() for length in shape[:sparse_dim]]
    values = torch.randint(0, 5, (count, *shape[sparse_dim:]), generator=draw).to(dtype)
    return sparse(rows, values, shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_sum_equals_that_of_dense_tensors(backend: str, size: int) -> None:
    def on_rank(rank: int) -> None:
        for dtype in DTYPES:
            for shape, sparse_dim in (((7, 3), 1), ((4, 5), 2), ((6,), 1), ((3, 2, 2), 2)):
                tensors = [
                    drawn(torch.Generator().manual_seed(each), shape, sparse_dim, (each * 4) % 7, dtype)
                    for each in range(size)
                ]
                expected = torch.stack([tensor.to_dense() for tensor in tensors]).sum(0).to(dtype)
                mine = tensors[rank]
                assert c.all_reduce(mine) is None
                assert mine.is_coalesced() and mine.dtype is dtype and mine.sparse_dim() == sparse_dim
                assert torch.equal(mine.to_dense(), expected)

    run_ranks(size, on_rank, backend=backend)


@settings(max_examples=15)
@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.sampled_from([((5,), 1), ((3, 4), 2), ((3, 0), 1), ((2, 3, 4), 1)]),
    st.booleans(),
)
def test_any_counts(size: int, counts: list[int], form: tuple[tuple[int, ...], int], async_op: bool) -> None:
    shape, sparse_dim = form

    def on_rank(rank: int) -> None:
        seeds = [torch.Generator().manual_seed(each) for each in range(size)]
        tensors = [drawn(seeds[each], shape, sparse_dim, counts[each], torch.float64) for each in range(size)]
        expected = torch.stack([tensor.to_dense() for tensor in tensors]).sum(0)
        work = c.all_reduce(tensors[rank], async_op=async_op)
        assert (work is not None) == async_op
        if work is not None:
            assert work.result()[0] is tensors[rank]
        assert torch.equal(tensors[rank].to_dense(), expected)

    run_ranks(size, on_rank)


@pytest.mark.parametrize("backend", BACKENDS)
def test_between_others_in_the_order_of_the_calls(backend: str) -> None:
    def on_rank(rank: int) -> None:
        dense, entries = torch.ones(4), sparse([[rank, 2]], torch.ones(2, 2), (4, 2))
        works = [c.all_reduce(dense, async_op=True), c.all_reduce(entries, async_op=True)]
        works.append(c.all_reduce(dense, async_op=True))
        for work in works:
            assert work is not None and work.wait(20)
        assert dense.tolist() == [4] * 4 and entries.to_dense()[:, 0].tolist() == [1, 1, 2, 0]
        assert [each.tolist() for each in entries.indices()] == [[0, 1, 2]]

    run_ranks(2, on_rank, backend=backend)


def test_a_gradient_of_an_embedding_and_the_lower_case_method() -> None:
    def on_rank(rank: int) -> None:
        layer = torch.nn.Embedding(10, 3, sparse=True)
        with torch.no_grad():
            layer.weight.fill_(1)
        layer(torch.tensor([rank, 5, 5])).sum().backward()
        gradient = layer.weight.grad
        group = c.group.WORLD
        assert gradient is not None and gradient.is_sparse and group is not None
        group.allreduce([gradient]).wait()
        assert gradient.to_dense()[:, 0].tolist() == [1, 1, 0, 0, 0, 4, 0, 0, 0, 0]

    run_ranks(2, on_rank, backend="tcp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (lambda: sparse([[0]], torch.ones(1, 2), (5, 2)), r"shape \(4, 2\).*shape \(5, 2\)"),
        (lambda: sparse([[0]], torch.ones(1, 2).double(), (4, 2)), "float32.*float64"),
        (lambda: sparse([[0], [1]], torch.ones(1), (4, 2)), "1 sparse dimensions.*2 sparse dimensions"),
        (lambda: sparse([[0]], torch.ones(1, 2, 1), (4, 2, 1)), "5 elements of int64.*6 elements of int64"),
        (lambda: torch.ones(4, 2), "all_gather #.*all_reduce #"),
    ],
)
def test_a_mismatch_names_both_views(backend: str, odd: Callable[[], torch.Tensor], expected: str) -> None:
    def on_rank(rank: int) -> None:
        tensor = odd() if rank else sparse([[0]], torch.ones(1, 2), (4, 2))
        with pytest.raises(CollectiveMismatch, match=expected):
            c.all_reduce(tensor)

    run_ranks(2, on_rank, backend=backend)


def test_what_is_not_supported_is_refused_before_anything_is_sent() -> None:
    def on_rank(rank: int) -> None:
        entries = sparse([[0]], torch.ones(1, 2), (4, 2))
        with pytest.raises(ConfigError, match=r"supports only ReduceOp\.SUM"):
            c.all_reduce(entries, ReduceOp.AVG)
        with pytest.raises(ConfigError, match="sparse_coo"):
            c.broadcast(entries, 0)
        c.barrier()

    run_ranks(2, on_rank)


# ---------------------------------------------------------------- the flight recorder


def test_messages_are_recorded_with_numbers_of_their_own() -> None:
    def on_rank(rank: int) -> FlightRecorder:
        c.barrier()
        if rank == 0:
            c.send(torch.ones(3, dtype=torch.int16), 1, tag=7)
            c.send(torch.ones(2), 1)
        else:
            tensor = torch.zeros(2)
            work = c.irecv(tensor)
            c.recv(torch.zeros(3, dtype=torch.int16), 0, tag=7)
            assert work is not None and work.wait(20)
            with pytest.raises(RankLost, match="rank 0: it left the group"):
                c.recv(torch.zeros(1), 0, tag=9)
        return current_world().process.recorder

    recorders = run_ranks(2, on_rank, backend="tcp")
    entries = [entry for recorder in recorders for entry in json.loads(recorder.dump(3))["entries"]]
    shown = sorted(
        (entry["operation"], entry["sequence"], entry["dtype"], entry["detail"], entry["state"])
        for entry in entries
        if entry["family"] == "point"
    )
    assert shown == [
        ("recv", 1, "float32", "from any rank, tag 0", "done"),
        ("recv", 2, "int16", "from rank 0, tag 7", "done"),
        ("recv", 3, "float32", "from rank 0, tag 9", "failed"),
        ("send", 1, "int16", "to rank 1, tag 7", "done"),
        ("send", 2, "float32", "to rank 1, tag 0", "done"),
    ]
    assert [entry["input_sizes"] for entry in entries if entry["operation"] == "send"] == [[3], [2]]
    assert all(entry["started_ns"] and entry["ended_ns"] for entry in entries)
    assert {entry["sequence"] for entry in entries if entry["family"] == "collective"} == {1}
