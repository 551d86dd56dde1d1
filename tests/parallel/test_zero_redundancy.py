"""`ZeroRedundancyOptimizer`: the numbers of the optimizer inside, and a part of its memory."""

from __future__ import annotations

import pytest
import torch
import zero_ranks

from rpcdist.errors import ConfigError
from rpcdist.parallel import ZeroRedundancyOptimizer
from rpcdist.testing import RankPool


@pytest.mark.multiproc
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("name", "size"), [("Adam", 2), ("SGD", 3), ("AdamW", 2)])
def test_steps_equal_those_of_one_process(rank_pool: RankPool, name: str, size: int, grouped: bool) -> None:
    results = rank_pool.run(size, zero_ranks.compare, rank_pool.new_file(), name, grouped)
    assert all(away == 0.0 for away, _, _ in results)
    assert all(own <= 1.1 * whole / size for _, whole, own in results)
    assert sum(own for _, _, own in results) == results[0][1]


@pytest.mark.multiproc
@pytest.mark.parametrize("to", [0, 1])
def test_a_state_is_saved_and_loaded_on_any_number_of_ranks(rank_pool: RankPool, to: int) -> None:
    assert rank_pool.run(2, zero_ranks.save_and_load, rank_pool.new_file(), to) == [[0.0, 0.0]] * 2


@pytest.mark.multiproc
def test_groups_may_be_added(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, zero_ranks.thaw, rank_pool.new_file()) == [0.0, 0.0]


@pytest.mark.multiproc
def test_uneven_inputs(rank_pool: RankPool) -> None:
    """Ranks without data step their part with the gradients of the others."""
    sharded = rank_pool.run(2, zero_ranks.uneven, rank_pool.new_file(), True)
    plain = rank_pool.run(2, zero_ranks.uneven, rank_pool.new_file(), False)
    assert sharded[0] == sharded[1] == plain[1]


def test_more_ranks_than_parameters_and_closures(world_of_one: None) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.5)

    def loss() -> float:
        optimizer.zero_grad()
        value = (weight * 3).sum()
        value.backward()
        return float(value.detach())

    assert optimizer.step(loss) == 6.0
    assert weight.tolist() == [-0.5, -0.5] and "1 of 1 parameters: SGD" in repr(optimizer)


def test_what_cannot_be_is_refused(world_of_one: None) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match=r"overlap_with_ddp .*hook_with_zero_step.* call step\(\) after backward"):
        ZeroRedundancyOptimizer([weight], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        ZeroRedundancyOptimizer([], torch.optim.SGD, lr=0.1)
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="other groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
