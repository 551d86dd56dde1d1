"""The values in a function by value (closure, defaults, globals), and in an exception, are sent as arguments are."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peer_timeouts import CALM_S, LIMIT_S
from torch import nn

from rpcdist import autograd, rpc
from rpcdist.errors import CallRefused, SerializationError
from rpcdist.rpc._marshal import marshal as marshal_module
from rpcdist.rpc._values import codec
from rpcdist.testing import InProcessCluster, eventually

GLOBAL = torch.nn.Parameter(torch.full((3,), 2.0))


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S, by_value=True) as cluster:
        yield cluster


def program(source: str) -> dict[str, Any]:
    """The names of a program that no other process can import, as a notebook's."""
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch, "rpc": rpc, "GLOBAL": GLOBAL}
    exec(source, names)
    return names


def holders(weight: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that use a tensor which is not their argument."""
    model = nn.Linear(3, 1, bias=False)
    model.weight = weight
    held = program("def of_globals(): return (GLOBAL * GLOBAL).sum()")
    held["GLOBAL"] = weight

    def with_default(weight: torch.Tensor = weight) -> torch.Tensor:
        return (weight * weight).sum()

    async def later() -> torch.Tensor:
        return (weight * weight).sum()

    @rpc.functions.async_execution
    def in_future() -> Any:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result((weight * weight).sum())
        return done

    return {
        "closure": lambda: (weight * weight).sum(),
        "container": (lambda held: lambda: (held["w"][0] * held["w"][0]).sum())({"w": [weight]}),
        "module": lambda: (model.weight * model(weight)).sum() / 1.0,
        "function in a closure": (lambda inner: lambda: inner())(lambda: (weight * weight).sum()),
        "default": with_default,
        "globals": held["of_globals"],
        "coroutine": later,
        "async_execution": in_future,
    }


@pytest.mark.parametrize("what", list(holders(GLOBAL)))
@pytest.mark.parametrize("to", ["b", "a"])
def test_gradients_flow_to_what_a_function_holds(cluster: InProcessCluster, what: str, to: str) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    function = holders(weight)[what]
    with cluster.use("a"):
        local = holders(weight)[what] if what not in ("coroutine", "async_execution") else holders(weight)["closure"]
        [expected] = torch.autograd.grad(local(), [weight])
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(to, function)
            autograd.backward(context_id, [loss])
            gradients = autograd.get_gradients(context_id)
        assert list(gradients) == [weight] and torch.equal(gradients[weight], expected)


def test_references_in_a_closure_are_references_there(cluster: InProcessCluster) -> None:
    def use(table: Any, own: Any) -> None:
        assert rpc.rpc_sync("c", lambda: (table.rpc_sync().get("a"), own.to_here())) == (1, [5])
        assert rpc.rpc_sync("b", lambda: table.local_value()["a"]) == 1
        assert rpc.remote("c", lambda: table.to_here()).to_here() == {"a": 1}

    with cluster.use("a"):
        use(rpc.remote("b", dict, ([("a", 1)],)), rpc.RRef([5]))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex64])
def test_tensors_of_every_dtype_in_a_closure(cluster: InProcessCluster, dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2, 3]).to(dtype)
    with cluster.use("a"):
        arrived = rpc.rpc_sync("b", lambda: x)
    assert arrived.dtype is dtype and arrived.tolist() == x.tolist()


def test_of_a_view_in_a_closure_its_own_bytes_travel(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    fill = codec.fill_value

    def watched(value: Any, *args: Any, **kwargs: Any) -> Any:
        large = fill(value, *args, **kwargs)
        sizes.append(value.ByteSize() + sum(buffer.size for buffer in large))
        return large

    monkeypatch.setattr(marshal_module, "fill_value", watched)
    row = torch.zeros(1000, 1000)[3]
    with cluster.use("a"):
        assert rpc.rpc_sync("b", lambda: tuple(row.shape)) == (1000,)
    assert len(sizes) == 1 and 4_000 < sizes[0] < 12_000


def test_what_shares_memory_with_an_argument_does_so_there(cluster: InProcessCluster) -> None:
    x = torch.zeros(4)

    def write(given: torch.Tensor) -> list[float]:
        given[0] = 7.0
        return x.tolist()

    with cluster.use("a"):
        assert rpc.rpc_sync("b", write, (x,)) == [7.0, 0.0, 0.0, 0.0]


def test_generators_and_partial_functions_by_value(cluster: InProcessCluster) -> None:
    import functools

    start = torch.tensor(5)

    def count(by: int, times: int) -> Iterator[int]:
        for index in range(times):
            yield int(start) + by * index

    with cluster.use("a"):
        assert list(rpc.rpc_stream("b", functools.partial(count, 2), (3,))) == [5, 7, 9]


def test_the_part_that_cannot_be_sent_is_named(cluster: InProcessCluster) -> None:
    lock = threading.Lock()
    with cluster.use("a"), pytest.raises(TypeError) as raised:
        rpc.rpc_sync("b", lambda: lock.locked())
    assert "function.closure['lock'] is a _thread.lock" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("options", [{"allow_functions": ("builtins:*",)}, {"allow_pickle": False}])
def test_who_takes_names_only_refuses_before_it_unpickles(options: dict[str, Any]) -> None:
    opened: list[int] = []

    class Trap:
        def __reduce__(self) -> Any:
            return opened.append, (1,)

    trap = Trap()
    with InProcessCluster("a", "b", peer_timeout=CALM_S, by_value=True, **options) as cluster, cluster.use("a"):
        if "allow_pickle" in options:
            with pytest.raises(
                SerializationError, match="no name under which the callee can find it, and pickle is off"
            ):
                rpc.rpc_sync("b", lambda: trap)
        else:
            with pytest.raises(CallRefused, match="functions by name only"):
                rpc.rpc_sync("b", lambda: trap)
    assert opened == []


# ---------------------------------------------------------------- exceptions

NOTEBOOK = """
import dataclasses

class OutOfStock(Exception):
    num_made = 0
    def __init__(self, item, *, wanted):
        type(self).num_made += 1
        super().__init__(f"{wanted} {item}")
        self.item = item

@dataclasses.dataclass(frozen=True)
class Order:
    id: int

@dataclasses.dataclass(frozen=True)
class Refused(Exception):
    order: Order

def buy(): raise OutOfStock("apples", wanted=3)
def refuse(): raise ValueError(Order(7))
def freeze(): raise Refused(Order(8))
def many(): raise ExceptionGroup("orders", [OutOfStock("pears", wanted=1), ValueError(Order(9))])
async def later(): raise OutOfStock("plums", wanted=2)
def items():
    yield 1
    raise OutOfStock("figs", wanted=4)
class Shop:
    def __init__(self, opens):
        if not opens: raise OutOfStock("keys", wanted=1)
    def buy(self): raise OutOfStock("apples", wanted=3)
"""


def test_exceptions_of_a_notebook_arrive_as_they_were(cluster: InProcessCluster) -> None:
    cell = program(NOTEBOOK)
    ways: dict[str, Callable[[], Any]] = {
        "3 apples": lambda: rpc.rpc_sync("b", cell["buy"]),
        "2 plums": lambda: rpc.rpc_sync("b", cell["later"]),
        "4 figs": lambda: list(rpc.rpc_stream("b", cell["items"])),
        "1 keys": lambda: rpc.remote("b", cell["Shop"], (False,)).rpc_sync().buy(),
    }
    with cluster.use("a"):
        for number, (text, way) in enumerate(ways.items(), 1):
            with pytest.raises(cell["OutOfStock"]) as caught:
                way()
            assert str(caught.value) == text and caught.value.item == text.split()[1]
            assert caught.value.num_made == number  # where it was raised, and not when it was sent
        with pytest.raises(ValueError, match="Order") as refused:
            rpc.rpc_sync("b", cell["refuse"])
        assert refused.value.args == (cell["Order"](7),)
        with pytest.raises(cell["Refused"]) as frozen:
            rpc.rpc_sync("b", cell["freeze"])
        assert frozen.value.order == cell["Order"](8)
        with pytest.raises(ExceptionGroup) as group:
            rpc.rpc_sync("b", cell["many"])
    first, second = list[Any](group.value.exceptions)
    assert type(first) is cell["OutOfStock"] and first.item == "pears" and second.args == (cell["Order"](9),)


@dataclasses.dataclass
class Failed(Exception):
    """Carries whatever it is given."""

    what: Any


def fail_with(make: str, size: int) -> None:
    raise Failed(torch.arange(size) if make == "tensor" else {"text": "x" * size, "bytes": b"y" * size})


def fail_with_reference(rref: Any) -> None:
    raise Failed([rref, rpc.RRef("made there")])


def all_are_released(cluster: InProcessCluster) -> None:
    """Waits until no worker owns or holds a reference."""
    gc.collect()  # frames that an error has passed
    for name in cluster.names:
        with cluster.use(name) as agent:
            eventually(lambda: not agent.rrefs.debug_rrefs(), f"nothing is left at {name}", LIMIT_S)


def test_an_exception_carries_large_values_as_a_result_does(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        for size in (10, 40_000, 500_000):
            with pytest.raises(Failed) as caught:
                rpc.rpc_sync("b", fail_with, ("tensor", size))
            assert torch.equal(caught.value.what, torch.arange(size))
            with pytest.raises(Failed) as caught:
                rpc.rpc_sync("b", fail_with, ("texts", size))
            assert caught.value.what == {"text": "x" * size, "bytes": b"y" * size}


@pytest.mark.parametrize("mode", ["rpc_sync", "rpc_async", "remote"])
def test_an_exception_carries_references(cluster: InProcessCluster, mode: str) -> None:
    ways: dict[str, Callable[..., Any]] = {
        "rpc_sync": lambda rref: rpc.rpc_sync("b", fail_with_reference, (rref,)),
        "rpc_async": lambda rref: rpc.rpc_async("b", fail_with_reference, (rref,)).wait(),
        "remote": lambda rref: rpc.remote("b", fail_with_reference, (rref,)).to_here(),
    }
    with cluster.use("a"):
        mine = rpc.RRef("mine")
        with pytest.raises(Failed) as caught:
            ways[mode](mine)
        assert [rref.to_here() for rref in caught.value.what] == ["mine", "made there"]
        caught.value.what.clear()
        del caught, mine
    all_are_released(cluster)


runs, is_cancelled = threading.Semaphore(0), threading.Semaphore(0)


def fail_when_cancelled(rref: Any) -> None:
    runs.release()
    assert is_cancelled.acquire(timeout=LIMIT_S)
    fail_with_reference(rref)


def test_a_failure_that_nobody_wants_gives_its_references_back(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        mine = rpc.RRef("mine")
        for _ in range(3):
            call = rpc.rpc_async("b", fail_when_cancelled, (mine,))
            assert runs.acquire(timeout=LIMIT_S)
            call.cancel()
            is_cancelled.release()
        del mine
    all_are_released(cluster)
