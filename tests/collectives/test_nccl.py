"""The `nccl` backend on a stand-in for NCCL, among threads: everything but the GPU itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from backend_contract import check_moves, check_reductions, values
from inside_groups import GroupContext
from nccl_stand_in import LIMIT_S, StandInError, StandInRuntime, StandInWorld

from rpcdist.collectives import HashStore, PrefixStore
from rpcdist.collectives._group.state import GroupFailure, Reporter
from rpcdist.collectives._nccl.communicator_calls import native_form
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives.nccl import NcclBackend, NcclOptions
from rpcdist.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    RendezvousError,
)

T = TypeVar("T")

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch says so of complex32


class Links(Reporter):
    """Tells the other ranks of this process what one of them reports."""

    def __init__(self) -> None:
        self.backends: list[NcclBackend] = []

    def report(self, failure: GroupFailure) -> None:
        for backend in self.backends:
            backend._watchdog.fail(failure)


class Rank:
    """The arguments of a test's function on each rank."""

    def __init__(self, backend: NcclBackend, runtime: StandInRuntime, links: Links) -> None:
        self.backend = backend
        self.runtime = runtime
        self.links = links
        self.me = backend.context.rank
        self.size = backend.context.size

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation:
        return Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), op)


def on_ranks(
    size: int,
    function: Callable[[Rank], T],
    *,
    options: NcclOptions | None = None,
    version: int = 22907,
    timeout_s: float = LIMIT_S,
) -> list[T]:
    """Runs a function on the threads of `size` ranks, each with its backend, and returns what they returned."""
    world, store, links = StandInWorld(), HashStore(), Links()
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    together = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            runtime = StandInRuntime(world, version)
            context = GroupContext("g", rank, tuple(range(10, 10 + size)), store.clone(), timeout_s, options)
            backend = NcclBackend(context, runtime=runtime, reporter=links)
            links.backends.append(backend)
            together.wait(LIMIT_S)
            try:
                results[rank] = function(Rank(backend, runtime, links))
                together.wait(LIMIT_S)
            finally:
                backend.close(LIMIT_S)
                backend.close(LIMIT_S)
            (communicator,) = runtime.communicators
            assert communicator.aborted != communicator.destroyed
        except BaseException as exc:
            together.abort()
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


@pytest.fixture(autouse=True)
def flight_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RPCDIST_FLIGHT_RECORDER_DIR", str(tmp_path))


# ------------------------------------------------------------ results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions_equal_the_plain_reference(size: int) -> None:
    on_ranks(size, lambda rank: check_reductions(rank.backend, counts=(0, 5)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_moves_equal_the_plain_reference(size: int) -> None:
    on_ranks(size, lambda rank: check_moves(rank.backend, counts=(0, 1, 9)))


def test_an_old_nccl_averages_by_sum_and_division() -> None:
    def average(rank: Rank) -> None:
        tensor = torch.full((3,), 2.0 * rank.me)
        rank.backend.submit(rank.all_reduce(tensor, ReduceOp.AVG))
        assert tensor.tolist() == [1.0] * 3

    on_ranks(2, average, version=20900)


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (ReduceOp.SUM, torch.float32, (torch.float32, 0)),
        (ReduceOp.AVG, torch.bfloat16, (torch.bfloat16, 4)),
        (ReduceOp.AVG, torch.int32, (torch.int32, 0)),
        (ReduceOp.AVG, torch.complex64, (torch.float32, 4)),
        (ReduceOp.SUM, torch.complex128, (torch.float64, 0)),
        (ReduceOp.SUM, torch.bool, (torch.uint8, 2)),
        (ReduceOp.BAND, torch.bool, (torch.uint8, 3)),
        (ReduceOp.BXOR, torch.bool, (torch.uint8, 0)),
        (ReduceOp.PRODUCT, torch.complex64, None),
        (ReduceOp.BOR, torch.int64, None),
        (ReduceOp.SUM, torch.int16, None),
    ],
)
def test_what_nccl_reduces_itself(op: ReduceOp, dtype: torch.dtype, expected: tuple[torch.dtype, int] | None) -> None:
    form = native_form(op, dtype, 22907)
    assert (None if form is None else (form.dtype, form.op)) == expected


