"""The page about data parallel training: its code runs, and says what it is."""

from __future__ import annotations

import ddp_ranks
import pytest

from rpcdist.testing import RankPool


@pytest.mark.multiproc
def test_the_page_runs(rank_pool: RankPool) -> None:
    rank_pool.run(2, ddp_ranks.run_guide, rank_pool.new_file())
