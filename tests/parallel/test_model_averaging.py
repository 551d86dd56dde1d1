"""Model averaging gives torch's numbers; a mesh of one dimension may stand for a group."""

from __future__ import annotations

import averaging_ranks
import pytest
import torch

from rpcdist.errors import ConfigError
from rpcdist.parallel import DiLoCoOptimizer
from rpcdist.parallel.model_averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)
from rpcdist.testing import RankPool


@pytest.mark.multiproc
@pytest.mark.parametrize(("kind", "size"), [("periodic", 2), ("hierarchical", 4)])
def test_averages_are_those_of_torch(rank_pool: RankPool, kind: str, size: int) -> None:
    assert max(rank_pool.run(size, averaging_ranks.compare, rank_pool.new_file(), kind)) < 1e-6


@pytest.mark.multiproc
def test_a_mesh_of_one_dimension_stands_for_a_group(rank_pool: RankPool) -> None:
    for errors in rank_pool.run(2, averaging_ranks.on_meshes, rank_pool.new_file()):
        assert [text[:20] for text in errors] == [
            "Only 1D device mesh ",
            "device_mesh must be ",
            "Cannot specify both ",
        ]


@pytest.mark.multiproc
def test_diloco_is_the_papers_algorithm_and_converges(rank_pool: RankPool) -> None:
    for found in rank_pool.run(2, averaging_ranks.solve_together, rank_pool.new_file(), 5):
        assert found.pop("distance") < 0.02  # 1 at the start
        assert found == {"as in one process": True, "resumed": True}


def test_what_cannot_be_is_refused(world_of_one: None) -> None:
    for wrong in (
        lambda: PeriodicModelAverager(period=0),
        lambda: PeriodicModelAverager(period=2, warmup_steps=-1),
        lambda: HierarchicalModelAverager({}),
        lambda: HierarchicalModelAverager({0: 1}),
        lambda: HierarchicalModelAverager({4: 1, 2: 1}),
        lambda: HierarchicalModelAverager({2: 2}),
    ):
        with pytest.raises(ValueError, match=r"period|non-negative"):
            wrong()
    with pytest.warns(UserWarning, match="only DistributedDataParallel"):
        PeriodicModelAverager(period=1)


def test_what_diloco_refuses(world_of_one: None) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=1.0)
    frozen = torch.optim.SGD([torch.ones(1)], lr=1.0)
    optimizer = DiLoCoOptimizer(inner, 2)
    for wrong, text in (
        (lambda: DiLoCoOptimizer(inner, 0), "at least 1, not 0"),
        (lambda: DiLoCoOptimizer(frozen, 2), "no parameters that require gradients"),
        (lambda: optimizer.load_state_dict(inner.state_dict()), "into `optimizer.optim`"),
        (lambda: optimizer.add_param_group({"params": []}), "needs all parameters in its constructor"),
    ):
        with pytest.raises(ConfigError, match=text):
            wrong()
    assert optimizer.step(lambda: 3.0) == 3.0 and "after 1 steps" in repr(optimizer)


def test_a_state_without_a_step_begins_anew(world_of_one: None) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([weight], lr=1.0), PeriodicModelAverager(period=2))
    optimizer.averager.step = 7
    with pytest.warns(UserWarning, match="no step"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    assert optimizer.averager.step == 0 and optimizer.state_dict()["step"] == 0
    assert optimizer.step(lambda: 3.0) == 3.0
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2 and "1 steps" in repr(optimizer)
