"""The `tcp` backend on real processes: right results on every medium, and failures that are named on every rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import group_functions as ranks
import pytest
from full_sets import FULL
from peer_timeouts import PROMPT_S

from rpcdist.collectives._operations.operation import Kind
from rpcdist.testing import RankPool

pytestmark = pytest.mark.multiproc

SHARED, SOCKETS = True, False
MEDIA = [pytest.param(SHARED, id="shared memory"), pytest.param(SOCKETS, id="sockets")]
OPERATIONS = 600 if FULL else 60


@pytest.fixture
def group(rank_pool: RankPool) -> Iterator[Any]:
    """`group(size, shared)` makes a group on the pool's processes."""
    opened: list[int] = []

    def open_group(size: int, shared: object = SHARED, timeout_s: float = ranks.LIMIT_S) -> list[str]:
        opened.append(size)
        made: list[str] = rank_pool.run(size, ranks.open_group, rank_pool.new_file(), shared, timeout_s)
        return made

    yield open_group
    for size in opened:
        rank_pool.run(size, ranks.close_group)


@pytest.mark.parametrize(
    ("size", "shared", "medium"),
    [
        (1, SHARED, "SingleRank"),
        (2, SHARED, "Shm"),
        (2, SOCKETS, "Socket"),
        (3, SHARED, "Shm"),
        (3, "tcp", "Socket"),
        (4, SHARED, "Shm"),
        (4, SOCKETS, "Socket"),
        (4, [True, True, False, True], "Hierarchical"),
    ],
)
def test_random_operations_equal_the_reference(
    rank_pool: RankPool, group: Any, size: int, shared: object, medium: str
) -> None:
    assert f"of {size}, {medium}" in group(size, shared)[0]
    for asynchronous in (False, True):
        seed = size * 10 + asynchronous
        reduced = rank_pool.run(size, ranks.check_operations, seed, OPERATIONS, asynchronous, limit_s=100)
        assert len(set(reduced)) == 1
        assert reduced[0] > 0


def test_eight_ranks(rank_pool: RankPool, group: Any) -> None:
    group(8)
    rank_pool.run(8, ranks.check_operations, 8, 15, False)


def test_a_group_that_fails_at_the_very_end_leaves_nothing_open_and_the_others_hear(rank_pool: RankPool) -> None:
    (heard, of_first), (failed, of_second) = rank_pool.run(2, ranks.open_without_descriptors, rank_pool.new_file())
    assert "rank 1 left" in heard and "Too many open files" in failed
    assert (of_first, of_second) == ([], [])


def test_memory_that_is_passed_after_rank_0_gave_up_sharing_harms_nobody(rank_pool: RankPool, group: Any) -> None:
    """The loop of rank 0 found a closed segment, and sent nothing more to that rank: the group was not made."""
    group(3)
    for made in rank_pool.run(3, ranks.open_with_late_memory, rank_pool.new_file()):
        assert "of 3, Socket" in made


def test_a_rank_without_descriptors_is_the_one_that_failed(rank_pool: RankPool, group: Any) -> None:
    """It opens its connections to the other ranks with the first operation, and they wait for it there."""
    group(3, SOCKETS)
    short, *others = rank_pool.run(3, ranks.reduce_without_descriptors, 0, f"{rank_pool.new_file()}.short")
    assert short.startswith("ConnectFailed") and "this process has no free file descriptor (ulimit -n is" in short
    for error in others:
        assert error.startswith("CollectiveError: ") and "rank 0 raised ConnectFailed" in error
        assert "no free file descriptor" in error


def test_a_rank_that_cannot_accept_connections_blames_itself(rank_pool: RankPool, group: Any) -> None:
    """Rank 0 connects to it in vain, and its verdict may be the first: that time was over."""
    group(2, SOCKETS, 2.0)
    for error in rank_pool.run(2, ranks.reduce_without_descriptors, 1, f"{rank_pool.new_file()}.short"):
        blames_itself = "TransportError" in error and "no free file descriptor" in error
        assert blames_itself or (error.startswith("CollectiveTimeout: ") and "all ranks have called it" in error)