def test_collectives_are_single_calls_where_nccl_has_one() -> None:
    def calls(rank: Rank) -> list[str]:
        backend, tensor, whole = rank.backend, torch.ones(3), torch.ones(6)
        halves = whole.split(3)
        backend.submit(rank.all_reduce(tensor, ReduceOp.AVG))
        backend.submit(Operation(Kind.ALL_GATHER, (tensor,), halves))
        backend.submit(Operation(Kind.REDUCE_SCATTER, halves, (tensor,), ReduceOp.SUM))
        return [call for _, call in rank.runtime.log]

    assert on_ranks(2, calls)[0] == ["allReduce", "allGather", "reduceScatter"]


def test_finish_runs_once_after_the_calls() -> None:
    def run(rank: Rank) -> list[object]:
        seen: list[object] = []
        tensor = torch.ones(2)
        work = rank.backend.submit(
            rank.all_reduce(tensor), finish=lambda: seen.append(tensor.tolist()), result=[tensor]
        )
        assert work.result()[0] is tensor
        return seen

    assert on_ranks(2, run) == [[[2.0, 2.0]]] * 2


# ------------------------------------------------------------ streams


def test_blocking_calls_use_the_current_stream_and_asynchronous_ones_a_stream_of_the_group() -> None:
    def run(rank: Rank) -> list[tuple[str, str]]:
        tensor = torch.ones(2)
        rank.backend.submit(rank.all_reduce(tensor))
        work = rank.backend.submit(rank.all_reduce(tensor), asynchronous=True)
        assert work.wait() and work.is_completed() and work.is_success()
        return rank.runtime.log

    log = on_ranks(2, run)[0]
    side = log[1][0]
    assert log[:3] == [("main", "allReduce"), (side, "waits"), (side, "allReduce")] and side != "main"
    assert log[3:] in ([("main", "waits")], [])  # the watchdog may have seen the end before


def test_waiting_makes_the_current_stream_wait_without_blocking_the_host() -> None:
    def run(rank: Rank) -> None:
        rank.runtime.hangs = True
        work = rank.backend.submit(rank.all_reduce(torch.ones(2)), asynchronous=True)
        assert work.wait()
        assert rank.runtime.log[-1] == ("main", "waits")
        assert not work.is_completed()
        with pytest.raises(CollectiveTimeout, match="the wait timed out; the device is still busy"):
            work.wait(0.01)
        rank.backend.abort("enough")

    on_ranks(1, run)


def test_blocking_wait_waits_for_the_device() -> None:
    def run(rank: Rank) -> None:
        rank.runtime.hangs = True
        with pytest.raises(CollectiveTimeout, match=r"all_reduce #1 .* timed out on rank 10"):
            rank.backend.submit(rank.all_reduce(torch.ones(2)), timeout_s=0.05)

    on_ranks(1, run, options=NcclOptions(blocking_wait=True))


def test_work_is_awaitable_and_its_future_is_there_at_once() -> None:
    def run(rank: Rank) -> None:
        tensor = torch.ones(2)
        work = rank.backend.submit(rank.all_reduce(tensor), asynchronous=True, result=[tensor])
        assert work.get_future().done() and work.get_future().value()[0] is tensor

        async def wait() -> list[torch.Tensor]:
            return await asyncio.wait_for(_awaited(work), LIMIT_S)

        assert asyncio.run(wait())[0].tolist() == [2.0, 2.0]

    on_ranks(2, run)


async def _awaited(work: object) -> list[torch.Tensor]:
    result: list[torch.Tensor] = await work  # type: ignore[misc]  # Work
    return result


