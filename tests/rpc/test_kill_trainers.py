"""Of three trainers one is killed at a random moment, and a new process takes its place: everybody finishes."""

from __future__ import annotations

import random

import kill_functions as job
import pytest
from full_sets import FULL_ONLY
from peer_timeouts import CALM_S, LIMIT_S

from rpcdist import rpc
from rpcdist.testing import RpcWorld, WorkerPool, eventually
from rpcdist.testing.worker_pool import join

pytestmark = pytest.mark.multiproc

TRAINERS = ("t0", "t1", "t2")
NAMES = ("server", *TRAINERS, "observer")  # the observer asks and tells the server, while the others are busy


@pytest.mark.parametrize("num_rounds", [3, pytest.param(20, marks=[pytest.mark.stress, FULL_ONLY])])
@pytest.mark.timeout(600)
def test_everybody_finishes_whoever_is_killed(worker_pool: WorkerPool, num_rounds: int) -> None:
    chance = random.Random(7)
    world = worker_pool.new_world(len(NAMES), peer_timeout=CALM_S)
    for round_ in range(num_rounds):
        if round_ == 0:
            joining = [world.begin_join(name, rank) for rank, name in enumerate(NAMES)]
        else:  # the same processes, in a new job
            world.url = worker_pool.new_url()
            arguments = {"rpc_timeout": LIMIT_S, "peer_timeout": CALM_S}
            joining = [
                world[name].begin(join, name, rank, len(NAMES), world.url, **arguments)
                for rank, name in enumerate(NAMES)
            ]
        for pending in joining:
            pending.result()
        _kill_one(world, chance.choice(TRAINERS), num_steps=chance.randrange(200), serves=round_ % 2 == 1)


def _kill_one(world: RpcWorld, victim: str, num_steps: int, serves: bool) -> None:
    """One round: the trainer is killed after so many steps. The server waits in `shutdown`, or first in `serve`."""
    server = world["server"]
    server.run(job.reset)
    serving = server.begin(rpc.serve) if serves else None
    closing = None if serves else server.begin(rpc.shutdown)
    steps = {name: world[name].begin(job.train) for name in TRAINERS}
    eventually(lambda: _steps_of(world) >= num_steps, f"the trainers have made {num_steps} steps")
    world[victim].kill()
    world.join(victim, 1 + TRAINERS.index(victim))
    steps[victim] = world[victim].begin(job.train)
    begun = _steps_of(world)
    eventually(lambda: _steps_of(world) > begun + 10, "the trainers go on")
    world["observer"].run(rpc.rpc_sync, "server", job.release)
    for name in TRAINERS:
        assert steps[name].result() > 0
    if serving is not None:
        world["observer"].run(rpc.stop_serving, "server")
        assert serving.result() == "worker 'observer' asked for it"
        closing = server.begin(rpc.shutdown)
    assert closing is not None
    leaving = [closing, *(world[name].begin(rpc.shutdown) for name in NAMES[1:])]
    assert [pending.result() for pending in leaving] == [{}] * len(NAMES)


def _steps_of(world: RpcWorld) -> int:
    return int(world["observer"].run(rpc.rpc_sync, "server", job.num_steps))
