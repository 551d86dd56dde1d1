"""The cost of a call, counted and not timed: the Python functions that run on the thread that makes it, and waits.

A function costs a few hundred nanoseconds where caches are cold, as they are between two calls. The limits are what
these operations need now, and some more; benchmarks/NOTES.md has the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import call_cost_functions as functions
import pytest
from peer_timeouts import CALM_S

from rpcdist.testing import WorkerPool

pytestmark = pytest.mark.multiproc

Count = Callable[[str], Counter[str]]


LIMITS: dict[Count, tuple[int, str]] = {  # and the method of `Caller` that runs once
    functions.functions_of_a_call: (69, "sync"),
    functions.functions_of_a_method: (93, "sync"),
    functions.functions_of_a_creation: (140, "fetch_created"),
    functions.functions_of_a_turn: (108, "sync"),
    functions.functions_of_a_pass: (480, "sync"),
}


@pytest.mark.parametrize(("count", "limit", "entry"), [(count, *limit) for count, limit in LIMITS.items()])
def test_few_functions_run(worker_pool: WorkerPool, count: Count, limit: int, entry: str) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    found = world["a"].run(count, "b")
    assert found[f"rpcdist.rpc._calling.caller:Caller.{entry}"] == 1
    assert found.total() <= limit, found.most_common()
    world.shutdown()


def test_an_answer_of_an_actor_does_not_wait_for_the_next_turn(worker_pool: WorkerPool) -> None:
    """Those of several may: the answers of a burst are left to the I/O thread, which needs the lock as well."""
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    times = [world["a"].run(functions.answers_before_the_next_turn, "b") for _ in range(4)]
    # A busy machine may let the caller look later; an answer that waits is never the first.
    assert any(answered_at < ended_at for answered_at, ended_at in times), times
    world.shutdown()
