"""Collective operations over shared memory, among real processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from inside_groups import TransportTimeout
from shared_cases import Case
from shm_group import ShmGroup
from transport_in_memory import MemoryControl

from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import unsupported
from rpcdist.collectives._transports.shm.futex import unsupported_here
from rpcdist.collectives._transports.shm.routes import BUFFER_BYTES, LINE, Layout
from rpcdist.collectives._transports.shm.shm_transport import ShmTransport
from rpcdist.deadline import Deadline
from rpcdist.testing import LIMIT_S, RankPool
from rpcdist.transport.shared_memory import Segment

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(unsupported_here() is not None, reason=f"no shared memory: {unsupported_here()}"),
]

BUFFER = 4096
"""Of the tests' groups: small, so that short tensors need many steps."""
MOVES = (Kind.BROADCAST, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL)
REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
ROOTED = (Kind.BROADCAST, Kind.GATHER, Kind.SCATTER, Kind.REDUCE)


@pytest.fixture
def group(rank_pool: RankPool) -> ShmGroup:
    return ShmGroup(rank_pool)


def roots(kind: Kind, size: int) -> list[int]:
    return sorted({0, size - 1}) if kind in ROOTED else [-1]


def table(size: int) -> list[Case]:
    """Every kind, dtype, operation and root, with one length each; one kind with all lengths."""
    cases = [Case(Kind.BARRIER, torch.uint8, 0)]
    for kind in (*MOVES, *REDUCTIONS):
        for root in roots(kind, size):
            cases += [Case(kind, dtype, 7, op, root) for dtype in DTYPES for op in operations(kind, dtype)]
            op = ReduceOp.SUM if kind in REDUCTIONS else None
            cases += [Case(kind, torch.float32, count, op, root) for count in lengths(size)]
            cases.append(Case(kind, torch.complex64, 3000, op, root))
    cases += [Case(Kind.ALL_REDUCE, torch.float64, 3000, op) for op in operations(Kind.ALL_REDUCE, torch.float64)]
    cases += [Case(Kind.ALL_REDUCE, torch.uint16, 9000, op) for op in operations(Kind.ALL_REDUCE, torch.uint16)]
    for kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER):
        op = ReduceOp.SUM if kind in REDUCTIONS else None
        cases += [Case(kind, torch.int64, count, op, uneven=True) for count in (0, 1, 500, 2000)]
    for count in (5, 3000):
        cases.append(Case(Kind.ALL_GATHER, torch.int32, count, in_place=True))
        for op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            cases.append(Case(Kind.REDUCE_SCATTER, torch.float32, count, op, in_place=True))
    return cases


def operations(kind: Kind, dtype: torch.dtype) -> list[ReduceOp | None]:
    if kind not in REDUCTIONS:
        return [None]
    return [op for op in ReduceOp if unsupported(op, dtype) is None]


def lengths(size: int) -> list[int]:
    """Of float32: around one buffer, one place of a buffer, one chunk in two phases, and several."""
    whole, place, chunk = BUFFER // 4, BUFFER // size // 4, BUFFER * size // (size + 1) // 4
    return [0, 1, 16, 17, place - 1, place + 1, chunk - 16, chunk + 1, whole - 1, whole, whole + 1, 3 * whole + 5]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_equal_plain_arithmetic(group: ShmGroup, size: int) -> None:
    group.open(size, BUFFER)
    assert group.call(size, "cases", table(size)) == [[]] * size


def test_eight_ranks(group: ShmGroup) -> None:
    cases = [Case(Kind.BARRIER, torch.uint8, 0)]
    for kind in (*MOVES, *REDUCTIONS):
        op = ReduceOp.AVG if kind in REDUCTIONS else None
        cases += [Case(kind, torch.float32, count, op, root) for count in (0, 3, 5000) for root in roots(kind, 8)]
    group.open(8, BUFFER)
    assert group.call(8, "cases", cases) == [[]] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_averages_of_two_have_equal_bits(group: ShmGroup, dtype: torch.dtype) -> None:
    """Those of the sum divided by 2; but large numbers do not overflow where halves are published."""
    least = torch.finfo(dtype).smallest_normal
    rows = [[0.1, -3.7, 1e-3, 4 * least, float("inf"), float("nan")], [7.3, 3.7, 1e3, -2 * least, 1.0, 2.0]]
    group.open(2, BUFFER)
    first, second = (torch.tensor(row, dtype=dtype) for row in rows)
    wanted = ((first + second) / 2).view(torch.uint8).numpy().tobytes()
    assert group.call(2, "average", rows, dtype) == [wanted, wanted]
    subnormal = [[3 * least / 8], [least / 8]]
    one, other = group.call(2, "average", subnormal, dtype)
    assert one == other
    if dtype is not torch.float16:
        largest = torch.finfo(dtype).max
        expected = torch.tensor([largest], dtype=dtype).view(torch.uint8).numpy().tobytes()
        assert group.call(2, "average", [[largest], [largest]], dtype) == [expected, expected]


