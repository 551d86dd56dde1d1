"""Blocking calls between real processes: destinations, what can be called, deadlines, failures."""

from __future__ import annotations

import asyncio
import functools
import math
import operator
import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import rpc_functions
import rpc_stream_functions
import torch
from parameter_ids import short_repr
from rpc_cluster import Cluster

import rpcdist.rpc as rpc
from rpcdist.errors import (
    BlockingInLoop,
    DeadlineExceeded,
    FunctionNotFound,
    RemoteError,
    SerializationError,
    UnknownWorker,
)

pytestmark = pytest.mark.multiproc

stream_side: Any = rpc_stream_functions
remote_side: Any = rpc_functions  # a call of a coroutine function returns what it returns, not a coroutine

LIMIT_S = 30.0


@pytest.fixture
def key() -> str:
    """A name on the boards that nobody else uses."""
    return uuid.uuid4().hex


def in_threads(num: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(work, range(num), timeout=LIMIT_S))


# ---------------------------------------------------------------- destinations


@pytest.mark.parametrize("kind", ["name", "rank", "WorkerInfo"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_destination_is_a_name_a_rank_or_a_worker_info(cluster: Cluster, rank: int, kind: str) -> None:
    name = cluster.names[rank]
    to: Any = {"name": name, "rank": rank, "WorkerInfo": rpc.get_worker_info(name)}[kind]
    assert rpc.rpc_sync(to, remote_side.whoami) == name
    assert rpc.rpc_async(to, remote_side.whoami).wait(LIMIT_S) == name


@pytest.mark.parametrize("to", ["nobody", 17, -1])
def test_an_unknown_destination_is_named_and_the_known_ones_too(cluster: Cluster, to: str | int) -> None:
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.rpc_stream, rpc.remote):
        with pytest.raises(UnknownWorker, match=r"worker1"):
            call(to, remote_side.nothing)


# ---------------------------------------------------------------- what can be called

COUNTER = remote_side.Counter(10)
CALLABLES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = [
    (remote_side.add, (1, 2), {}, 3),
    (remote_side.add, (), {"a": "x", "b": "y"}, "xy"),
    (remote_side.add_async, (1, 2), {}, 3),
    (remote_side.pack, (1, "b"), {"c": None}, ((1, "b"), {"c": None})),
    (remote_side.nothing, (), {}, None),
    (remote_side.Counter, (4,), {}, remote_side.Counter(4)),
    (COUNTER.increased, (), {"by": 5}, 15),
    (COUNTER.increased_async, (3,), {}, 13),
    (remote_side.Counter.increased, (remote_side.Counter(1), 2), {}, 3),
    (remote_side.Counter.named, ("!",), {}, "Counter!"),
    (remote_side.Tally.named, ("!",), {}, "Tally!"),
    (COUNTER.doubled, (4,), {}, 8),
    (COUNTER, (3,), {}, 30),
    (functools.partial(remote_side.pack, 1, z=2), (3,), {"y": 4}, ((1, 3), {"z": 2, "y": 4})),
    (len, ([1, 2, 3],), {}, 3),
    (max, (3, 9, 4), {}, 9),
    (math.hypot, (3.0, 4.0), {}, 5.0),
    (operator.add, (2, 3), {}, 5),
    (operator.itemgetter(1), ("abc",), {}, "b"),
    (str.upper, ("abc",), {}, "ABC"),
    ("abc".upper, (), {}, "ABC"),
    ([3, 1, 2].index, (2,), {}, 2),
    (dict.fromkeys, ("ab", 0), {}, {"a": 0, "b": 0}),
    (dict, (), {"a": 1}, {"a": 1}),
]


@pytest.mark.parametrize("case", CALLABLES, ids=lambda case: short_repr(case[0]))
def test_what_can_be_called(cluster: Cluster, case: tuple[Any, tuple[Any, ...], dict[str, Any], Any]) -> None:
    function, args, kwargs, expected = case
    for to in ("worker1", cluster.me):
        assert rpc.rpc_sync(to, function, args, kwargs) == expected
    assert COUNTER.value == 10  # it was a copy that changed


def test_torch_functions_and_methods(cluster: Cluster) -> None:
    ones = torch.ones(3)
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
        (torch.add, (ones, 2), ones + 2),
        (torch.ops.aten.mul.Tensor, (ones, ones * 3), ones * 3),
        (torch.ops.aten.neg, (ones,), -ones),
        (torch.Tensor.sum, (ones,), torch.tensor(3.0)),
        (ones.mul, (5,), ones * 5),
        (torch.nn.functional.relu, (-ones,), ones * 0),
        (torch.zeros, (2, 2), torch.zeros(2, 2)),
        (torch.Tensor.__getitem__, (torch.arange(5), slice(1, 3)), torch.tensor([1, 2])),
    ]
    for function, args, expected in cases:
        torch.testing.assert_close(rpc.rpc_sync("worker2", function, args), expected)
    module = torch.nn.Linear(3, 2)
    torch.testing.assert_close(rpc.rpc_sync("worker2", module, (ones,)), module(ones))


