"""A reference whose use failed goes with its last name: the error of that use has no frame that keeps it.

Else the owner would hold the value until the user's garbage collector comes, which in an idle process is never.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from inside_agents import handle_of

from rpcdist import rpc
from rpcdist.errors import RpcdistError
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.testing.limits import LIMIT_S, UNIT_S


class Value:
    def get(self) -> int:
        return 1


def fetch(rref: Any) -> Any:
    return rref.to_here(LIMIT_S)


def share(rref: Any) -> Any:
    return rpc.rpc_sync("c", fetch, (rref,), timeout=LIMIT_S)


USES: dict[str, Callable[[Any], object]] = {
    "the first method": lambda rref: rref.rpc_sync(LIMIT_S).get(),
    "the first method, asynchronous": lambda rref: rref.rpc_async(LIMIT_S).get().wait(),
    "the first method, a reference": lambda rref: rref.remote(LIMIT_S).get().to_here(),
    "its type": lambda rref: rref._get_type(LIMIT_S),
    "fetch": fetch,
    "share": share,
}


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_a_reference_goes_with_its_last_name_though_its_use_failed(allow_pickle: bool) -> None:
    functions = None if allow_pickle else [f"{__name__}:*"]
    with InProcessCluster(
        "a", "b", "c", peer_timeout=UNIT_S, allow_pickle=allow_pickle, allow_functions=functions
    ) as cluster:
        references = {name: cluster.run("a", rpc.remote, "b", Value, (), {}, LIMIT_S) for name in USES}
        actor = cluster.run("a", rpc.remote, "b", Value, (), {}, LIMIT_S)
        handle_of(actor).is_serial = True  # as `serial=True` makes them
        references["a method of an actor"] = actor
        del actor
        for reference in references.values():
            cluster.run("a", reference._get_future().wait)
        del reference
        cluster.kill("b")
        gc.collect()
        gc.disable()
        try:
            seen = {name: use(cluster, name, references.pop(name)) for name in [*references]}
            # A thread that has told of the loss may still have the error in its hands.
            eventually(lambda: not {name for name, rref in seen.items() if rref() is not None}, "all have gone")
        finally:
            gc.enable()


def use(cluster: InProcessCluster, name: str, rref: Any) -> weakref.ref[Any]:
    with pytest.raises(RpcdistError):
        cluster.run("a", USES.get(name, USES["the first method"]), rref)
    return weakref.ref(rref)
