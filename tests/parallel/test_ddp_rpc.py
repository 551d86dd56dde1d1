"""Data parallel training inside a context of distributed autograd: averaged gradients land in the context."""

from __future__ import annotations

import ddp_rpc_ranks
import pytest

from rpcdist.testing import RankPool

pytestmark = pytest.mark.multiproc
ROUNDING = 1e-6  # of float32


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0005},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
)
def test_two_trainers_and_a_remote_embedding(rank_pool: RankPool, options: dict[str, object]) -> None:
    worst = rank_pool.run(3, ddp_rpc_ranks.train_over_rpc, rank_pool.new_file(), options)
    assert max(worst) < ROUNDING


def test_reductions_overlap_the_distributed_backward_pass(rank_pool: RankPool) -> None:
    *trainers, _ = rank_pool.run(3, ddp_rpc_ranks.overlap_over_rpc, rank_pool.new_file())
    for num_buckets, num_early in trainers:
        assert num_buckets == 7
        assert num_early >= 1


def test_unused_parameters_in_a_context(rank_pool: RankPool) -> None:
    *trainers, _ = rank_pool.run(3, ddp_rpc_ranks.branches_over_rpc, rank_pool.new_file())
    every = ["left.bias", "left.weight", "out.bias", "out.weight", "right.bias", "right.weight"]
    for rank, (found, error) in enumerate(trainers):
        assert found == [every, every[:4], every]
        assert error.startswith("UnusedParameters: ")
        assert f"on rank {rank}, these parameters received no gradient: right.weight, right.bias" in error


def test_parts_that_run_alone(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(3, ddp_rpc_ranks.heads_over_rpc, rank_pool.new_file())) < ROUNDING
