"""Methods through references: of any object, whatever its class; special methods are called by their names."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from actor_functions import LIMIT_S, new_gate
from actor_functions import gates as gates
from torch import nn

from rpcdist import rpc
from rpcdist.errors import CallRefused
from rpcdist.rpc import RRef
from rpcdist.testing import InProcessCluster


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b") as cluster:
        yield cluster


# ---------------------------------------------------------------- classes that cannot travel


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))  # type: ignore[no-any-return]


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))


def of_a_local_class() -> object:
    class Local:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        async def later(self, x: int) -> int:
            return x + 1

        @rpc.functions.async_execution
        def by_a_future(self, x: int) -> rpc.Future[int]:
            return rpc.rpc_async("a", operator.add, (x, 2))

        def items(self, n: int) -> Iterator[int]:
            yield from range(n)

    Local.__module__ = "a_module_that_only_the_owner_has"
    return Local()


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("make", [weight_normed, traced, of_a_local_class])
def test_the_class_stays_at_its_owner(cluster: InProcessCluster, make: Any, serial: bool) -> None:
    with cluster.use("a"):
        rref = rpc.remote("b", make, serial=serial)
        assert rref.rpc_sync().forward(torch.ones(3)).shape in [(2,), (3,)]
        assert rref.rpc_async().forward(torch.ones(3)).wait().ndim == 1
        assert rref.remote().forward(torch.ones(3)).to_here().ndim == 1


def test_how_a_method_runs_is_the_owners_business(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        rref: RRef[Any] = rpc.remote("b", of_a_local_class)
        for proxy in (rref.rpc_sync(), rref.remote()):
            results = [proxy.later(1), proxy.by_a_future(1)]
            assert [result.to_here() if isinstance(result, RRef) else result for result in results] == [2, 3]
        assert list(rref.rpc_sync().items(3)) == [0, 1, 2]


def test_a_lock_is_an_object_like_others(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        lock: RRef[Any] = rpc.remote("b", threading.Lock)
        assert lock.rpc_sync().acquire() is True
        assert lock.rpc_sync().locked() is True
        lock.rpc_sync().release()
        assert lock.rpc_sync().locked() is False


def test_peers_cannot_run_a_method_of_what_is_no_reference(cluster: InProcessCluster) -> None:
    from rpcdist.rpc._rref import proxied

    with cluster.use("a"):
        for function in (proxied._local_invoke, proxied._invoke_in_turn):
            with pytest.raises((AttributeError, ValueError, CallRefused)):
                rpc.rpc_sync("b", function, ("text", "upper", (), {}))


# ---------------------------------------------------------------- `remote()` returns at once


class Net(nn.Module):
    def __init__(self, gate: str | None = None) -> None:
        super().__init__()
        if gate is not None:
            assert gates[gate].wait(LIMIT_S)
        self.layer = nn.Linear(3, 2)
        self.number = 5

    def __getattr__(self, name: str) -> Any:
        return (lambda x: x + 1) if name == "made_up" else super().__getattr__(name)

    def twice(self, x: int) -> int:
        return 2 * x


@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.parametrize("serial", [False, True])
async def test_a_reference_to_a_result_is_there_before_the_object_is(
    cluster: InProcessCluster, owner: str, serial: bool
) -> None:
    with cluster.use("a"):
        gate = new_gate(owner)
        net: RRef[Net] = rpc.remote(owner, Net, (owner,), serial=serial)
        first = net.remote().twice(1)
        second = net.rpc_async().twice(2)
        assert not second.done()
        gate.set()
        assert (await first, await second) == (2, 4)


@pytest.mark.parametrize("serial", [False, True])
def test_what_is_no_method_of_the_class(cluster: InProcessCluster, serial: bool) -> None:
    with cluster.use("a"):
        net: RRef[Any] = rpc.remote("b", Net, serial=serial)
        x = torch.ones(3)
        expected = net.rpc_sync().layer(x)
        assert torch.equal(net.remote().layer(x).to_here(), expected)
        assert torch.equal(net.rpc_async().layer(x).wait(), expected)
        assert net.remote().made_up(1).to_here() == 2
        assert net.remote().number().to_here() == net.rpc_sync().number() == 5
        with pytest.raises(AttributeError, match="missing"):
            net.remote().missing().to_here()


# ---------------------------------------------------------------- special methods


class Table:
    """Has all kinds of special methods; those that change it say so in `log`."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {"a": 1}
        self.log: list[str] = []
        self.width = 1

    def __setitem__(self, key: str, value: object) -> None:
        self.rows[key] = value

    def __getitem__(self, key: str) -> Any:
        return self.rows[key]

    def __delitem__(self, key: str) -> None:
        del self.rows[key]

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return iter(list(self.rows))

    def __next__(self) -> int:
        return 5

    def __enter__(self) -> str:
        return "entered"

    def __exit__(self, *of_error: object) -> bool:
        return True

    def __call__(self, x: int) -> int:
        return x + 1

    def __add__(self, other: int) -> int:
        return 10 + other

    def __rsub__(self, other: int) -> int:
        return other - 10

    def __imul__(self, other: int) -> int:
        return 10 * other

    def __neg__(self) -> int:
        return -10

    def __int__(self) -> int:
        return 10

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return bool(other == "equal")

    def __lt__(self, other: int) -> bool:
        return other > 10

    def __hash__(self) -> int:
        return 77

    def __str__(self) -> str:
        return "a table"

    def __repr__(self) -> str:
        return "<Table>"

    def __format__(self, spec: str) -> str:
        return f"a table as {spec}"


