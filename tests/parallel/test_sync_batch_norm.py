"""`SyncBatchNorm`: the numbers of one process that has the whole batch."""

from __future__ import annotations

from typing import Any

import batch_norm_ranks
import pytest
import torch
from torch import nn

from rpcdist.parallel import SyncBatchNorm
from rpcdist.testing import RankPool

ROUNDING = 1e-9  # of float64, with a mean that is 30 times the deviation


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("rows", "rest", "options"),
    [
        ([4, 4], [5], {}),
        ([3, 6], [5], {"affine": False}),
        ([1, 2, 4], [3, 7], {"momentum": None}),
        ([2, 0, 5], [3, 4, 2], {"eps": 0.1, "momentum": 0.5}),
        ([2, 3], [2, 2, 3, 2], {"track_running_stats": False}),
    ],
)
def test_parts_are_normalised_as_the_whole(
    rank_pool: RankPool, rows: list[int], rest: list[int], options: dict[str, Any]
) -> None:
    path = rank_pool.new_file()
    worst = rank_pool.run(len(rows), batch_norm_ranks.compare_with_whole_batch, path, rows, rest, options)
    assert max(worst) < ROUNDING


@pytest.mark.multiproc
@pytest.mark.parametrize("how", ["ours", "torch's layer", "torch's group"])
def test_data_parallel_training_equals_training_alone(rank_pool: RankPool, how: str) -> None:
    assert max(rank_pool.run(2, batch_norm_ranks.train_in_parallel, rank_pool.new_file(), how)) < ROUNDING


@pytest.mark.multiproc
def test_one_value_on_all_ranks_together_is_refused(rank_pool: RankPool) -> None:
    texts = rank_pool.run(2, batch_norm_ranks.one_value_per_channel, rank_pool.new_file())
    assert texts == ["Expected more than 1 value per channel on all ranks together, got 1"] * 2


def test_converting_keeps_everything_else() -> None:
    inner = nn.Sequential(nn.BatchNorm1d(4, affine=False)).eval()
    model = nn.Sequential(nn.BatchNorm2d(3, eps=0.5, momentum=None), inner)
    before = dict(model.named_parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model and type(model[0]) is type(inner[0]) is SyncBatchNorm
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in before.items())
    assert (model[0].eps, model[0].momentum, model[0].training) == (0.5, None, True)
    assert not inner[0].training and inner[0].weight is None
    assert list(model.state_dict()) == [
        *(f"0.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
        *(f"1.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    ]
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm3d(2)), nn.SyncBatchNorm)


def test_without_a_group_it_is_batch_normalisation() -> None:
    torch.manual_seed(0)
    layer, plain, rows = SyncBatchNorm(4), nn.BatchNorm1d(4), torch.randn(6, 4)
    for _ in range(2):
        assert torch.equal(layer(rows), plain(rows))
    assert torch.equal(layer.eval()(rows), plain.eval()(rows))


@pytest.mark.parametrize("shape", [(5,), (5, 0)])
def test_inputs_without_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected at least 2D|non-zero"):
        SyncBatchNorm(3)(torch.zeros(shape))
