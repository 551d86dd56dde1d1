"""Functions that run on the thread that reads their calls, without the pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from rpcdist import rpc
from rpcdist.rpc._peers.network import calling_session
from rpcdist.rpc.functions import runs_on_reader
from rpcdist.testing import InProcessCluster


class Stored:
    """The records of calls: the value, the name of the thread, and whether the session of the call was known."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, str, bool]] = []


stored = Stored()


@runs_on_reader
def store(value: object) -> None:
    if isinstance(value, str):
        raise ValueError(f"no place for {value}")
    stored.calls.append((value, threading.current_thread().name, calling_session.get() is not None))


class Unplain:
    """Travels as a pickle."""


@pytest.fixture
def calls() -> Iterator[list[tuple[object, str, bool]]]:
    stored.calls.clear()
    yield stored.calls
    stored.calls.clear()


@pytest.fixture
def cluster(no_agent: None) -> Iterator[InProcessCluster]:
    with InProcessCluster("ada", "bob") as cluster, cluster.use("ada"):
        yield cluster


def test_the_second_call_runs_where_it_is_read(
    cluster: InProcessCluster, calls: list[tuple[object, str, bool]]
) -> None:
    tensor = torch.arange(50_000.0)
    for value in (1, 2, tensor):
        rpc.rpc_sync("bob", store, (value,))
    assert [(name.startswith("rpcdist-worker"), known) for _, name, known in calls] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert torch.equal(torch.as_tensor(calls[2][0]), tensor)


@pytest.mark.parametrize("value", [Unplain(), list(range(100_000))], ids=["a pickle", "many values"])
def test_what_is_slow_to_decode_goes_to_the_pool(
    cluster: InProcessCluster, calls: list[tuple[object, str, bool]], value: object
) -> None:
    for each in (1, 2, value):
        rpc.rpc_sync("bob", store, (each,))
    assert [name.startswith("rpcdist-worker") for _, name, _ in calls] == [True, False, True]


def test_its_error_is_that_of_the_call(cluster: InProcessCluster, calls: list[tuple[object, str, bool]]) -> None:
    rpc.rpc_sync("bob", store, (1,))
    with pytest.raises(ValueError, match="no place for luggage"):
        rpc.rpc_sync("bob", store, ("luggage",))
    rpc.rpc_sync("bob", store, (2,))
    assert [value for value, _, _ in calls] == [1, 2]


def test_a_name_that_leads_to_another_function_now_goes_to_the_pool(
    cluster: InProcessCluster, calls: list[tuple[object, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc.rpc_sync("bob", store, (1,))

    def other(value: object) -> str:
        return threading.current_thread().name

    other.__qualname__ = "store"
    monkeypatch.setattr(f"{__name__}.store", other)
    assert rpc.rpc_sync("bob", other, (2,)).startswith("rpcdist-worker")
    assert len(calls) == 1


def test_remote_makes_its_result_in_the_pool(cluster: InProcessCluster, calls: list[tuple[object, str, bool]]) -> None:
    rpc.rpc_sync("bob", store, (1,))
    assert rpc.remote("bob", store, (2,)).to_here() is None
    assert [name.startswith("rpcdist-worker") for _, name, _ in calls] == [True, True]
