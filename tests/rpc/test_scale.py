"""Many workers on one machine: they all join, nobody connects before it has to, and all can call all others at once."""

from __future__ import annotations

import pytest
from _scale import measure_scale
from full_sets import FULL_ONLY

from rpcdist.testing import WorkerPool


@pytest.mark.multiproc
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", [3, pytest.param(16, marks=[pytest.mark.stress, FULL_ONLY])])
def test_all_call_all(num_workers: int, worker_pool: WorkerPool) -> None:
    scale = measure_scale(worker_pool, num_workers)  # raises if an answer is wrong
    # The first one watches the others, as the coordinator, and they may have told it something.
    assert max(state.num_opened for state in scale.joined[1:]) <= 1
    assert [state.num_opened for state in scale.called] == [num_workers - 1] * num_workers
