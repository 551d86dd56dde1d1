"""Fixtures of worker processes, for one test, one module or the whole run; a test that fails shows their output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest
from leak_guard import LeakGuard

from rpcdist.testing import RankPool, WorkerPool, preload, server_pid

__all__ = ["add_outputs", "fork_server", "module_pool", "rank_pool", "worker_pool"]


class HasOutputs(Protocol):
    def outputs(self) -> str: ...


SHOWN = pytest.StashKey[HasOutputs]()
OUTPUT_TAIL_CHARS = 20_000


@pytest.fixture(scope="session")
def fork_server(job_token: str, leak_guard: LeakGuard) -> None:
    """The process that all workers are forked from; it outlives the tests."""
    preload("torch._dynamo")  # the first optimizer in a process imports it, which takes 1 s there
    # The modules of tests, which their workers import: 90 ms.
    preload("pytest", "hypothesis", "psutil", "rpcdist.parallel", "rpcdist.optim", "torch.distributed.tensor")
    leak_guard.exempt_child(server_pid())


@pytest.fixture
def worker_pool(fork_server: None, request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Workers of one test."""
    yield from shown_pool(request)


@pytest.fixture(scope="module")
def module_pool(fork_server: None, request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Workers of one module: they outlive what its tests do to them."""
    yield from shown_pool(request)


@pytest.fixture(scope="session")
def rank_pool(
    fork_server: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    """Workers that act as the ranks of groups in all tests."""
    flight_recorder = str(tmp_path_factory.mktemp("flight_recorder"))
    with RankPool({"RPCDIST_FLIGHT_RECORDER_DIR": flight_recorder}) as pool:
        request.node.stash[SHOWN] = pool
        yield pool


def shown_pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        request.node.stash[SHOWN] = pool
        yield pool
        del request.node.stash[SHOWN]


def add_outputs(item: pytest.Item, report: pytest.TestReport) -> None:
    """Adds what the workers of the test, of its module and of the run have written to the report of a failure."""
    for node in item.listchain():
        pool = node.stash.get(SHOWN, None)
        if report.failed and pool is not None and (text := pool.outputs()):
            report.sections.append(("output of the workers", text[-OUTPUT_TAIL_CHARS:]))
