"""How many writes a remote reference takes: creation and fetch leave together, and are answered together."""

from __future__ import annotations

from typing import Any

import creation_functions as functions
import pytest
import torch
import write_counts
from rpc_cluster import Cluster

import rpcdist.rpc as rpc
from rpcdist.testing import eventually

pytestmark = pytest.mark.multiproc

NUM_STEPS = 50
rpc_sync: Any = rpc.rpc_sync


def is_held_by_nobody_else(name: str) -> bool:
    return not any(held.holders for held in rpc_sync(name, rpc.debug_rrefs))


@pytest.mark.parametrize("name", ["worker1", "worker3"])  # local channel, TCP
def test_a_reference_and_its_value_take_one_write_on_each_side(cluster: Cluster, name: str) -> None:
    """Deletions, acknowledgements and heartbeats go by the clock, and so does the lingering of a creation: some steps
    have more writes.
    """
    rpc_sync(name, write_counts.start_counting)
    try:
        with write_counts.counted_writes():
            here = []
            for _ in range(NUM_STEPS):
                before = write_counts.num_writes()
                rpc.remote(name, write_counts.mark).to_here()
                here.append(write_counts.num_writes() - before)
        there = rpc_sync(name, write_counts.writes_between_marks)
    finally:
        rpc_sync(name, write_counts.stop_counting)
    assert (min(here), min(there)) == (1, 1), (here, there)


def test_creations_that_nobody_waits_for_leave_soon_and_together(cluster: Cluster) -> None:
    marks: Any = rpc.remote("worker1", list)
    with write_counts.counted_writes():
        before = write_counts.num_writes()
        made = [marks.remote().append(number) for number in range(20)]
        eventually(lambda: all(rref.confirmed_by_owner() for rref in made), "the creations arrive")
        assert write_counts.num_writes() - before <= 10
    assert sorted(marks.to_here()) == list(range(20))


def test_a_creation_is_there_before_a_reference_to_it(cluster: Cluster) -> None:
    """The creation lingers, and the reference goes to another worker: a use there need not wait for a tick."""
    for number in range(20):
        rref = rpc.remote("worker1", int, args=(number,))
        assert rpc_sync("worker2", rpc.RRef.to_here, args=(rref,)) == number


RESULTS: dict[str, tuple[Any, Any]] = {  # functions of `remote()`, and what becomes of their results here
    "none": (functions.none, None),
    "plain": (functions.plain, {"a": [1, 2.5, "b"]}),
    "tensor": (functions.tensor, torch.arange(4)),
    "large tensor": (functions.large_tensor, torch.ones(1 << 18)),
    "of a coroutine": (functions.of_a_coroutine, 3),
    "pickled": (functions.pickled, functions.Point(1, 2)),
    "with a reference": (functions.with_a_reference, 5),
    "a stream": (functions.stream, [0, 1, 2]),
}


@pytest.mark.parametrize("name", ["worker1", "worker2", "worker3"])  # local channel, gRPC, TCP
@pytest.mark.parametrize("result", RESULTS)
def test_every_result_comes_with_its_creation_or_after_it(cluster: Cluster, name: str, result: str) -> None:
    function, expected = RESULTS[result]
    rref = rpc.remote(name, function)
    for _ in range(2):  # the second time it is fetched
        value = rref.to_here()
        if isinstance(value, rpc.RRef):
            value = value.to_here()
        if result == "a stream":
            assert list(value) == expected
            break  # it was consumed
        assert torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected
    assert rref.confirmed_by_owner()
    del rref, value
    eventually(lambda: is_held_by_nobody_else(name), "the references are gone")


@pytest.mark.parametrize("name", ["worker1", "worker2", "worker3"])
def test_a_creation_that_fails_fails_the_wait_for_its_value(cluster: Cluster, name: str) -> None:
    rref = rpc.remote(name, functions.failing)
    for _ in range(2):
        with pytest.raises(ValueError, match="no value"):
            rref.to_here()


@pytest.mark.parametrize("name", ["worker1", "worker2", "worker3"])
def test_a_result_that_cannot_be_sent_stays_where_it_is(cluster: Cluster, name: str) -> None:
    rref = rpc.remote(name, functions.not_sendable)
    for _ in range(2):
        with pytest.raises(Exception, match=r"cannot be sent|pickle"):
            rref.to_here()
    assert rref.rpc_sync().is_set() is False
