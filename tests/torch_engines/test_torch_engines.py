"""torch's DDP, FSDP2, HSDP, TP, pipelining, checkpoints, functional collectives on our backend: bit-equal to Gloo."""

from __future__ import annotations

import engine_ranks
import pytest
from engines import ENGINES
from full_sets import FULL_ONLY

from rpcdist.testing import RankPool


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=FULL_ONLY if size > 2 else ()) for name, (size, _) in ENGINES.items()]
)
def test_numbers_are_those_of_gloo(rank_pool: RankPool, name: str) -> None:
    size, _ = ENGINES[name]
    assert min(rank_pool.run(size, engine_ranks.compare, name, rank_pool.new_file())) >= 7
