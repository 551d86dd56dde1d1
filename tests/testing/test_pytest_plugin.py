"""The fixture that `rpcdist.testing.pytest_plugin` offers; docs/testing.md uses it through `pytest_plugins`."""

from __future__ import annotations

import threading

import pytest

from rpcdist import rpc
from rpcdist.testing import InProcessCluster
from rpcdist.testing.pytest_plugin import rpc_cluster as rpc_cluster


def test_the_test_is_worker0(rpc_cluster: InProcessCluster) -> None:
    assert rpc.get_worker_info().name == "worker0"
    assert rpc.rpc_sync("worker2", pow, (2, 10)) == 1024
    rpc_cluster.kill("worker1")  # and leaves it dead


@pytest.mark.parametrize("rpc_cluster", [["trainer", "server"]], indirect=True)
def test_other_names(rpc_cluster: InProcessCluster) -> None:
    assert rpc.get_worker_info().name == "trainer"
    assert set(rpc_cluster.names) == {"trainer", "server"}


async def test_a_coroutine_is_worker0(rpc_cluster: InProcessCluster) -> None:
    with rpc_cluster.use("worker0"):
        assert await rpc.rpc_async("worker1", threading.active_count) > 1
