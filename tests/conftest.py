"""Rules for every test: nothing is left behind, a job token of its own, and repeatable random examples."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import hypothesis
import pytest
import pytest_asyncio
import uvloop
from leak_guard import GRACE_S, LeakGuard, loop_errors
from rpc_cluster import cluster as cluster  # fixtures, for every test
from rpc_cluster import no_agent as no_agent
from rpc_cluster import running_cluster as running_cluster
from transport_nodes import nodes as nodes
from worker_fixtures import add_outputs
from worker_fixtures import fork_server as fork_server
from worker_fixtures import module_pool as module_pool
from worker_fixtures import rank_pool as rank_pool
from worker_fixtures import worker_pool as worker_pool
from world_of_one import world_of_one as world_of_one

from rpcdist.testing.limits import UNIT_S

os.environ.setdefault("PYTEST_TIMEOUT", str(1200 * UNIT_S))  # that of pyproject.toml, on a slow machine more

hypothesis.settings.register_profile("developer", deadline=None)
hypothesis.settings.register_profile("automatic", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("automatic" if os.environ.get("CI") else "developer")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same as in pyproject.toml for programs that tests start, whose output some tests read to the letter.
os.environ["PYTHONWARNINGS"] = ",".join(
    [
        *filter(None, [os.environ.get("PYTHONWARNINGS")]),
        "ignore:This process:DeprecationWarning",
        "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
    ]
)

LOOP_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asynchronous test runs once on each kind of loop that the package may run on."""
    return LOOP_FACTORIES


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports without collections, and tests that collect garbage need not look through all that was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what its workers have written."""
    report = yield
    add_outputs(item, report)
    return report


@pytest.fixture(scope="session", autouse=True)
def job_token() -> Iterator[str]:
    """The job token of this run, in the environment of this process and of all that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        token = secrets.token_hex(16)
        patch.setenv("RPCDIST_TOKEN", token)
        yield token


@pytest.fixture(scope="session")
def leak_guard() -> LeakGuard:
    """Told about processes and threads that outlive a test on purpose: `leak_guard.exempt_child(process.pid)`."""
    return LeakGuard()


@pytest.fixture
def reported_loop_errors() -> Iterator[list[str]]:
    """The errors that event loops report during the test; a test that provokes an error on a loop checks it here and
    clears it.
    """
    with loop_errors() as errors:
        yield errors


@pytest_asyncio.fixture
async def no_task_is_left_behind() -> AsyncIterator[None]:
    """Fails a test that leaves a task on its loop, where pytest-asyncio would cancel it silently."""
    before = asyncio.all_tasks()
    yield
    if left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        _, left = await asyncio.wait(left, timeout=GRACE_S)
    if left:
        pytest.fail("left behind by the test:\n" + "\n".join(map(repr, left)), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(
    request: pytest.FixtureRequest, leak_guard: LeakGuard, reported_loop_errors: list[str]
) -> Iterator[None]:
    """Fails a test that leaves a thread, child process, listening socket or shared memory, or an error on a loop."""
    before = leak_guard.snapshot()
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_is_left_behind")  # here, so that it outlives the test's own fixtures
    yield
    problems = leak_guard.leaks(before)
    problems += [f"an event loop reported: {error}" for error in reported_loop_errors]
    if problems:
        pytest.fail("left behind by the test:\n" + "\n".join(problems), pytrace=False)
