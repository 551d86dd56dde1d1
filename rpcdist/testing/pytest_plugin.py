"""A pytest fixture: RPC workers in the process of the test. In `conftest.py`:

    pytest_plugins = ["rpcdist.testing.pytest_plugin"]

pytest does not load it automatically, since its import takes as long as torch's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rpcdist.testing.in_process_cluster import InProcessCluster

__all__ = ["rpc_cluster"]


@pytest.fixture
def rpc_cluster(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """A new cluster of `worker0`, `worker1` and `worker2`; the functions of `rpcdist.rpc` act as `worker0`.

    `@pytest.mark.parametrize("rpc_cluster", [["trainer", "server"]], indirect=True)` sets other names. A worker that
    is dead at the end of the test is not an error.
    """
    names: list[str] = getattr(request, "param", ["worker0", "worker1", "worker2"])
    cluster = InProcessCluster(*names)
    try:
        with cluster.use(names[0]):
            yield cluster
    finally:
        cluster.close()
