"""Memory of GPUs that one process lends to another: tensors go from GPU to GPU, in order, and no host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gpu_memory_functions
import pytest
import torch
from full_sets import FULL
from gpu_marks import WITH_NCCL

from rpcdist.testing import RpcWorld, WorkerPool

pytestmark = WITH_NCCL
NUM_DEATHS = 50 if FULL else 5


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    world = module_pool.new_world(2)
    for pending in [world.begin_join(name, rank) for rank, name in enumerate(("alice", "bob"))]:
        pending.result()
    yield world
    world.shutdown()


@pytest.mark.parametrize("program", gpu_memory_functions.PROGRAMS, ids=lambda program: program.__name__)
def test_from_gpu_to_gpu(world: RpcWorld, program: Callable[[], None]) -> None:
    world["alice"].run(program)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs")
def test_on_another_gpu(world: RpcWorld) -> None:
    world["alice"].run(gpu_memory_functions.on_another_gpu)


@pytest.mark.parametrize("channel", ["auto", "tcp"])
def test_without_shared_memory_of_gpus(module_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, channel: str) -> None:
    """As between hosts, over TCP; on one host, tensors also travel in shared memory."""
    monkeypatch.setenv("RPCDIST_CHANNELS", channel)
    world = module_pool.new_world(2)
    for pending in [world.begin_join(name, rank, _channels=["basic"]) for rank, name in enumerate(("alice", "bob"))]:
        pending.result()
    world["alice"].run(gpu_memory_functions.through_the_host)
    world.shutdown()


def test_a_process_that_is_killed_takes_nobody_down(worker_pool: WorkerPool) -> None:
    """Some times, as one that joins again with the same name."""
    world = worker_pool.new_world(None)
    world.begin_join("boss", 0).result()
    for _ in range(NUM_DEATHS):
        world.begin_join("bob", 1).result()
        world["boss"].run(gpu_memory_functions.lose, "bob")
        world["bob"].kill()