@pytest.mark.parametrize("short", [0, 1])
def test_a_message_in_a_shortage_blames_the_rank_that_is_short(rank_pool: RankPool, group: Any, short: int) -> None:
    """It was a `RankLost` of the other one. Afterwards, messages go through."""
    group(2, SOCKETS)
    outcomes = rank_pool.run(2, ranks.send_without_descriptors, short, f"{rank_pool.new_file()}.short", 2.0)
    error = outcomes[short][0]
    assert error.startswith("CollectiveError: ") and "no connection" in error
    assert "this process has no free file descriptor (ulimit -n is" in error
    assert [second for _, second in outcomes] == ["no error", "no error"]
    assert outcomes[1 - short][0].startswith("CollectiveTimeout: ")


def test_sends_that_are_lost_when_a_group_is_closed_are_named(rank_pool: RankPool, group: Any) -> None:
    group(2)
    said, nothing = rank_pool.run(2, ranks.close_before_sends_have_left)
    assert nothing == []
    [line] = said
    assert "was closed before 2 sends had left this process" in line and "send #1 to rank 1 with tag 3" in line


@pytest.mark.parametrize("shared", MEDIA)
def test_a_sum_has_the_same_bits_on_all_ranks(rank_pool: RankPool, group: Any, shared: bool) -> None:
    group(4, shared)
    found = rank_pool.run(4, ranks.same_bits)
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("size", "shared", "num_operations"), [(2, SHARED, 1), (2, SOCKETS, 3), (3, SHARED, 3), (3, SOCKETS, 3)]
)
def test_many_tensors_are_reduced_in_few_operations(
    rank_pool: RankPool, group: Any, size: int, shared: bool, num_operations: int
) -> None:
    group(size, shared)
    total = 10.0 * sum(range(size))
    for asynchronous in (False, True):
        found = rank_pool.run(size, ranks.reduce_many, asynchronous)
        assert found == [(num_operations, [sum(range(size + 1)), 0.0, total])] * size


@pytest.mark.parametrize(
    ("shared", "victim", "how"),
    [
        pytest.param(SHARED, 0, "alone", id="shared memory, rank 0"),
        pytest.param(SHARED, 2, "after forking", id="shared memory, rank 2, which has forked"),
        pytest.param(SOCKETS, 0, "after forking", id="sockets, rank 0, which has forked"),
        pytest.param(SOCKETS, 2, "alone", id="sockets, rank 2"),
        pytest.param([True, False, True], 2, "after forking", id="both, rank 2, which has forked"),
    ],
)
def test_a_killed_rank_is_named_on_every_other_before_the_timeout(
    rank_pool: RankPool, group: Any, shared: object, victim: int, how: str
) -> None:
    group(3, shared)
    pending = rank_pool.begin(3, ranks.until_it_fails, 3, victim, how)
    assert rank_pool[victim].wait(30) == -signal.SIGKILL
    killed_at = time.time()
    for rank in {0, 1, 2} - {victim}:
        kind, text, failed_at = pending[rank].result(30)
        assert kind == "RankLost", text
        assert f"rank {victim} was lost" in text or f"with rank {victim} broke" in text
        assert "all_reduce #" in text
        assert failed_at - killed_at < PROMPT_S
    for rank in {0, 1, 2} - {victim}:
        rank_pool[rank].run(ranks.close_group, rank, 3)


