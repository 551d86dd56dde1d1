"""Every function that ranks call together, on real processes, while one of them is killed, hangs, or is slow."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import group_faults
import pytest
from full_sets import FULL
from group_faults import FUNCTIONS
from peer_timeouts import PROMPT_S

from rpcdist.testing import RankPool

pytestmark = pytest.mark.multiproc

SIZE, VICTIM = 3, 1
EVERY = [(name, number % 2 == 0) for number, name in enumerate(sorted(FUNCTIONS))]  # each on one medium
if FULL:
    EVERY = [(name, shared) for name in sorted(FUNCTIONS) for shared in (True, False)]
MESSAGES = {name for name in FUNCTIONS if name.startswith("send_recv")}
OTHERS = {"messages", "send_object_list", *MESSAGES}  # each rank names the one that it waits for
SOME = [case for case in EVERY if case[0] not in {*OTHERS, "new_group"}]
if not FULL:
    SOME = [("all_reduce", True), ("all_gather", False), ("all_to_all_single", True), ("barrier", False)]


def ids(cases: list[tuple[str, bool]]) -> list[str]:
    return [f"{name}, {'shared memory' if shared else 'sockets'}" for name, shared in cases]


@pytest.fixture
def world(rank_pool: RankPool) -> Iterator[Callable[..., None]]:
    def open_world(shared: bool, timeout_s: float = 30.0) -> None:
        rank_pool.run(SIZE, group_faults.open_world, rank_pool.new_file(), shared, timeout_s)

    yield open_world
    # The surviving ranks leave; a killed rank is replaced when it is needed.
    for rank in range(SIZE):
        if rank_pool[rank].alive:
            rank_pool[rank].resume()
            rank_pool[rank].begin(group_faults.leave, rank, SIZE).result(20)


@pytest.mark.parametrize(("name", "shared"), EVERY, ids=ids(EVERY))
def test_a_killed_rank_is_named_whatever_was_called(
    rank_pool: RankPool, world: Callable[..., None], name: str, shared: bool
) -> None:
    world(shared)
    pending = rank_pool.begin(SIZE, group_faults.go_on_until_it_fails, name, VICTIM)
    assert rank_pool[VICTIM].wait(30) == -signal.SIGKILL
    killed_at = time.time()
    for rank in {*range(SIZE)} - {VICTIM}:
        error, text, failed_at = pending[rank].result(30)
        assert error == "RankLost", text
        assert f"rank {VICTIM} " in text
        assert failed_at - killed_at < PROMPT_S


@pytest.mark.parametrize(("name", "shared"), SOME, ids=ids(SOME))
def test_a_rank_that_hangs_is_named_when_the_time_is_over(
    rank_pool: RankPool, world: Callable[..., None], name: str, shared: bool
) -> None:
    world(shared, 1.0)
    pending = rank_pool.begin(SIZE, group_faults.time_out, name, VICTIM)
    hung = rank_pool[VICTIM]
    hung.wait_until_stopped()
    try:
        for rank in {*range(SIZE)} - {VICTIM}:
            error, text = pending[rank].result(30)
            assert error == "CollectiveTimeout", text
            assert f"rank {VICTIM} " in text
    finally:
        hung.resume()
    error, _ = pending[VICTIM].result(30)
    assert error != "nothing"


@pytest.mark.parametrize("victim", range(SIZE))
def test_the_others_learn_why_a_program_failed(rank_pool: RankPool, world: Callable[..., None], victim: int) -> None:
    world(victim != 0)
    texts = rank_pool.run(SIZE, group_faults.sum_up_until_one_fails, victim)
    assert texts.pop(victim) == "no more data"
    for text in texts:
        assert f"rank {victim} left the group (its error was ValueError: no more data)" in text


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_a_rank_that_is_stopped_again_and_again_is_waited_for(
    rank_pool: RankPool, world: Callable[..., None], shared: bool
) -> None:
    world(shared)
    pending = rank_pool.begin(SIZE, group_faults.sum_up, 0.5)
    victim = rank_pool[VICTIM]
    for _ in range(5):
        victim.stop()
        time.sleep(0.03)  # the others wait, first spinning and then asleep
        victim.resume()
        time.sleep(0.01)  # all go on for a while
    rounds = rank_pool.finish(pending)
    assert rounds[0] >= 1 and len(set(rounds)) == 1, rounds


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_a_forked_child_may_not_take_part(rank_pool: RankPool, world: Callable[..., None], shared: bool) -> None:
    world(shared)
    assert rank_pool.run(SIZE, group_faults.may_a_child_call) == ["ForkedProcess"] * SIZE


def test_a_rank_that_dies_while_the_group_is_made_is_named(rank_pool: RankPool) -> None:
    pending = rank_pool.begin(SIZE, group_faults.die_while_the_group_is_made, rank_pool.new_file(), VICTIM)
    assert rank_pool[VICTIM].wait(30) == -signal.SIGKILL
    killed_at = time.time()
    for rank in {*range(SIZE)} - {VICTIM}:
        error, text, failed_at = pending[rank].result(30)
        assert error == "RankLost" and f"rank {VICTIM} was lost" in text, text
        assert failed_at - killed_at < PROMPT_S


def test_a_rank_that_cannot_make_the_group_says_why_and_is_named(rank_pool: RankPool) -> None:
    """It raised a bare `OSError`, and a rank that failed because of it was said to have called `abort`."""
    paths = rank_pool.new_file(), rank_pool.new_file()
    outcomes = rank_pool.run(SIZE, group_faults.lack_memory_while_the_group_is_made, paths[0], VICTIM, paths[1])
    for rank, (error, text) in enumerate(outcomes):
        if rank == VICTIM:
            assert error == "TransportError" and text.endswith("failed: cannot map it today"), text
        else:
            assert error in ("RankLost", "GroupAborted") and f"rank {VICTIM} gave up" in text, text
            assert "abort() was called" not in text


def test_ranks_may_part_as_soon_as_they_have_met(rank_pool: RankPool) -> None:
    rank_pool.run(SIZE, group_faults.meet_and_part, rank_pool.new_file(), 10)
