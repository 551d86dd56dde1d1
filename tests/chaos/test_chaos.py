"""Workers call each other at random while faults happen to them, and every call is accounted for in a ledger.

A run prints its seed: `RPCDIST_CHAOS_SEED=7` repeats what was drawn. `RPCDIST_CHAOS_S=1800` makes the long ones last
for half an hour.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from chaos_faults import FAULTS, NETWORK_FAULTS, act, faults_from
from chaos_ledger import read_records, verdict_on
from chaos_world import PEER_TIMEOUT_S, ChaosWorld, Place
from full_sets import FULL_ONLY
from network_cable import HOST_ADDRESSES, Cable, cable_between_hosts

from rpcdist.testing import WorkerPool

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(4000)]

CHAOS_S = float(os.environ.get("RPCDIST_CHAOS_S", "60"))
SEED = os.environ.get("RPCDIST_CHAOS_SEED") or str(random.SystemRandom().randrange(2**32))
COORDINATOR = "a"
LONG = pytest.param(CHAOS_S, marks=[pytest.mark.stress, FULL_ONLY], id="long")


@pytest.mark.parametrize("for_s", [pytest.param(0.0, marks=FULL_ONLY, id="one round"), LONG])
def test_every_call_is_accounted_for_on_one_host(worker_pool: WorkerPool, for_s: float) -> None:
    places = {"a": Place(), "b": Place(), "c": Place("tcp"), "d": Place("grpc")}
    _run(ChaosWorld(worker_pool, places, SEED), FAULTS, None, for_s)


@pytest.mark.parametrize("for_s", [pytest.param(0.0, id="one round"), LONG])
def test_every_call_is_accounted_for_between_hosts(worker_pool: WorkerPool, for_s: float) -> None:
    """Two workers on each of two hosts: one pair has the local channel, one has gRPC, and the others have TCP."""
    channels = (("auto", "auto"), ("tcp", "grpc"))
    with cable_between_hosts(SEED) as (cable, namespaces):
        places = [
            Place(channel, namespace, address)
            for namespace, address, of_host in zip(namespaces, HOST_ADDRESSES, channels, strict=True)
            for channel in of_host
        ]
        world = ChaosWorld(worker_pool, dict(zip("abcd", places, strict=True)), SEED)
        _run(world, (*FAULTS, *NETWORK_FAULTS), cable, for_s)


def _run(world: ChaosWorld, kinds: Sequence[str], cable: Cable | None, for_s: float) -> None:
    """Every kind of fault at least once, and more of them until the time is over."""
    print(f"RPCDIST_CHAOS_SEED={SEED}")
    fired: Counter[str] = Counter()
    world.start_all()
    world.call_quietly()
    for name in world.names:
        world.drive(name)
    began_s = time.monotonic()
    faults = faults_from(SEED, kinds, world.names, {COORDINATOR})
    for number in itertools.count():
        if number >= len(kinds) and time.monotonic() - began_s >= for_s:
            break
        fault = next(faults)
        time.sleep(fault.pause_s)  # calls go on as usual in between, and connections come back
        act(fault, world, cable, fired)
    world.wait_until_all_reach_all()
    assert world.stop_driving() > 0
    _replace_then_idle_then_remote(world)
    world.wait_until_nothing_is_held()
    world.leave()
    assert set(fired) == set(kinds) and min(fired.values()) > 0, fired
    verdict = verdict_on(read_records(world.folder), world.ended)
    print(f"{dict(fired)}\n{verdict}")
    assert verdict.problems == []
    assert verdict.num_answered > 100
    for kind in ("call", "large", "outer", "remote", "method", "passed on", "stream", "forward", "awaited"):
        assert verdict.num_issued[kind] > 0, kind


def _replace_then_idle_then_remote(world: ChaosWorld) -> None:
    """A regression: the first reference, long after a worker was replaced and before any call to it."""
    world.kill("b")
    world.start("b")
    world.stop_driving()
    time.sleep(1.5 * PEER_TIMEOUT_S)  # idle for longer than any silence may last
    world.call_quietly()