@pytest.mark.parametrize("case", ["operation", "dtype", "size", "reduction", "root", "order", "all_to_all"])
@pytest.mark.parametrize("shared", MEDIA)
def test_a_mismatch_is_reported_on_all_ranks_with_both_views(
    rank_pool: RankPool, group: Any, shared: bool, case: str
) -> None:
    group(3, shared)
    outcomes = rank_pool.run(3, ranks.attempt, "mismatched", case)
    assert [kind for kind, _ in outcomes] == ["CollectiveMismatch"] * 3, outcomes
    for _, text in outcomes:
        assert "rank 2" in text
        assert text.count("called") >= 2


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("shared", MEDIA)
def test_a_timeout_names_who_did_not_arrive(rank_pool: RankPool, group: Any, shared: bool, absent: int) -> None:
    group(3, shared)
    outcomes = rank_pool.run(3, ranks.attempt, "missing", absent)
    assert [kind for kind, _ in outcomes] == ["CollectiveTimeout"] * 3, outcomes
    for _, text in outcomes:
        assert f"rank {absent} did not arrive" in text


@pytest.mark.parametrize("shared", MEDIA)
def test_an_abort_ends_the_group_everywhere(rank_pool: RankPool, group: Any, shared: bool) -> None:
    group(3, shared)
    outcomes = rank_pool.run(3, ranks.attempt, "abort_on_one", 1)
    assert [kind for kind, _ in outcomes] == ["GroupAborted"] * 3, outcomes
    assert all("rank 1 aborted the group: for the test" in text for _, text in outcomes)
    group(3, shared)  # and the same processes make a new one
    rank_pool.run(3, ranks.check_operations, 1, 5, False)


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("shared", MEDIA)
def test_a_rank_that_leaves_early_is_named(rank_pool: RankPool, group: Any, shared: bool, leaver: int) -> None:
    group(3, shared)
    outcomes = rank_pool.run(3, ranks.attempt, "leave_early", leaver)
    assert outcomes[leaver] == ("nothing", "")
    for rank in {0, 1, 2} - {leaver}:
        assert outcomes[rank][0] == "RankLost", outcomes
        assert f"rank {leaver} left the group" in outcomes[rank][1]


@pytest.mark.parametrize("shared", MEDIA)
def test_a_late_rank_is_waited_for_in_every_operation(rank_pool: RankPool, group: Any, shared: bool) -> None:
    group(3, shared)
    late, *others = rank_pool.run(3, ranks.come_late, 0)  # the root: nobody can be done without it
    for kind in ranks.EVERY_KIND:
        if kind not in (Kind.REDUCE, Kind.GATHER) or shared == SOCKETS:
            assert all(times[kind.name][1] > late[kind.name][0] for times in others), kind


@pytest.mark.parametrize("name", [kind.name for kind in ranks.EVERY_KIND])
def test_every_operation_ends_when_a_rank_dies_in_it(rank_pool: RankPool, group: Any, name: str) -> None:
    for shared in (SHARED, SOCKETS) if FULL else (bool(Kind[name] % 2),):
        group(3, shared)
        pending = rank_pool.begin(3, ranks.die_in, name, 1)
        assert rank_pool[1].wait(30) == -signal.SIGKILL
        killed_at = time.time()
        for rank in (0, 2):
            error, text, failed_at = pending[rank].result(30)
            assert error == "RankLost", text
            assert name.lower() in text
            assert "rank 1 was lost" in text or "with rank 1 broke" in text
            assert failed_at - killed_at < PROMPT_S
        for rank in (0, 2):
            rank_pool[rank].run(ranks.close_group, rank, 3)


def test_nothing_is_left_of_a_group(rank_pool: RankPool, group: Any) -> None:
    group(3)
    rank_pool.run(3, ranks.check_operations, 5, 10, True)
    rank_pool.run(3, ranks.close_group)
    before = rank_pool.run(3, ranks.open_things)
    for shared in (SHARED, SOCKETS):
        group(3, shared)
        rank_pool.run(3, ranks.check_operations, 5, 20, True)
        rank_pool.run(3, ranks.close_group)
    assert rank_pool.run(3, ranks.open_things) == before
    assert before[0]["memory"] == before[0]["threads"] == 0