def test_arguments_may_be_a_list_or_left_out(cluster: Cluster) -> None:
    assert rpc.rpc_sync("worker1", remote_side.add, [1, 2]) == 3
    assert rpc.rpc_sync("worker1", remote_side.pack, args=None, kwargs=None) == ((), {})
    assert rpc.rpc_sync("worker1", remote_side.pack, [[1]], {"k": [2]}) == (([1],), {"k": [2]})


def test_what_cannot_be_called_is_a_type_error(cluster: Cluster) -> None:
    not_callable: Any = 5
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_sync("worker1", not_callable)
    with pytest.raises(TypeError, match="positional argument"):
        rpc.rpc_sync("worker1", remote_side.add, (1,))


@pytest.fixture
def by_value(cluster: Cluster) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.agent.marshal, "by_value", True)
        yield


def test_lambdas_and_closures_go_by_value_on_request(cluster: Cluster, by_value: None) -> None:
    offset = torch.ones(2)

    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value + 1

    by_coroutine: Any = later

    def items(num: int) -> Iterator[int]:
        yield from (index * index for index in range(num))

    torch.testing.assert_close(rpc.rpc_sync("worker1", lambda x: x + offset, (torch.zeros(2),)), offset)
    assert rpc.rpc_sync("worker1", by_coroutine, (4,)) == 5
    assert list(rpc.rpc_stream("worker1", items, (4,))) == [0, 1, 4, 9]
    assert rpc.rpc_sync("worker1", remote_side.call, (lambda: 7,)) == 7


def test_a_lambda_is_refused_with_advice_by_default(cluster: Cluster) -> None:
    nameless: Callable[[int], int] = lambda value: value  # noqa: E731  # what it is about
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda") as caught:
        rpc.rpc_sync("worker1", nameless, (1,))
    assert any("by value" in note for note in caught.value.__notes__)
    assert rpc.rpc_sync("worker1", remote_side.add, (1, 1)) == 2


# ---------------------------------------------------------------- deadlines


def test_a_call_that_takes_too_long_ends_with_torchs_words(cluster: Cluster, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: rpc.rpc_sync("worker1", remote_side.block_at_gate, (key,), timeout=0.1),
        lambda: rpc.rpc_async("worker1", remote_side.block_at_gate, (key,), timeout=0.1).wait(LIMIT_S),
        lambda: rpc.rpc_sync(cluster.me, remote_side.block_at_gate, (key,), timeout=0.1),
    ]
    for call in calls:
        with pytest.raises(DeadlineExceeded, match=r"RPC ran for more than set timeout \(100 ms\).*block_at_gate"):
            call()
    for name in ("worker1", cluster.me):
        rpc.rpc_sync(name, remote_side.board_put, (key,))


def test_the_deadline_reaches_the_callee(cluster: Cluster) -> None:
    for function in (remote_side.deadline_left_s, remote_side.deadline_left_s_async):
        for name in ("worker1", cluster.me):
            assert 0 < rpc.rpc_sync(name, function, timeout=25) <= 25
            assert rpc.rpc_sync(name, function, timeout=0) == math.inf
            assert 25 < rpc.rpc_sync(name, function) <= 60


def test_nested_calls_inherit_the_deadline(cluster: Cluster) -> None:
    for function in (remote_side.deadline_left_s_at, remote_side.deadline_left_s_at_async):
        assert 0 < rpc.rpc_sync("worker1", function, ("worker2",), timeout=25) <= 25
        assert rpc.rpc_sync("worker1", function, ("worker2",), timeout=0) == math.inf


@pytest.mark.parametrize("name", ["worker1", "worker0"])
def test_an_async_handler_is_cancelled_at_its_deadline(cluster: Cluster, key: str, name: str) -> None:
    with pytest.raises(DeadlineExceeded):
        rpc.rpc_sync(name, remote_side.wait_at_gate, (key,), timeout=2)  # it has begun by then
    assert rpc.rpc_sync(name, remote_side.board_wait, (f"{key} ended",)) == ["CancelledError"]


