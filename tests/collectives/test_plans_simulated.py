"""Every plan, run on all ranks in memory with plain lists: right results, no deadlock, no more messages than needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log2

import pytest

from rpcdist.collectives._operations.operation import Kind
from rpcdist.collectives._transports.sockets.plans import (
    Plan,
    ReceiveStep,
    Region,
    Round,
    SendStep,
    barrier,
    chain_broadcast,
    chain_reduce,
    direct_all_gather,
    doubling_all_reduce,
    gather,
    pairwise_all_to_all,
    plan_for,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter,
    split_evenly,
    tree_broadcast,
    tree_reduce,
)

SIZES = range(1, 10)
COUNTS = (0, 1, 5, 16, 33)
Value = frozenset[int]  # which ranks' elements were reduced into it
Buffers = list[list[Value]]


def grid(plans: Sequence[Plan]) -> str:
    """Formats all ranks' plans as a table, one row for each rank: `>` sends, `<` receives, `+` receives and reduces."""
    cells = [[repr(round_) for round_ in plan] for plan in plans]
    num_rounds = max((len(row) for row in cells), default=0)
    rows = [["", *(f"round {number}" for number in range(num_rounds))]]
    rows += [[f"rank {rank}", *row] for rank, row in enumerate(cells)]
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(num_rounds + 1)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def values(rank: int, count: int) -> list[Value]:
    return [frozenset([rank])] * count


def read(buffers: Buffers, region: Region) -> list[Value]:
    assert 0 <= region.start <= region.stop
    if region.count:
        assert region.stop <= len(buffers[region.buffer]), region
    return buffers[region.buffer][region.start : region.stop] if region.count else []


def simulate(plans: Sequence[Plan], buffers: Sequence[Buffers]) -> None:
    """Runs all ranks with rendezvous semantics: a round ends for a rank once each of its messages met its other end."""
    size = len(plans)
    heard = [{rank} for rank in range(size)]
    for number in range(max(map(len, plans), default=0)):
        rounds = [plan[number] if number < len(plan) else Round() for plan in plans]
        messages = {}
        for rank, round_ in enumerate(rounds):
            check_round(round_, buffers[rank])
            for send in round_.sends:
                assert (rank, send.peer) not in messages, "two messages to one peer in one round"
                messages[rank, send.peer] = (read(buffers[rank], send.region), frozenset(heard[rank]))
        for rank, round_ in enumerate(rounds):
            for receive in round_.receives:
                data, known = messages.pop((receive.peer, rank))  # KeyError: nobody sends what this rank waits for
                heard[rank] |= known
                take(receive, data, buffers[rank])
            if round_.final is not None:
                assert all(value == frozenset(range(size)) for value in read(buffers[rank], round_.final))
        assert not messages, f"nobody receives {list(messages)}"
    assert all(known == set(range(size)) for known in heard), "a rank is done, and has not heard of all others"


def take(receive: ReceiveStep, data: list[Value], buffers: Buffers) -> None:
    region = receive.region
    assert len(data) == region.count
    if receive.operand is not None:
        operand = read(buffers, receive.operand)
        assert not any(a & b for a, b in zip(data, operand, strict=True)), "an element is reduced twice"
        data = [a | b for a, b in zip(data, operand, strict=True)]
    if region.count:
        buffers[region.buffer][region.start : region.stop] = data


def check_round(round_: Round, buffers: Buffers) -> None:
    """Nothing is written that another step of the round reads or writes."""
    assert len({step.peer for step in round_.receives}) == len(round_.receives)
    written: set[tuple[int, int]] = set()
    for receive in round_.receives:
        cells = cells_of(receive.region, buffers)
        assert not cells & written
        written |= cells
        if not receive.deferred:
            assert not any(cells & cells_of(send.region, buffers) for send in round_.sends)


def cells_of(region: Region, buffers: Buffers) -> set[tuple[int, int]]:
    if not region.count:
        return set()
    return {(id(buffers[region.buffer]), index) for index in range(region.start, region.stop)}


def num_messages(plan: Plan) -> int:
    return sum(len(round_.sends) for round_ in plan)


def num_elements(plan: Plan) -> int:
    return sum(step.region.count for round_ in plan for step in round_.sends)


def everything(size: int, count: int) -> list[Value]:
    return [frozenset(range(size))] * count


