"""Gradients of data parallel training are those of one process on the whole batch."""

from __future__ import annotations

import ddp_models
import ddp_ranks
import pytest
from group_pool import GroupPool

pytestmark = pytest.mark.multiproc
ROUNDING = 1e-12


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(ddp_models.CASES))
def test_equal_to_the_single_process(group_pool: GroupPool, name: str, size: int) -> None:
    worst = group_pool.run(size, ddp_ranks.compare_with_single, group_pool.new_file(), name, {})
    assert max(worst) < ROUNDING


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batch_normalisation_trains_on_parts(group_pool: GroupPool, size: int) -> None:
    """Each rank normalises by the statistics of its part, and the running ones are rank 0's, as in torch."""
    assert max(group_pool.run(size, ddp_ranks.compare_with_parts, group_pool.new_file(), "cnn")) < ROUNDING


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
def test_options_change_nothing_about_the_numbers(group_pool: GroupPool, options: str, name: str) -> None:
    path = group_pool.new_file()
    worst = group_pool.run(2, ddp_ranks.compare_with_single, path, name, OPTIONS[options], 4)
    assert max(worst) < ROUNDING
