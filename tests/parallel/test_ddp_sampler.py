"""`DistributedSampler`: the parts are torch's, and the group is ours."""

from __future__ import annotations

from typing import Any

import ddp_ranks
import pytest
import torch

from rpcdist.data import DistributedSampler
from rpcdist.errors import ConfigError
from rpcdist.testing import RankPool


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_parts_are_those_of_torch(shuffle: bool, drop_last: bool) -> None:
    for rank in range(3):
        ours: DistributedSampler[int] = DistributedSampler(range(10), 3, rank, shuffle, 5, drop_last)
        whole: Any = range(10)
        theirs: Any = torch.utils.data.DistributedSampler(whole, 3, rank, shuffle, 5, drop_last)
        for epoch in range(2):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)
        assert len(ours) == len(theirs) == (3 if drop_last else 4)


@pytest.mark.multiproc
def test_the_default_group_says_which_part(rank_pool: RankPool) -> None:
    parts = rank_pool.run(3, ddp_ranks.sample, rank_pool.new_file())
    assert parts == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"Invalid rank {rank}, rank should be in the interval \[0, 1\]"):
        DistributedSampler(range(4), 2, rank)


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedSampler(range(4))