def uneven(size: int) -> list[int]:
    return [(rank * 7) % 5 for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("multiple", [1, 16])
def test_ring_all_reduce(size: int, multiple: int) -> None:
    for count in COUNTS:
        plans = [ring_all_reduce(rank, size, count, multiple) for rank in range(size)]
        buffers = [[values(rank, count)] for rank in range(size)]
        simulate(plans, buffers)
        assert buffers == [[everything(size, count)]] * size
        assert {num_messages(plan) for plan in plans} == {2 * (size - 1)}
        assert sum(map(num_elements, plans)) == 2 * (size - 1) * count


@pytest.mark.parametrize("size", SIZES)
def test_recursive_doubling(size: int) -> None:
    for count in COUNTS:
        plans = [doubling_all_reduce(rank, size, count) for rank in range(size)]
        buffers = [[values(rank, count)] for rank in range(size)]
        simulate(plans, buffers)
        assert buffers == [[everything(size, count)]] * size
        power_of_two = size & (size - 1) == 0
        assert len(plans[0]) == (ceil(log2(size)) if power_of_two else int(log2(size)) + 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("all_gather", [ring_all_gather, direct_all_gather])
def test_all_gather(size: int, all_gather: Callable[[int, int, Sequence[int]], Plan]) -> None:
    for counts in ([3] * size, uneven(size)):
        plans = [all_gather(rank, size, counts) for rank in range(size)]
        wanted = [values(rank, count) for rank, count in enumerate(counts)]
        buffers = [
            [wanted[i] if i == rank else [frozenset[int]()] * counts[i] for i in range(size)] for rank in range(size)
        ]
        simulate(plans, buffers)
        assert buffers == [wanted] * size
        assert sum(map(num_elements, plans)) == (size - 1) * sum(counts)


@pytest.mark.parametrize("size", range(2, 10))
def test_reduce_scatter(size: int) -> None:
    for counts in ([3] * size, uneven(size)):
        plans = [ring_reduce_scatter(rank, size, counts) for rank in range(size)]
        inputs = [[values(rank, count) for count in counts] for rank in range(size)]
        blank = [frozenset[int]()] * max(counts)
        buffers = [[*map(list, inputs[rank]), blank[: counts[rank]], list(blank), list(blank)] for rank in range(size)]
        simulate(plans, buffers)
        for rank in range(size):
            assert buffers[rank][:size] == inputs[rank], "inputs are only read"
            assert buffers[rank][size] == everything(size, counts[rank])
        assert sum(map(num_elements, plans)) == (size - 1) * sum(counts)


def broadcast_plans(size: int, root: int, count: int, piece: int | None) -> list[Plan]:
    if piece is None:
        return [tree_broadcast(rank, size, root, count) for rank in range(size)]
    return [chain_broadcast(rank, size, root, count, piece) for rank in range(size)]


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("piece", [None, 1, 4, 100])
def test_broadcast(size: int, piece: int | None) -> None:
    for root in range(size):
        for count in COUNTS:
            plans = broadcast_plans(size, root, count, piece)
            buffers = [[values(rank, count)] for rank in range(size)]
            simulate(plans, buffers)
            assert buffers == [[values(root, count)]] * size
            assert sum(map(num_elements, plans)) == (size - 1) * count


def reduce_plans(size: int, root: int, count: int, piece: int | None) -> list[Plan]:
    if piece is None:
        return [tree_reduce(rank, size, root, count) for rank in range(size)]
    return [chain_reduce(rank, size, root, count, piece) for rank in range(size)]


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("piece", [None, 1, 4, 100])
def test_reduce(size: int, piece: int | None) -> None:
    for root in range(size):
        for count in COUNTS:
            plans = reduce_plans(size, root, count, piece)
            scratch = count if piece is None else 2 * piece
            buffers = [[values(rank, count), [frozenset[int]()] * scratch] for rank in range(size)]
            buffers[root][1] = buffers[root][0]
            simulate(plans, buffers)
            assert buffers[root][0] == everything(size, count)
            assert all(buffers[rank][0] == values(rank, count) for rank in range(size) if rank != root)
            assert sum(map(num_elements, plans)) == (size - 1) * count


@pytest.mark.parametrize("size", SIZES)
def test_gather_and_scatter(size: int) -> None:
    for root in range(size):
        counts = uneven(size)
        whole = [values(rank, count) for rank, count in enumerate(counts)]
        parts: list[Buffers] = [[[] if i != rank else whole[rank] for i in range(size)] for rank in range(size)]
        blank: Buffers = [[frozenset[int]()] * count for count in counts]
        buffers = [
            parts[rank] if rank != root else [*blank[:root], whole[root], *blank[root + 1 :]] for rank in range(size)
        ]
        simulate([gather(rank, size, root, counts) for rank in range(size)], buffers)
        assert buffers[root] == whole
        buffers = [
            whole if rank == root else [[] if i != rank else list(blank[rank]) for i in range(size)]
            for rank in range(size)
        ]
        simulate([scatter(rank, size, root, counts) for rank in range(size)], buffers)
        assert all(buffers[rank][rank] == whole[rank] for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(size: int) -> None:
    def count(source: int, destination: int) -> int:
        return (source * 3 + destination * 5) % 4

    plans, buffers = [], []
    for rank in range(size):
        sent = [count(rank, peer) for peer in range(size)]
        received = [count(peer, rank) for peer in range(size)]
        plans.append(pairwise_all_to_all(rank, size, sent, received))
        arrivals: Buffers = [[frozenset[int]()] * number for number in received]
        arrivals[rank] = values(rank, sent[rank])
        buffers.append([*(values(rank, number) for number in sent), *arrivals])
    simulate(plans, buffers)
    for rank in range(size):
        assert buffers[rank][size:] == [values(peer, count(peer, rank)) for peer in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_barrier(size: int) -> None:
    plans = [barrier(rank, size) for rank in range(size)]
    simulate(plans, [[[]] for _ in range(size)])
    assert {num_messages(plan) for plan in plans} == {ceil(log2(size))}


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.title)
@pytest.mark.parametrize("size", range(2, 10))
def test_every_plan_begins_with_a_greeting_to_the_next_rank(kind: Kind, size: int) -> None:
    for count in (0, 1 << 18):
        counts = (count,) if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST) else (count,) * size
        for root in (0, size - 1):
            for rank in range(size):
                first = plan_for(kind, rank, size, root, counts, 4, counts)[0]
                assert (rank + 1) % size in {step.peer for step in first.sends}
                assert (rank - 1) % size in {step.peer for step in first.receives}


@pytest.mark.parametrize(
    ("kind", "size", "count", "plan"),
    [
        (Kind.ALL_REDUCE, 2, 1, doubling_all_reduce(0, 2, 1)),
        (Kind.ALL_REDUCE, 2, 32 << 10, doubling_all_reduce(0, 2, 32 << 10)),
        (Kind.ALL_REDUCE, 4, 32 << 10, ring_all_reduce(0, 4, 32 << 10, 16)),
        (Kind.BROADCAST, 2, 1 << 18, tree_broadcast(0, 2, 0, 1 << 18)),
        (Kind.BROADCAST, 4, 1 << 18, chain_broadcast(0, 4, 0, 1 << 18, 128 << 10)),
        (Kind.REDUCE, 4, 1, tree_reduce(0, 4, 0, 1)),
        (Kind.REDUCE, 4, 1 << 18, chain_reduce(0, 4, 0, 1 << 18, 128 << 10)),
        (Kind.ALL_GATHER, 4, 1, direct_all_gather(0, 4, (1,) * 4)),
        (Kind.ALL_GATHER, 4, 1 << 18, ring_all_gather(0, 4, (1 << 18,) * 4)),
        (Kind.ALL_GATHER, 64, 1, ring_all_gather(0, 64, (1,) * 64)),
        (Kind.GATHER, 4, 1, gather(0, 4, 0, (1,) * 4)),
        (Kind.SCATTER, 4, 1, scatter(0, 4, 0, (1,) * 4)),
        (Kind.BARRIER, 4, 1, barrier(0, 4)),
    ],
)
def test_choice(kind: Kind, size: int, count: int, plan: Plan) -> None:
    one_tensor = kind in (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE)
    assert plan_for(kind, 0, size, 0, (count,) * (1 if one_tensor else size), 4) == plan


@pytest.mark.parametrize("count", [0, 1, 7, 16, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple", [1, 16])
def test_splitting_covers_everything_once(count: int, parts: int, multiple: int) -> None:
    pieces = split_evenly(count, parts, multiple)
    assert [index for start, stop in pieces for index in range(start, stop)] == list(range(count))
    assert len(pieces) == parts
    assert all(start % multiple == 0 or start == count for start, _ in pieces)
    assert max(stop - start for start, stop in pieces) <= -(-count // parts) + multiple


def test_plans_are_printed_as_a_grid() -> None:
    plans = [ring_all_reduce(rank, 2, 4) for rank in range(2)]
    assert grid(plans).splitlines() == [
        "        round 0              round 1",
        "rank 0  >1 0[2:4] +1 0[0:2]  >1 0[0:2] <1 0[2:4]",
        "rank 1  >0 0[0:2] +0 0[2:4]  >0 0[2:4] <0 0[0:2]",
    ]
    assert repr(Round()) == "." and repr(SendStep(3, Region(0, 2, 2))) == ">3 -"
