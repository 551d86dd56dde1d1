"""`rpc.call`, `rref.call` and their asynchronous forms: arguments as in a local call. `tests/typing` has the types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from inside_agents import current_agent
from torchscript_functions import compiled, scripted

from rpcdist import rpc
from rpcdist.errors import SerializationError
from rpcdist.rpc import Stream
from rpcdist.rpc._values.pickled import script_function
from rpcdist.testing import InProcessCluster
from rpcdist.transport import Session


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int, *, times: int = 1) -> int:
        self.count += number * times
        return self.count

    async def add_later(self, number: int) -> int:
        return self.add(number)

    def names(self) -> Iterator[str]:
        yield type(self).__name__


class Doubling(Counter):
    def add(self, number: int, *, times: int = 1) -> int:
        return super().add(number, times=2 * times)


def join(*words: str, by: str = " ") -> str:
    return by.join(words)


async def join_later(*words: str) -> str:
    return join(*words)


async def words_of(text: str) -> AsyncIterator[str]:
    for word in text.split():
        yield word


def script_of_another_name() -> Any:
    def sum_of(x: torch.Tensor, number: int) -> torch.Tensor:
        return x + number

    return compiled(sum_of)


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b") as cluster:
        yield cluster


@pytest.mark.parametrize("make", [lambda: scripted, script_of_another_name])
def test_functions_of_torchscript(cluster: InProcessCluster, make: Any) -> None:
    """Those of a module go by its name for them, others by the name under which TorchScript compiled them."""
    function, ones = make(), torch.ones(2)
    with cluster.use("a"):
        assert rpc.rpc_sync("b", function, (ones, 3)).tolist() == [4, 4]
        assert rpc.rpc_async("b", function, (ones,), {"number": 4}).wait().tolist() == [5, 5]
        assert rpc.remote("b", function, (ones, 5)).to_here().tolist() == [6, 6]
        with pytest.raises(RuntimeError, match="missing value for argument 'number'"):
            rpc.rpc_sync("b", function, (ones,))


def test_a_function_of_torchscript_that_the_callee_has_not_compiled_is_named() -> None:
    with pytest.raises(SerializationError, match=r"this process has no TorchScript function '__torch__\.nowhere'"):
        script_function("__torch__.nowhere")


def test_functions(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        assert rpc.call("b", join, "x", "y", by="-") == "x-y"
        assert rpc.call("b", join_later, "x", "y") == "x y"
        assert rpc.call_async("b", join, "x").wait() == "x"
        stream = rpc.call("b", words_of, "x y")
        assert isinstance(stream, Stream) and list(stream) == ["x", "y"]


@pytest.mark.parametrize("owner", ["a", "b"])
def test_methods(cluster: InProcessCluster, owner: str) -> None:
    with cluster.use("a"):
        counter = rpc.remote(owner, Counter, (1,))
        assert counter.call(Counter.add, 2, times=2) == 5
        assert counter.call(Counter.add_later, 1) == 6
        assert counter.call_async(Counter.add, 1).wait() == 7
        assert list(counter.call(Counter.names)) == ["Counter"]


async def test_await(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        counter = rpc.remote("b", Counter)
        assert await counter.call_async(Counter.add_later, 2) == 2
        assert await rpc.call_async("b", join_later, "x", "y") == "x y"


def test_the_method_of_a_subclass_runs(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        assert rpc.remote("b", Doubling).call(Counter.add, 1) == 2


def test_what_is_no_method_is_refused_by_name(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        counter = rpc.remote("b", Counter)
        others: list[Any] = [join, Counter().add, lambda counter: counter.add(1)]
        for function in others:
            with pytest.raises(TypeError, match=r"needs a method, such as Counter\.add.*rpc\.call\(rref\.owner\(\)"):
                counter.call(function)


def test_dir_shows_public_names_only() -> None:
    assert set(dir(rpc)) == set(rpc.__all__)
    assert not [name for name in dir(rpc) if name.startswith("_")]
    assert rpc.__doc__ is not None and "rpc.rpc_sync(" in rpc.__doc__


def test_the_references_of_a_call_that_was_not_sent_are_returned_once(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[object] = []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def call() -> None:
        rpc.rpc_sync("b", join)  # from now on, this thread sends its calls itself
        calls = current_agent().caller.calls
        monkeypatch.setattr(calls, "_give_back", lambda shares: returned.extend(shares or ()))
        monkeypatch.setattr(current_agent().marshal, "give_back", calls._give_back)
        monkeypatch.setattr(Session, "_send_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_sync("b", id, (rpc.RRef("a value"),))
        monkeypatch.undo()

    cluster.run("a", call)
    assert len(returned) == 1
