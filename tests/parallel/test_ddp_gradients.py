"""Gradients of data parallel training are those of one process on the whole batch."""

from __future__ import annotations

import ddp_models
import ddp_ranks
import pytest

from rpcdist.testing import RankPool

pytestmark = pytest.mark.multiproc
ROUNDING = 1e-12


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(ddp_models.CASES))
def test_equal_to_the_single_process(rank_pool: RankPool, name: str, size: int) -> None:
    worst = rank_pool.run(size, ddp_ranks.compare_with_single, rank_pool.new_file(), name, {})
    assert max(worst) < ROUNDING


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batch_normalisation_trains_on_parts(rank_pool: RankPool, size: int) -> None:
    """Each rank normalises by the statistics of its part, and the running ones are rank 0's, as in torch."""
    assert max(rank_pool.run(size, ddp_ranks.compare_with_parts, rank_pool.new_file(), "cnn")) < ROUNDING


OPTIONS = {
    "view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "listed caps": {"bucket_cap_mb_list": [0.0001, 0.001]},
    "find unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "check all": {"check_finite": "all"},
}


@pytest.mark.parametrize("name", ["wide", "shared", "sparse"])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_options_change_nothing_about_the_numbers(rank_pool: RankPool, options: str, name: str) -> None:
    path = rank_pool.new_file()
    worst = rank_pool.run(2, ddp_ranks.compare_with_single, path, name, OPTIONS[options], 4)
    assert max(worst) < ROUNDING