@pytest.mark.parametrize("size", [2, 3])
def test_buffers_of_the_usual_size(group: ShmGroup, size: int) -> None:
    counts = (20_000, 131_072, 700_001)
    group.open(size, BUFFER_BYTES)
    cases = [Case(Kind.ALL_REDUCE, torch.float32, count, ReduceOp.SUM) for count in counts]
    cases += [Case(kind, torch.float32, 300_001) for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL)]
    assert group.call(size, "cases", cases) == [[]] * size


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER])
@pytest.mark.parametrize("count", [9, 2500])
def test_modes_of_tensors(group: ShmGroup, kind: Kind, count: int) -> None:
    """Tensors that need gradients, inference tensors, tensors of several dimensions."""
    group.open(3, BUFFER)
    case = Case(kind, torch.float32, count, ReduceOp.SUM if kind in REDUCTIONS else None)
    assert group.call(3, "modes", case) == [[]] * 3


@pytest.mark.parametrize("parts", [[0], [1, 2], [1023, 1, 1500]], ids=repr)
def test_several_tensors_are_reduced_as_one(group: ShmGroup, parts: list[int]) -> None:
    cases = [Case(Kind.ALL_REDUCE, dtype, 3001, op) for dtype in DTYPES for op in operations(Kind.ALL_REDUCE, dtype)]
    group.open(2, BUFFER)
    assert group.call(2, "together", cases, parts) == [[]] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_in_a_hurry_do_not_overwrite_what_slow_ones_read(group: ShmGroup, size: int) -> None:
    group.open(size, BUFFER)
    digests = group.call(size, "hammer", 600, 20 + size)
    assert len(set(digests)) == 1


# ------------------------------------------------------------ failures

SUM = Case(Kind.ALL_REDUCE, torch.float32, 8, ReduceOp.SUM)


@pytest.mark.parametrize(
    ("other", "sequence", "views"),
    [
        (
            Case(Kind.ALL_REDUCE, torch.float32, 9, ReduceOp.SUM),
            5,
            ("all_reduce #5 (SUM, 8 elements of float32)", "all_reduce #5 (SUM, 9 elements of float32)"),
        ),
        (
            Case(Kind.BROADCAST, torch.float32, 8, root=0),
            5,
            ("all_reduce #5 (SUM, 8 elements of float32)", "broadcast #5 (root 0, 8 elements of float32)"),
        ),
        (SUM, 6, ("all_reduce #5 (SUM, 8 elements of float32)", "all_reduce #6 (SUM, 8 elements of float32)")),
    ],
    ids=["size", "kind", "order"],
)
def test_a_mismatch_is_found_on_all_ranks(group: ShmGroup, other: Case, sequence: int, views: tuple[str, str]) -> None:
    group.open(3, BUFFER)
    for rank, case in enumerate((SUM, other, SUM)):
        group.start(rank, "outcome", case, sequence if rank == 1 else 5, 20.0, 0, 0.0)
    for rank in range(3):
        name, found = group.result(rank)
        assert name == "mismatch" and set(found.values()) == set(views)  # the third rank may have come too late
        assert all(view == views[rank % 2] for rank, view in found.items())


