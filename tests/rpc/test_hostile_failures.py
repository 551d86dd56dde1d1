"""For any class of exception, however it is raised: the call ends, with the exception or its name."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from full_sets import FULL
from hostile_functions import KINDS, WAYS, Frozen, fail, raised
from inside_agents import ThreadPool
from peer_timeouts import CALM_S, LIMIT_S

from rpcdist.autograd import BackwardError
from rpcdist.errors import Cancelled, DeadlineExceeded, RemoteError, TransportError
from rpcdist.testing import InProcessCluster

# torch's C++ code asks errors for attributes by it, and since 3.13 Python reports what it drops then.
HAS_ATTRIBUTE = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in PyObject_HasAttrString\(\):pytest.PytestUnraisableExceptionWarning"
)
QUICK = ("frozen", "__setattr__ exits", "__class__", "__str__ exits", "__reduce__", "__init__", "a lock", "SystemExit")


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("caller", "callee", peer_timeout=CALM_S) as cluster:
        yield cluster  # and everybody leaves, which waits for calls without an end


def outcome(cluster: InProcessCluster, way: str, to: str, kind: str) -> BaseException | None:
    """The outcome at the caller within the limit."""
    caught: list[BaseException] = []

    def run() -> None:
        with cluster.use("caller"):
            try:
                WAYS[way](to, kind)
            except BaseException as error:
                caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"{way}, {kind}: no end within {LIMIT_S} s"
    return caught[0] if caught else None


# The exceptions that Python makes of them before our code sees them.
OF_PYTHON = {"StopIteration", "StopAsyncIteration", "CancelledError", "KeyboardInterrupt"}
# `asyncio.run` of the caller asks the error of its coroutine for its class, and never ends.
OF_ASYNCIO = {("await", "__class__"), ("async for", "__class__")}


def check(way: str, kind: str, error: BaseException | None) -> str:
    """The errors in the caller's outcome; empty if there are none."""
    if error is None:
        return "no error"
    expected, got = type(raised(kind)), type(error)
    if issubclass(got, DeadlineExceeded | TransportError):  # RuntimeErrors, too, and what a lost call ends with
        return f"{way}, {kind}: {got.__name__}"
    if way == "then":  # as torch: a RuntimeError is kept, and others are named by one
        is_right = got is expected or (issubclass(got, RuntimeError) and expected.__name__ in str(error))
    elif way == "backward":  # its own hook may end the caller
        is_right = got is expected or (issubclass(got, BackwardError) and expected.__name__ in str(error))
    elif way == "async_execution" and not issubclass(expected, Exception):
        is_right = got is RuntimeError and expected.__name__ in str(error)
    elif kind in OF_PYTHON and issubclass(got, RuntimeError | Cancelled):
        is_right = True
    else:
        is_remote = issubclass(got, RemoteError) and vars(error).get("type_name") == expected.__qualname__
        is_right = is_remote or got is expected or (kind == "a local class" and got.__name__ == "Local")
    if is_right and got is Frozen:
        is_right = error.__dict__ == {"key": "k"} and error.args == ("k",)
    return "" if is_right else f"{way}, {kind}: {got.__name__}"


HERE = [way for way in WAYS if "made again" not in way]  # such an actor lives on another worker than its creator


@HAS_ATTRIBUTE
@pytest.mark.parametrize(("way", "to"), [*((way, "callee") for way in WAYS), *((way, "caller") for way in HERE)])
def test_every_way_to_raise_ends_the_call(cluster: InProcessCluster, way: str, to: str) -> None:
    kinds = [kind for kind in (KINDS if FULL or way == "rpc_sync" else QUICK) if (way, kind) not in OF_ASYNCIO]
    wrong = [check(way, kind, outcome(cluster, way, to, kind)) for kind in kinds]
    assert not any(wrong), list(filter(None, wrong))


@HAS_ATTRIBUTE
@pytest.mark.parametrize(
    "way",
    [
        "coroutine",
        "constructor",
        "async stream",
        "async_execution",
        "coroutine of an actor",
        "actor that is made again",
    ],
)
def test_every_kind_ends_what_a_loop_or_a_reference_answers(cluster: InProcessCluster, way: str) -> None:
    wrong = [check(way, kind, outcome(cluster, way, "callee", kind)) for kind in KINDS]
    assert not any(wrong), list(filter(None, wrong))


def test_what_is_logged_of_a_hostile_error_ends_no_thread(
    cluster: InProcessCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Its truth is not asked for, neither here nor by the formatter of a log."""
    kind = "__eq__, __hash__, __bool__"
    for way in ("constructor", "constructor of an actor", "remote method", "then"):
        assert not check(way, kind, outcome(cluster, way, "callee", kind))
    assert not [record.getMessage() for record in caplog.records if "worker pool" in record.getMessage()]


def test_a_job_whose_error_is_hostile_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool = ThreadPool()
    done = threading.Event()
    pool.submit(fail, "__eq__, __hash__, __bool__")
    pool.submit(done.set)
    assert done.wait(LIMIT_S)
    assert pool.close(LIMIT_S) == [], "a thread that ended by the error would be waited for"
    (record,) = caplog.records
    assert record.exc_info is None and "CompareRaises: k" in record.getMessage()
