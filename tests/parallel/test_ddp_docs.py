"""The page about data parallel training: its code runs, and says what it is."""

from __future__ import annotations

import ddp_ranks
import pytest
from group_pool import GroupPool


@pytest.mark.multiproc
def test_the_page_runs(group_pool: GroupPool) -> None:
    group_pool.run(2, ddp_ranks.run_guide, group_pool.new_file())
