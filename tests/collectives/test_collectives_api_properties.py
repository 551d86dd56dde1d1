"""Any function x dtype x shape x layout x number of ranks, on real processes, equals plain torch."""

from __future__ import annotations

import api_cases
import pytest
from api_cases import DTYPES, FUNCTIONS, LAYOUTS, SHAPES, Case, possible
from full_sets import FULL_ONLY
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rpcdist.collectives import ReduceOp
from rpcdist.testing import RankPool

pytestmark = pytest.mark.multiproc

FEW, MANY = 40, 1500
WORLDS = [(1, True), (2, True), (2, False), (3, True), (4, True), (4, False)]
NAMES = ["1 rank", "2 ranks", "2 ranks, sockets", "3 ranks", "4 ranks", "4 ranks, sockets"]


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    function = draw(st.sampled_from(sorted(FUNCTIONS)))
    pairs = [(op, dtype) for op in ReduceOp for dtype in DTYPES if possible(function, op, dtype)]
    op, dtype = draw(st.sampled_from(pairs))
    return Case(
        function,
        dtype,
        draw(st.sampled_from(SHAPES)),
        op,
        draw(st.sampled_from(sorted(LAYOUTS))),
        draw(st.sampled_from(sorted(LAYOUTS))),
        draw(st.integers(0, size - 1)),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


def run(pool: RankPool, size: int, shared_memory: bool, num_examples: int) -> None:
    """An example is a few calls, one after the other; after one that fails, the group is replaced."""

    @settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )
    @given(st.lists(cases(size), min_size=1, max_size=6))
    def equals_plain_torch(calls: list[Case]) -> None:
        try:
            pool.run(size, api_cases.check, calls)
        except BaseException:
            pool.run(size, api_cases.open_world, pool.new_file(), shared_memory)
            raise

    pool.run(size, api_cases.open_world, pool.new_file(), shared_memory)
    try:
        equals_plain_torch()
    finally:
        pool.run(size, api_cases.close)


@pytest.mark.parametrize(("size", "shared_memory"), WORLDS, ids=NAMES)
def test_calls_equal_plain_torch(rank_pool: RankPool, size: int, shared_memory: bool) -> None:
    run(rank_pool, size, shared_memory, FEW)


@FULL_ONLY
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "shared_memory"), WORLDS, ids=NAMES)
def test_many_calls_equal_plain_torch(rank_pool: RankPool, size: int, shared_memory: bool) -> None:
    run(rank_pool, size, shared_memory, MANY)
