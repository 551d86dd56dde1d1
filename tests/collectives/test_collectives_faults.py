"""Every function that ranks call together, on real processes, while one of them is killed, hangs, or is slow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import group_faults
import pytest
from group_faults import FUNCTIONS
from group_pool import GroupPool

pytestmark = pytest.mark.multiproc

SIZE, VICTIM = 3, 1
FULL = os.environ.get("RPCDIST_TEST_FULL") == "1"  # `make stress`
EVERY = [(name, number % 2 == 0) for number, name in enumerate(sorted(FUNCTIONS))]  # each on one medium
if FULL:
    EVERY = [(name, shared) for name in sorted(FUNCTIONS) for shared in (True, False)]
OTHERS = {"messages", "send_recv", "send_object_list"}  # each rank names the one that it waits for
SOME = [case for case in EVERY if case[0] not in {*OTHERS, "new_group"}]
if not FULL:
    SOME = [("all_reduce", True), ("all_gather", False), ("all_to_all_single", True), ("barrier", False)]


def ids(cases: list[tuple[str, bool]]) -> list[str]:
    return [f"{name}, {'shared memory' if shared else 'sockets'}" for name, shared in cases]


@pytest.fixture
def world(group_pool: GroupPool) -> Iterator[Callable[..., None]]:
    def open_world(shared: bool, timeout_s: float = 30.0) -> None:
        group_pool.run(SIZE, group_faults.open_world, group_pool.new_file(), shared, timeout_s)

    yield open_world
    # Who lives leaves; who was killed is replaced when it is needed.
    for rank in range(SIZE):
        if group_pool.ranks[rank].alive():
            os.kill(group_pool.ranks[rank].pid, signal.SIGCONT)
            group_pool.ranks[rank].ask((group_faults.__name__, "leave", rank, SIZE, ()))
            assert group_pool.ranks[rank].answer(time.monotonic() + 20) is None


@pytest.mark.parametrize(("name", "shared"), EVERY, ids=ids(EVERY))
def test_a_killed_rank_is_named_whatever_was_called(
    group_pool: GroupPool, world: Callable[..., None], name: str, shared: bool
) -> None:
    world(shared)
    group_pool.start(SIZE, group_faults.go_on_until_it_fails, name, VICTIM)
    assert group_pool.ranks[VICTIM].wait(30) == -signal.SIGKILL
    killed_at = time.time()
    for rank in {*range(SIZE)} - {VICTIM}:
        error, text, failed_at = group_pool.ranks[rank].answer(time.monotonic() + 30)
        assert error == "RankLost", text
        assert f"rank {VICTIM} " in text
        assert failed_at - killed_at < 2


@pytest.mark.parametrize(("name", "shared"), SOME, ids=ids(SOME))
def test_a_rank_that_hangs_is_named_when_the_time_is_over(
    group_pool: GroupPool, world: Callable[..., None], name: str, shared: bool
) -> None:
    world(shared, 1.0)
    group_pool.start(SIZE, group_faults.time_out, name, VICTIM)
    hung = group_pool.ranks[VICTIM]
    wait_until_stopped(hung.pid)
    try:
        for rank in {*range(SIZE)} - {VICTIM}:
            error, text = group_pool.ranks[rank].answer(time.monotonic() + 30)
            assert error == "CollectiveTimeout", text
            assert f"rank {VICTIM} " in text
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    error, _ = hung.answer(time.monotonic() + 30)
    assert error != "nothing"


def wait_until_stopped(pid: int) -> None:
    limit = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < limit, "the fault did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_a_rank_that_is_stopped_again_and_again_is_waited_for(
    group_pool: GroupPool, world: Callable[..., None], shared: bool
) -> None:
    world(shared)
    group_pool.start(SIZE, group_faults.sum_up, 0.5)
    pid = group_pool.ranks[VICTIM].pid
    for _ in range(5):
        os.kill(pid, signal.SIGSTOP)
        wait_until_stopped(pid)
        time.sleep(0.03)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    rounds = group_pool.finish(SIZE)
    assert rounds[0] >= 1 and len(set(rounds)) == 1, rounds


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_a_forked_child_may_not_take_part(group_pool: GroupPool, world: Callable[..., None], shared: bool) -> None:
    world(shared)
    assert group_pool.run(SIZE, group_faults.may_a_child_call) == ["ForkedProcess"] * SIZE


def test_a_rank_that_dies_while_the_group_is_made_is_named(group_pool: GroupPool) -> None:
    group_pool.start(SIZE, group_faults.die_while_the_group_is_made, group_pool.new_file(), VICTIM)
    assert group_pool.ranks[VICTIM].wait(30) == -signal.SIGKILL
    killed_at = time.time()
    for rank in {*range(SIZE)} - {VICTIM}:
        error, text, failed_at = group_pool.ranks[rank].answer(time.monotonic() + 30)
        assert error == "RankLost" and f"rank {VICTIM} was lost" in text, text
        assert failed_at - killed_at < 2


def test_ranks_may_part_as_soon_as_they_have_met(group_pool: GroupPool) -> None:
    group_pool.run(SIZE, group_faults.meet_and_part, group_pool.new_file(), 10)