# ------------------------------------------------------------ messages


def test_messages_match_in_order() -> None:
    def run(rank: Rank) -> None:
        backend, other = rank.backend, 1 - rank.me
        if rank.me == 0:
            for number in range(3):
                backend.send(values(number, 4, torch.bfloat16), other, 0)
        else:
            for number in range(3):
                tensor = torch.empty(4, dtype=torch.bfloat16)
                work = backend.recv(tensor, other, 0)
                assert torch.equal(tensor, values(number, 4, torch.bfloat16))
                assert work.wait(LIMIT_S) and work.source_rank() == other

    on_ranks(2, run)


def test_a_batch_is_one_group_of_calls() -> None:
    def run(rank: Rank) -> None:
        backend, other = rank.backend, 1 - rank.me
        tensor, seen = torch.empty(2), []
        backend.start_batch()
        recv = backend.recv(tensor, other, 0, asynchronous=True, finish=lambda: seen.append(tensor.tolist()))
        send = backend.send(torch.full((2,), float(rank.me)), other, 0, asynchronous=True)
        assert not recv.is_completed() and not rank.runtime.log
        backend.end_batch()
        assert recv.wait(LIMIT_S) and send.wait(LIMIT_S)
        assert seen == [[float(other)] * 2]

    on_ranks(2, run)


def test_recv_from_any_source_is_refused() -> None:
    def run(rank: Rank) -> None:
        with pytest.raises(ConfigError, match="name the source"):
            rank.backend.recv(torch.ones(1), None, 0)

    on_ranks(1, run)


# ------------------------------------------------------------ failures


def test_a_timeout_ends_the_group_on_all_ranks_and_aborts_its_communicator() -> None:
    submitted = threading.Event()

    def run(rank: Rank) -> None:
        rank.runtime.hangs = True
        assert rank.me or submitted.wait(LIMIT_S)
        timeout_s = None if rank.me else 0.05
        work = rank.backend.submit(rank.all_reduce(torch.ones(2)), asynchronous=True, timeout_s=timeout_s)
        submitted.set()
        with pytest.raises(
            CollectiveTimeout, match=r"all_reduce #1 \(SUM, 2 elements of float32\).* timed out on rank 10"
        ):
            work.wait(LIMIT_S)
        with pytest.raises(CollectiveTimeout, match=r"all_reduce #2"):
            rank.backend.submit(rank.all_reduce(torch.ones(2)))

    on_ranks(2, run)


def test_abort_frees_a_call_that_waits_for_a_peer() -> None:
    def run(rank: Rank) -> None:
        if rank.me == 0:
            with pytest.raises(GroupAborted, match="rank 11 aborted the group: enough"):
                rank.backend.submit(rank.all_reduce(torch.ones(2)))
        else:
            rank.backend.abort("enough")

    on_ranks(2, run)


def test_an_asynchronous_error_ends_the_group() -> None:
    submitted = threading.Barrier(2)

    def run(rank: Rank) -> None:
        rank.runtime.hangs = True
        work = rank.backend.submit(rank.all_reduce(torch.ones(2)), asynchronous=True)
        submitted.wait(LIMIT_S)
        if rank.me == 1:
            rank.runtime.async_error = StandInError("unhandled system error")
        with pytest.raises(CollectiveError, match="NCCL reported on rank 11: unhandled system error"):
            work.wait(LIMIT_S)

    on_ranks(2, run)


def test_a_call_that_fails_ends_the_group() -> None:
    def run(rank: Rank) -> None:
        with pytest.raises(CollectiveError, match=r"NCCL failed on rank 1.: the ranks do not match"):
            rank.backend.submit(rank.all_reduce(torch.ones(2 + rank.me)))

    on_ranks(2, run)


