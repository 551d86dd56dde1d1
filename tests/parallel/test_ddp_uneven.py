"""Data parallel training with uneven inputs: `join` of a model, and `Join` of anything."""

from __future__ import annotations

import ddp_uneven_ranks
import pytest

from rpcdist.testing import RankPool

pytestmark = pytest.mark.multiproc
ROUNDING = 1e-12


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize(
    ("name", "size", "options", "first"),
    [
        ("mlp", 1, {}, 2),
        ("mlp", 2, {}, 2),
        ("shared", 4, {}, 2),
        ("wide", 3, {}, 2),
        ("sparse", 3, {}, 2),
        ("cnn", 3, {}, 2),
        ("mlp", 3, {}, 0),  # rank 0 has no inputs at all
        ("mlp", 3, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}, 2),
        ("mlp", 3, {"find_unused_parameters": True}, 1),
        ("mlp", 3, {"static_graph": True}, 0),
        ("wide", 3, {"by hand": True, "bucket_cap_mb": 1}, 1),
    ],
)
def test_uneven_inputs(
    rank_pool: RankPool, name: str, size: int, options: dict[str, object], first: int, by_initial: bool
) -> None:
    path = rank_pool.new_file()
    results = rank_pool.run(size, ddp_uneven_ranks.uneven, path, by_initial, name, options, first)
    assert max(worst for worst, _ in results) < ROUNDING
    assert all(sums == results[-1][1] for _, sums in results)  # all have the model of the last one


def test_uneven_inputs_may_raise(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, ddp_uneven_ranks.uneven_throw, rank_pool.new_file())
    assert first == "2 UnevenInputs: Rank 0 exhausted all inputs."
    assert second.startswith("2 UnevenInputs: Detected at least one rank that exhausted inputs.")
    assert "It was rank 0" in second


def test_ranks_without_inputs_follow_hooks_and_no_sync(rank_pool: RankPool) -> None:
    for function in (ddp_uneven_ranks.uneven_with_hook, ddp_uneven_ranks.uneven_without_sync):
        assert max(rank_pool.run(3, function, rank_pool.new_file())) == 0.0


@pytest.mark.parametrize("counter_first", [True, False])
def test_join_of_several(rank_pool: RankPool, counter_first: bool) -> None:
    results = rank_pool.run(3, ddp_uneven_ranks.join_several, rank_pool.new_file(), counter_first)
    given = {"note": "for the hooks", "divide_by_initial_world_size": False}
    for rank, (total, is_last, kwargs, disabled) in enumerate(results):
        assert (total, is_last, disabled) == (1 + 2 + 3, rank == 2, 3)
        assert kwargs in (given, {})  # of the last `Join`


def test_join_used_badly(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, ddp_uneven_ranks.join_badly, rank_pool.new_file())
    assert second == [
        "ConfigError: The join context manager requires at least one joinable",
        "ConfigError: Using join context manager with multiple process groups",
        "the user's own",
    ]
    assert first[:3] == second
    assert "rank 0 has that many fewer inputs than others" in first[3]


@pytest.mark.parametrize("zero", ["before", "after"])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]
)
def test_a_rank_that_ended_early_keeps_its_own_gradients(
    rank_pool: RankPool, options: dict[str, bool], zero: str
) -> None:
    """Those of the others' last steps would be added to the first step of the next epoch."""
    for wrong in rank_pool.run(3, ddp_uneven_ranks.two_epochs, rank_pool.new_file(), options, zero):
        assert not wrong