SPECIAL: dict[str, tuple[tuple[Any, ...], object]] = {
    "__getitem__": (("a",), 1),
    "__setitem__": (("b", 2), None),
    "__contains__": (("b",), True),
    "__len__": ((), 2),
    "__delitem__": (("b",), None),
    "__next__": ((), 5),
    "__enter__": ((), "entered"),
    "__exit__": ((None, None, None), True),
    "__call__": ((1,), 2),
    "__add__": ((1,), 11),
    "__rsub__": ((1,), -9),
    "__imul__": ((2,), 20),
    "__neg__": ((), -10),
    "__int__": ((), 10),
    "__bool__": ((), False),
    "__eq__": (("equal",), True),
    "__ne__": (("equal",), False),
    "__lt__": ((11,), True),
    "__hash__": ((), 77),
    "__str__": ((), "a table"),
    "__repr__": ((), "<Table>"),
    "__format__": (("text",), "a table as text"),
    "__setattr__": (("width", 3), None),
    "__getattribute__": (("width",), 3),
}


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("mode", ["rpc_sync", "rpc_async", "remote"])
def test_special_methods_are_called_by_their_names(cluster: InProcessCluster, mode: str, serial: bool) -> None:
    with cluster.use("a"):
        table: RRef[Table] = rpc.remote("b", Table, serial=serial)
        found = {}
        for name, (args, _) in SPECIAL.items():
            result = getattr(getattr(table, mode)(), name)(*args)
            found[name] = result.wait() if mode == "rpc_async" else result.to_here() if mode == "remote" else result
        assert found == {name: expected for name, (_, expected) in SPECIAL.items()}
        assert list(table.rpc_sync().__iter__()) == ["a"]


def test_special_methods_of_an_actor_that_is_made_again(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Table, serial=True, max_restarts=1)
        actor.rpc_sync().__setitem__("b", 2)
        assert actor.rpc_async().__contains__("b").wait() is True
        assert actor.rpc_sync().__eq__("equal") is True


def test_the_proxy_itself_is_an_object_like_others(cluster: InProcessCluster) -> None:
    """Python and its libraries ask for special methods, too: these are the proxy's, and no call."""
    with cluster.use("a"):
        table: RRef[Table] = rpc.remote("b", Table)
        proxy: Any = table.rpc_sync()
        assert repr(proxy).startswith("<rpc_sync proxy of <RRef") and f"{proxy}" == str(proxy) == repr(proxy)
        assert proxy == proxy and proxy != table.rpc_sync() and len({proxy, proxy}) == 1
        assert (
            not hasattr(proxy, "__deepcopy__") and not hasattr(proxy, "__array__") and not hasattr(proxy, "__wrapped__")
        )
        assert copy.copy(proxy).__len__() == 1
        with pytest.raises((TypeError, pickle.PicklingError, RuntimeError)):
            pickle.dumps(proxy)
        with pytest.raises(TypeError):
            proxy["a"]
        with pytest.raises(AttributeError, match="width"):
            proxy.width = 3  # it would stay here, and nobody would hear of it