def test_with_check_a_mismatch_names_both_views() -> None:
    def run(rank: Rank) -> None:
        rank.backend.submit(rank.all_reduce(torch.ones(2)))
        rank.backend.submit(Operation(Kind.BARRIER))
        expected = r"rank 10 called all_reduce #3 \(SUM, 2 elements.*; rank 11 called all_reduce #3 \(SUM, 3 elements"
        with pytest.raises(CollectiveMismatch, match=expected):
            rank.backend.submit(rank.all_reduce(torch.ones(2 + rank.me)))

    on_ranks(2, run, options=NcclOptions(check=True))


def test_a_rank_that_left_ends_what_waits_for_it() -> None:
    def run(rank: Rank) -> None:
        rank.runtime.hangs = True
        work = rank.backend.submit(rank.all_reduce(torch.ones(2)), asynchronous=True)
        rank.backend._watchdog.rank_left(0, 0)
        with pytest.raises(CollectiveError, match="rank 10 left the group"):
            work.wait(LIMIT_S)

    on_ranks(1, run)


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (ReduceOp.BAND, torch.float32, "BAND needs integers or bool"),
        (ReduceOp.MIN, torch.complex64, "MIN needs an order"),
    ],
)
def test_reductions_that_make_no_sense_are_refused_and_harm_nobody(
    op: ReduceOp, dtype: torch.dtype, expected: str
) -> None:
    def run(rank: Rank) -> None:
        with pytest.raises(ConfigError, match=expected):
            rank.backend.submit(rank.all_reduce(torch.ones(2, dtype=dtype), op))
        tensor = torch.ones(2)
        rank.backend.submit(rank.all_reduce(tensor))
        assert tensor.tolist() == [2.0, 2.0]

    on_ranks(2, run)


def test_capturing_and_foreign_devices_are_refused() -> None:
    def run(rank: Rank) -> None:
        with pytest.raises(ConfigError, match="got a tensor on meta"):
            rank.backend.submit(rank.all_reduce(torch.ones(2, device="meta")))
        rank.runtime.capturing = True
        with pytest.raises(ConfigError, match="CUDA graph"):
            rank.backend.submit(rank.all_reduce(torch.ones(2)))

    on_ranks(1, run)


def test_closing_with_work_under_way_aborts_it() -> None:
    def run(rank: Rank) -> None:
        rank.runtime.hangs = True
        work = rank.backend.submit(rank.all_reduce(torch.ones(2)), asynchronous=True)
        rank.backend.close(0.05)
        with pytest.raises(GroupAborted, match="destroyed while operations ran"):
            work.wait(LIMIT_S)
        with pytest.raises(GroupAborted):
            rank.backend.submit(rank.all_reduce(torch.ones(2)))

    on_ranks(1, run)


def test_a_rank_that_does_not_come_is_named() -> None:
    context = GroupContext("g", 0, (4, 7), HashStore(), 0.1)
    with pytest.raises(RendezvousError, match=r"these ranks did not join within 0.1 s: 7"):
        NcclBackend(context, runtime=StandInRuntime(StandInWorld()), reporter=Reporter())


# ------------------------------------------------------------ splitting


def test_split_makes_groups_of_some_ranks() -> None:
    def run(rank: Rank) -> None:
        ranks = (12, 10)  # in another order; rank 11 is in none
        world_rank = rank.backend.context.ranks[rank.me]
        context = None
        if world_rank in ranks:
            store = PrefixStore("half", rank.backend.context.store)
            context = GroupContext("half", ranks.index(world_rank), ranks, store, LIMIT_S)
        half = rank.backend.split(context, reporter=Reporter())
        assert (half is None) == (rank.me == 1)
        if half is not None:
            tensor = torch.tensor([world_rank])
            half.submit(Operation(Kind.BROADCAST, (tensor,), (tensor,), root=0))
            assert tensor.item() == 12
            half.close(LIMIT_S)
        rank.backend.submit(Operation(Kind.BARRIER))

    on_ranks(3, run)