def test_a_mismatch_is_found_without_the_ranks_that_are_missing(group: ShmGroup) -> None:
    group.open(3, BUFFER)
    other = Case(Kind.BROADCAST, torch.float32, 8, root=0)
    group.start(0, "outcome", SUM, 1, 20.0, 0, 0.0)
    group.start(1, "outcome", other, 1, 20.0, 0, 0.0)
    for rank in range(2):
        name, views = group.result(rank)
        assert (name, sorted(views)) == ("mismatch", [0, 1])
    group.start(2, "outcome", SUM, 1, 20.0, 0, 0.0)  # comes late, and learns of it as well
    assert group.result(2)[0] == "mismatch"


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Kind.ALL_TO_ALL, "bytes to rank"), (Kind.REDUCE_SCATTER, "chunks of")],
)
def test_chunks_that_do_not_fit_are_found_on_all_ranks(group: ShmGroup, kind: Kind, words: str) -> None:
    """The fingerprints are equal: only the tables differ."""
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    group.open(2, BUFFER)
    for rank, count in enumerate((4, 5)):
        case = Case(kind, torch.float32, count, op, uneven=kind is Kind.ALL_TO_ALL)
        group.start(rank, "outcome", case, 1, 20.0, 0, 0.0)
    results = [group.result(rank) for rank in range(2)]
    assert results[0] == results[1] and results[0][0] == "mismatch"
    if kind is Kind.ALL_TO_ALL:
        assert any(words in view for view in results[0][1].values())


def test_a_timeout_names_the_ranks_that_did_not_come(group: ShmGroup) -> None:
    group.open(4, BUFFER)
    for rank in (0, 2):
        group.start(rank, "outcome", SUM, 1, 0.3, 0, 0.0)
    assert [group.result(rank) for rank in (0, 2)] == [("timeout", [1, 3])] * 2


def test_a_late_rank_is_waited_for(group: ShmGroup) -> None:
    group.open(2, BUFFER)
    group.start(0, "outcome", SUM, 1, 20.0, 0, 0.0)
    group.start(1, "outcome", SUM, 1, 20.0, 0, 0.3)
    assert [group.result(rank) for rank in range(2)] == [("done", "")] * 2


def test_a_killed_peer_ends_the_wait_through_the_control(group: ShmGroup) -> None:
    group.open(3, BUFFER)
    victim = group.pid(1)
    group.start(0, "outcome", SUM, 1, 20.0, victim, 0.0)
    group.start(2, "outcome", SUM, 1, 20.0, victim, 0.0)
    group.kill(1)
    for rank in (0, 2):
        name, waited_s = group.result(rank)
        assert name == "stopped" and waited_s < 5.0


def test_a_closed_transport_gives_its_memory_back(group: ShmGroup) -> None:
    group.open(2, BUFFER)
    assert group.call(2, "cases", [SUM, Case(Kind.REDUCE_SCATTER, torch.float32, 8, ReduceOp.SUM)]) == [[]] * 2
    assert group.call(2, "mappings") == [1, 1]
    group.call(2, "leave")
    assert group.call(2, "mappings") == [0, 0]


def go_on_without_end(memory: memoryview, layout: Layout, control: MemoryControl, is_over: threading.Event) -> int:
    """Rank 1 of 2: says that it sends itself a petabyte, and is never late. Returns the number of steps."""
    words, step = memory.cast("Q"), 1
    while not is_over.is_set():
        own, other = (layout.header(step & 1, rank) for rank in (1, 0))
        if words[other // 8] != step:
            time.sleep(0)
            continue
        if step == 1:
            memory[own + 8 : own + LINE] = memory[other + 8 : other + LINE]  # the fingerprint
            table = layout.table(1, 1) // 8
            for index, size_bytes in enumerate((8, 1 << 50, 8, 1 << 50)):
                words[table + index] = size_bytes
        words[own // 8] = step
        words[layout.header(1 - step & 1, 1) // 8] = step + 1  # this early, the other one never waits
        step += 1
        if step == 5:
            control.deadline = Deadline(0.0)
    words.release()
    return step


def test_a_rank_that_lies_about_sizes_keeps_nobody_beyond_the_timeout() -> None:
    """The other one made steps for as long as they came, and noticed neither its timeout nor an abort."""
    layout, is_over = Layout(2, BUFFER), threading.Event()
    with Segment.create(layout.total_bytes) as segment, ThreadPoolExecutor(2) as threads:
        with segment.map() as mapped, memoryview(mapped) as memory:
            transport = ShmTransport(0, 2, segment, layout)
            inputs, outputs = torch.ones(2, 2).unbind(), torch.zeros(2, 2).unbind()
            operation = Operation(Kind.ALL_TO_ALL, inputs, outputs)
            control = MemoryControl(operation)
            lying = threads.submit(go_on_without_end, memory, layout, control, is_over)
            try:
                with pytest.raises(TransportTimeout) as caught:
                    threads.submit(transport.run, operation, control).result(LIMIT_S)
                assert caught.value.waiting_for == {1}
            finally:
                is_over.set()
            assert 4 < lying.result(LIMIT_S) < 20
            transport.close()
