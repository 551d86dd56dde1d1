"""Groups, data parallel training and torch's own engines over NCCL: two ranks that share one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_group_functions as there
import pytest
from gpu_marks import WITH_NCCL

from rpcdist.testing import Worker, WorkerPool, eventually

LIMIT_S = 110.0
pytestmark = WITH_NCCL
PROGRAMS = [
    "collectives",
    "staged",
    "groups",
    "through_gradients",
    "many_streams",
    "ddp_hooks",
    "not_finite",
    "mixed_precision",
    "batch_norm",
    "uneven",
    "zero_redundancy",
    "torch_engines",
    "on_a_tensor_of_the_wrong_device",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}


def start(pool: WorkerPool) -> list[Worker]:
    """NCCL refuses two ranks of one host on one GPU: it takes these for two hosts, which sockets connect."""
    variables = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return [pool.start(f"rank {rank}", {**variables, "NCCL_HOSTID": f"stand-in host {rank}"}) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(module_pool: WorkerPool) -> list[Worker]:
    return start(module_pool)


def run(ranks: list[Worker], url: str, function: Callable[..., object], *args: object) -> None:
    running = [worker.begin(function, rank, url, *args) for rank, worker in enumerate(ranks)]
    for pending in running:
        pending.result(LIMIT_S)


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks(module_pool: WorkerPool, ranks: list[Worker], name: str) -> None:
    run(ranks, module_pool.new_url(), getattr(there, name))


@pytest.mark.parametrize("accumulate", [False, True], ids=["each step", "every other step"])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_data_parallel_training(module_pool: WorkerPool, ranks: list[Worker], options: str, accumulate: bool) -> None:
    run(ranks, module_pool.new_url(), there.ddp, OPTIONS[options], accumulate)


def test_a_rank_that_dies_ends_the_kernel_that_waits_for_it(worker_pool: WorkerPool) -> None:
    ranks, url, entered = start(worker_pool), worker_pool.new_url(), worker_pool.new_file()
    running = [worker.begin(there.waits_for_a_dead_rank, rank, url, entered) for rank, worker in enumerate(ranks)]
    eventually(lambda: Path(entered).exists(), "rank 1 is there", within_s=LIMIT_S)
    ranks[1].kill()
    text, took_s = running[0].result(LIMIT_S)
    assert "rank 1" in text and took_s < 30, (text, took_s)
