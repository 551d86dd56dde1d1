"""`remote()` and `to_here()` when the owner dies or stops between them, at the deadline, at Ctrl-C, and in threads."""

from __future__ import annotations

import os
import signal

import pytest
import rpc_victim_functions
import rref_fetch_functions as functions
from peer_timeouts import CALM_S

from rpcdist.testing import RpcWorld, WorkerPool, eventually

pytestmark = pytest.mark.multiproc


@pytest.fixture
def world(worker_pool: WorkerPool) -> RpcWorld:
    return worker_pool.world("owner", "user", peer_timeout=CALM_S)


def calls_in_flight(world: RpcWorld) -> int:
    count: int = world["owner"].run(functions.num_handled_calls)
    return count


def test_the_owner_dies_between_the_creation_and_the_fetch(world: RpcWorld) -> None:
    owner = world["owner"]
    assert world["user"].run(functions.create_and_kill, "owner", owner.pid) == "OwnerLost: owner"


def test_the_owner_dies_while_the_user_reads(world: RpcWorld) -> None:
    pending = world["user"].begin(functions.create_and_wait, "owner")
    eventually(lambda: calls_in_flight(world) > 0, "the creation is at the owner")
    world["owner"].kill()
    assert pending.result() == "OwnerLost: owner"


def test_the_deadline_passes_while_the_owner_is_stopped(world: RpcWorld) -> None:
    early, value = world["user"].run(functions.create_and_stop, "owner", world["owner"].pid)
    assert "set timeout (300 ms)" in early and "to_here() of" in early
    assert value == 3
    world.shutdown()


def test_ctrl_c_in_a_fetch_cancels_the_fetch_and_leaves_the_value(world: RpcWorld) -> None:
    user = world["user"]
    pending = user.begin(functions.fetch_until_interrupted, "owner")
    eventually(lambda: calls_in_flight(world) > 0, "the creation is at the owner")
    os.kill(user.pid, signal.SIGINT)
    assert pending.result() == "KeyboardInterrupt"
    world["owner"].run(functions.open_gate)
    assert user.run(functions.fetch_again) == 3
    user.run(rpc_victim_functions.drop)
    for name in ("owner", "user"):
        assert world[name].run(rpc_victim_functions.wait_until_empty) == ""
    world.shutdown()


def test_creations_and_fetches_from_many_threads(world: RpcWorld) -> None:
    assert world["user"].run(functions.fetch_from_threads, "owner", 8, 50) == []
    for name in ("owner", "user"):
        assert world[name].run(rpc_victim_functions.wait_until_empty) == ""
    world.shutdown()