def test_the_deadline_of_a_call_cancels_what_its_handler_waits_for(cluster: Cluster, key: str) -> None:
    with pytest.raises(DeadlineExceeded):
        rpc.rpc_sync("worker1", remote_side.wait_at_gate_of, ("worker2", key), timeout=3)
    assert rpc.rpc_sync("worker2", remote_side.board_wait, (f"{key} ended",)) == ["CancelledError"]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("function", [remote_side.fail, remote_side.fail_async])
@pytest.mark.parametrize("name", ["worker1", "worker0"])
def test_an_exception_comes_back_as_it_was(cluster: Cluster, name: str, function: Any) -> None:
    for kind in ("value", "key", "os", "unicode", "careful"):
        original = remote_side.RAISERS[kind]()
        with pytest.raises(type(original)) as caught:
            rpc.rpc_sync(name, function, (kind,))
        assert type(caught.value) is type(original)
        assert caught.value.args == original.args
        assert str(caught.value) == str(original)
        assert caught.value.__dict__ == original.__dict__


def test_the_remote_traceback_is_the_cause(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        rpc.rpc_sync("worker1", remote_side.fail_with_cause)
    text = str(caught.value.__cause__)
    assert "On worker 'worker1'" in text and "fail_with_cause" in text and "rpc_functions.py" in text
    assert "KeyError: 'missing'" in text  # the cause of the cause


def test_a_failure_that_passed_through_two_workers_names_both(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        rpc.rpc_sync("worker1", remote_side.fail_at, ("worker2", "value"))
    text = str(caught.value.__cause__)
    assert caught.value.args == ("bad", 3)
    assert "On worker 'worker1'" in text and "On worker 'worker2'" in text


def test_an_exception_group_comes_back(cluster: Cluster) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        rpc.rpc_sync("worker1", remote_side.fail, ("group",))
    assert [type(exc) for exc in caught.value.exceptions] == [ValueError, TypeError]


@pytest.mark.parametrize(
    ("kind", "type_name", "text"), [("odd", "OddError", "odd (7)"), ("locked", "LockedError", "locked")]
)
@pytest.mark.parametrize("function", [remote_side.fail, remote_side.fail_async])
def test_an_exception_that_does_not_pickle_is_caught_by_its_class(
    cluster: Cluster, function: Any, kind: str, type_name: str, text: str
) -> None:
    with pytest.raises(getattr(remote_side, type_name), match=re.escape(text)) as caught:
        rpc.rpc_sync("worker1", function, (kind,))
    assert type(caught.value).__name__ == type_name and "rpc_functions.py" in str(caught.value.__cause__)


@pytest.mark.parametrize("function", [remote_side.fail, remote_side.fail_async])
def test_an_exception_that_cannot_be_rebuilt_is_described_and_caught_by_its_class(
    cluster: Cluster, function: Any
) -> None:
    with pytest.raises(remote_side.HomeboundError, match="home") as caught:
        rpc.rpc_sync("worker1", function, ("homebound",))
    assert isinstance(caught.value, RemoteError)
    assert caught.value.type_name == "HomeboundError" and caught.value.worker == "worker1"
    assert "rpc_functions.py" in caught.value.traceback
    assert rpc.rpc_sync("worker1", remote_side.add, (1, 1)) == 2


@pytest.mark.parametrize("kind", ["exit", "interrupt", "generator exit", "cancelled", "stop"])
@pytest.mark.parametrize("function", [remote_side.fail, remote_side.fail_async])
@pytest.mark.parametrize("name", ["worker1", "worker0"])
def test_an_exception_that_ends_programs_ends_the_call_only(
    cluster: Cluster, name: str, function: Any, kind: str
) -> None:
    with pytest.raises((RuntimeError, StopIteration)) as caught:
        rpc.rpc_sync(name, function, (kind,), timeout=LIMIT_S)
    assert not isinstance(caught.value, DeadlineExceeded)
    assert rpc.rpc_sync(name, remote_side.add, (1, 1)) == 2


@pytest.mark.parametrize("kind", ["exit", "generator exit"])
@pytest.mark.parametrize("name", ["worker1", "worker0"])
def test_a_value_that_such_an_exception_prevented_says_the_same_however_it_is_asked_for(
    cluster: Cluster, name: str, kind: str
) -> None:
    rref: Any = rpc.remote(name, remote_side.fail, (kind,))
    told = []
    for ask in (rref.to_here, rref.to_here, partial(rpc.rpc_sync, "worker2", remote_side.fetch, (rref,))):
        with pytest.raises(RemoteError) as caught:
            ask()
        told.append((caught.value.worker, caught.value.type_name, caught.value.text))
    expected = remote_side.RAISERS[kind]()
    assert told == [(name, type(expected).__name__, str(expected))] * 3


def test_sys_exit_in_a_handler_is_reported_with_its_text(cluster: Cluster) -> None:
    with pytest.raises(RemoteError, match="a handler may not end its worker") as caught:
        rpc.rpc_sync("worker1", remote_side.leave)
    assert caught.value.type_name == "SystemExit"
    assert rpc.rpc_sync("worker1", remote_side.whoami) == "worker1"


def test_an_argument_that_cannot_be_pickled_fails_at_once(cluster: Cluster) -> None:
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(TypeError, match="lock"):
            call("worker1", remote_side.echo, (threading.Lock(),))
    assert rpc.rpc_sync("worker1", remote_side.echo, (1,)) == 1


def test_a_result_that_cannot_be_pickled_fails_the_call(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="lock"):
        rpc.rpc_sync("worker1", remote_side.make_lock)
    assert rpc.rpc_sync("worker1", remote_side.echo, (1,)) == 1


def test_a_value_that_cannot_be_rebuilt_fails_the_call(cluster: Cluster) -> None:
    with pytest.raises(SerializationError, match="at home only"):
        rpc.rpc_sync("worker1", remote_side.make_homebound)  # here
    with pytest.raises(SerializationError, match="at home only"):
        rpc.rpc_sync("worker1", remote_side.echo, (remote_side.Homebound(),))  # there
    assert rpc.rpc_sync("worker1", remote_side.echo, (1,)) == 1


def test_a_function_that_the_callee_does_not_have(cluster: Cluster) -> None:
    rpc.rpc_sync("worker3", remote_side.remove_vanishing)
    assert rpc.rpc_sync("worker2", remote_side.vanishing) == "here"
    with pytest.raises(RuntimeError, match=r"rpc_functions:vanishing.*not found on the callee"):
        rpc.rpc_sync("worker3", remote_side.vanishing)
    assert rpc.rpc_sync("worker3", remote_side.whoami) == "worker3"
    assert issubclass(FunctionNotFound, RuntimeError)


# ---------------------------------------------------------------- threads and loops


def test_calls_from_eight_threads(cluster: Cluster) -> None:
    def work(number: int) -> list[int]:
        to = cluster.names[number % len(cluster.names)]
        return [rpc.rpc_sync(to, remote_side.add, (number * 1000, index)) for index in range(25)]

    assert in_threads(8, work) == [[number * 1000 + index for index in range(25)] for number in range(8)]


def test_echoes_of_16_mib_while_other_calls_go_on(cluster: Cluster) -> None:
    data = torch.arange(4 << 20, dtype=torch.float32)
    echoes = [rpc.rpc_async("worker1", remote_side.echo, (data + index,)) for index in range(4)]
    for index in range(100):
        assert rpc.rpc_sync("worker1", remote_side.add, (index, 1)) == index + 1
    for index, echo in enumerate(echoes):
        assert torch.equal(echo.wait(LIMIT_S), data + index)


async def test_threads_call_while_a_loop_awaits(cluster: Cluster) -> None:
    loop_calls = [rpc.rpc_async("worker1", remote_side.add_async, (index, 1)) for index in range(50)]
    with ThreadPoolExecutor(4) as threads:
        loop = asyncio.get_running_loop()
        blocked = [loop.run_in_executor(threads, rpc.rpc_sync, "worker2", remote_side.add, (n, 2)) for n in range(50)]
        assert [await call for call in loop_calls] == [index + 1 for index in range(50)]
        assert [await call for call in blocked] == [number + 2 for number in range(50)]


async def test_blocking_calls_are_refused_on_a_loop(cluster: Cluster) -> None:
    with pytest.raises(BlockingInLoop, match="await"):
        rpc.rpc_sync("worker1", remote_side.nothing)
    future = rpc.rpc_async("worker1", remote_side.add_async, (1, 2))
    assert await future == 3


@pytest.mark.parametrize("name", ["worker1", "worker0"])
def test_blocking_calls_are_refused_in_an_async_handler(cluster: Cluster, name: str) -> None:
    with pytest.raises(BlockingInLoop, match="await"):
        rpc.rpc_sync(name, remote_side.blocking_in_async, ("worker2",))
