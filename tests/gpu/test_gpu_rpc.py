"""Calls, references, distributed autograd, remote modules and pipelines with tensors on a GPU that workers share."""

from __future__ import annotations

from collections.abc import Iterator

import gpu_rpc_functions
import pytest
from gpu_marks import WITH_A_GPU

from rpcdist.testing import RpcWorld, WorkerPool

pytestmark = WITH_A_GPU
MAP = {"cuda:0": "cuda:0"}
PROGRAMS = [
    "values",
    "other_streams",
    "without_a_map",
    "maps_of_one_call",
    "references",
    "memory",
    "autograd_smart",
    "autograd_fast",
    "remote_modules",
    "pipelines",
    "parameter_servers",
]


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    """Alice has a map for bob, by which bob's results come back, and one for dave that is wrong; nobody has one for
    carol."""
    world = module_pool.new_world(4)
    maps = {"alice": {"bob": MAP, "dave": {"cuda:0": "cuda:7"}}, "bob": {}, "carol": {}, "dave": {}}
    joining = [world.begin_join(name, rank, device_maps=maps[name]) for rank, name in enumerate(maps)]
    for pending in joining:
        pending.result()
    yield world
    world.shutdown()


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_tensors_on_the_gpu(world: RpcWorld, name: str) -> None:
    world["alice"].run(getattr(gpu_rpc_functions, name))
