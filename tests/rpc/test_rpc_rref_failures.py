"""Remote references when their users or owners die, hang, come back late, or are replaced."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
import rpc_victim_forks as forks
import rpc_victim_functions as functions
import rpc_victim_references as references
from full_sets import FULL_ONLY
from peer_timeouts import CALM_S, PROMPT_S, UNIT_S

from rpcdist import rpc
from rpcdist.errors import LeaseExpired, OwnerLost, RpcdistError
from rpcdist.testing import RpcWorld, WorkerPool, eventually

pytestmark = pytest.mark.multiproc

LEASE_S = 3 * UNIT_S


def everything_is_empty(world: RpcWorld, *names: str) -> None:
    left = {name: world[name].run(functions.wait_until_empty) for name in names}
    assert left == dict.fromkeys(names, "")


def test_after_a_regular_run_all_tables_are_empty(worker_pool: WorkerPool) -> None:
    names = ("a", "b", "c", "d")
    world = worker_pool.world(*names, peer_timeout=CALM_S)
    for worker in world:
        for owner in names:
            worker.run(references.hold_remote, owner, 3)
    for worker in world:  # each shares what it holds with everybody
        for other in names:
            worker.run(references.fork_held_to, other)
    for worker in world:
        worker.run(functions.drop)
    everything_is_empty(world, *names)
    world.shutdown()


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with forked DataLoader workers"])
def test_a_killed_user_is_forgotten_when_its_lease_ends(worker_pool: WorkerPool, forked: bool) -> None:
    world = worker_pool.world("owner", "user", "friend", peer_timeout=UNIT_S)
    world["user"].run(references.hold_remote, "owner", 5)  # made by the user
    world["user"].run(references.fork_held_to, "friend")  # shared by the user with a third
    world["friend"].run(functions.drop)
    world["owner"].run(functions.hold, 1)
    world["owner"].run(references.hold_own, 3)
    world["owner"].run(references.fork_held_to, "user")  # shared by the owner
    world["friend"].run(references.hold_remote, "user", 2)  # the victim is an owner, too
    children = world["user"].run(forks.fork_data_loader_workers) if forked else []
    try:
        world["user"].kill()
        killed = time.monotonic()
        assert "user" in world["owner"].run(functions.tables)
        world["owner"].run(functions.drop)
        everything_is_empty(world, "owner")
        assert time.monotonic() - killed < LEASE_S + PROMPT_S
        kind, text, _ = world["friend"].run(functions.error_of, references.use_held)
        assert kind == "OwnerLost" and "'user'" in text
        world["friend"].run(functions.drop)
        everything_is_empty(world, "friend", "owner")
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_a_living_user_keeps_its_values_longer_than_a_lease(worker_pool: WorkerPool) -> None:
    """Idle connections renew leases."""
    world = worker_pool.world("owner", "user", "sharer", peer_timeout=UNIT_S)
    world["user"].run(references.hold_remote, "owner", 1)
    world["sharer"].run(references.hold_remote, "owner", 1)
    world["sharer"].run(references.fork_held_to, "user")
    world["sharer"].run(functions.drop)
    time.sleep(2 * LEASE_S)  # nothing renews the leases but the idle connections
    assert [world["user"].run(references.use_held, index) for index in range(2)] == [0, 0]
    world["user"].run(functions.drop)
    everything_is_empty(world, "owner", "user", "sharer")
    world.shutdown()


def test_a_user_that_comes_back_late_is_told(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("owner", "user", "friend", peer_timeout=UNIT_S)
    world["user"].run(references.hold_remote, "owner", 2)
    world["friend"].run(references.hold_remote, "owner", 1)
    world["user"].stop()
    eventually(lambda: "user" not in world["owner"].run(functions.tables), "the lease ends")
    world["user"].resume()
    error = world["user"].begin(references.use_until, LeaseExpired).error(RpcdistError)
    assert isinstance(error, LeaseExpired) and "'owner'" in str(error)
    world["user"].run(functions.drop)
    everything_is_empty(world, "user")
    # Calls without references work, and the others have not noticed.
    assert world["user"].run(functions.call_until_it_works, "owner") == world["owner"].pid
    assert world["friend"].run(references.use_held) == 0
    world["friend"].run(functions.drop)
    everything_is_empty(world, "owner", "friend")


def test_an_owner_that_comes_back_late_keeps_nothing(worker_pool: WorkerPool) -> None:
    """Its users have given it up; their messages must reach it when it is back."""
    world = worker_pool.world("owner", "user", "friend", peer_timeout=UNIT_S)
    world["user"].run(references.hold_remote, "owner", 3)
    world["user"].run(references.fork_held_to, "friend")
    world["owner"].run(references.hold_own, 2)
    world["owner"].run(references.fork_held_to, "user")
    world["owner"].run(functions.drop)
    world["owner"].stop()
    for name in ("user", "friend"):
        error = world[name].begin(references.use_until, OwnerLost).error(RpcdistError)
        assert isinstance(error, OwnerLost) and error.worker == "owner"
    world["owner"].resume()
    assert world["user"].run(functions.call_until_it_works, "owner") == world["owner"].pid
    everything_is_empty(world, "owner")


def test_a_share_for_a_worker_that_was_never_reached_leaves_nothing(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", peer_timeout=UNIT_S)
    world["b"].kill()
    world["a"].run(references.hold_own, 2)
    kind, _, _ = world["a"].run(functions.error_of, references.fork_held_to, "b")
    assert kind == "WorkerLost"
    world["a"].run(functions.drop)
    everything_is_empty(world, "a")


def test_a_short_break_of_the_connection_is_no_loss(worker_pool: WorkerPool) -> None:
    """A value is asked for again when the connection has broken, until the owner is declared lost."""
    world = worker_pool.world("owner", "user", peer_timeout=CALM_S)
    world["user"].run(references.hold_remote, "owner", 1)
    for _ in range(20):
        world["user"].run(references.use_held_while_the_connection_breaks)
    world["user"].run(functions.drop)
    everything_is_empty(world, "owner", "user")


def test_the_death_of_an_owner_fails_its_references_at_once(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("owner", "user", "friend", peer_timeout=CALM_S)
    world["user"].run(references.hold_remote, "owner", 1)
    world["user"].run(references.fork_held_to, "friend")
    world["owner"].kill()
    for name in ("user", "friend"):
        for use in (references.use_held, references.use_held_by_proxy, references.share_held):
            kind, text, waited_s = world[name].run(functions.error_of, use)
            assert kind == "OwnerLost" and "'owner'" in text, (use, kind, text)
            assert waited_s < PROMPT_S
    for name in ("user", "friend"):
        world[name].run(functions.drop)
    everything_is_empty(world, "user", "friend")


def test_a_parent_that_dies_before_its_child_is_known_leaves_nothing(worker_pool: WorkerPool) -> None:
    """The user shares its references and is killed at once, many times."""
    world = worker_pool.world("owner", "user", "friend", peer_timeout=UNIT_S)
    world["user"].run(references.hold_remote, "owner", 20)
    world["user"].begin(references.fork_held_to_without_waiting, "friend", 20)
    world["user"].kill()
    time.sleep(UNIT_S)  # what it has sent before its end arrives
    world["friend"].run(functions.drop)
    everything_is_empty(world, "owner", "friend")


def test_a_replaced_owner_is_another_process(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "c", peer_timeout=CALM_S)
    world["a"].run(references.hold_remote, "b", 1)
    world["c"].run(references.hold_remote, "b", 1)
    old = world["b"].pid
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == old
    world["b"].kill()
    new = world.join("b", 1).pid
    for name in ("a", "c"):
        assert world[name].run(functions.call_until_it_works, "b") == new
        assert world[name].run(rpc.rpc_sync, 1, functions.pid) == new
        kind, text, _ = world[name].run(functions.error_of, references.use_held)
        assert kind == "OwnerLost" and "'b'" in text
        world[name].run(functions.drop)
        world[name].run(references.hold_remote, "b", 2)  # references to the new one work
        assert world[name].run(references.use_held, 1) == 1
    world["b"].run(references.hold_remote, "a", 1)
    assert world["b"].run(rpc.rpc_sync, "c", functions.add, (1, 2)) == 3
    for worker in world:
        worker.run(functions.drop)
    everything_is_empty(world, "a", "b", "c")
    world.shutdown()


def test_an_rref_after_shutdown(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    world["a"].run(references.hold_remote, "b", 1)
    world.shutdown()
    for use in (references.use_held, references.use_held_by_proxy):
        kind, text, waited_s = world["a"].run(functions.error_of, use)
        assert kind in ("RRefError", "NotInitialized") and waited_s < PROMPT_S, (kind, text)
    world["a"].run(functions.drop)


@pytest.mark.parametrize("limit_s", [4.0, pytest.param(20.0, marks=[pytest.mark.stress, FULL_ONLY])])
def test_references_that_wander_at_random_leave_nothing(worker_pool: WorkerPool, limit_s: float) -> None:
    names = ("a", "b", "c", "d")
    world = worker_pool.world(*names, peer_timeout=CALM_S)
    seed = time.time_ns()
    print(f"seed {seed}")
    wandering = [worker.begin(references.wander, names, limit_s, seed + number) for number, worker in enumerate(world)]
    moves = [pending.result(limit_s + 40.0) for pending in wandering]
    assert min(moves) > 20, moves
    for worker in world:
        worker.run(functions.drop)
    everything_is_empty(world, *names)
    world.shutdown()
