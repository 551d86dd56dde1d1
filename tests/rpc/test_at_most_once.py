"""A connection that breaks never repeats a call: with a ledger, at every envelope, in both directions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rpcdist import rpc
from rpcdist.errors import RRefError, WorkerLost
from rpcdist.testing import InProcessCluster, eventually

NUM_ENVELOPES = 14  # of the calls below in one direction, and some

ran: Counter[str] = Counter()


def run_once(call: str) -> str:
    ran[call] += 1
    return call


@rpc.idempotent
def run_again(call: str) -> str:
    ran[call] += 1
    return call


class Owned:
    def run_once(self, call: str) -> str:
        return run_once(call)


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("caller", "callee") as cluster:
        yield cluster


@pytest.mark.parametrize(("source", "target"), [("caller", "callee"), ("callee", "caller")])
def test_calls_run_at_most_once_wherever_the_connection_breaks(
    cluster: InProcessCluster, source: str, target: str
) -> None:
    with cluster.use("caller"):
        owned = rpc.remote("callee", Owned)
        owned.to_here()
        lost: Counter[int] = Counter()  # how often calls that failed had run
        for num_envelopes in range(NUM_ENVELOPES):
            ran.clear()
            broken = cluster.network.break_after(source, target, num_envelopes)
            answered, failed = call_until(broken, owned)
            assert {name: ran[name] for name in answered if ran[name] != 1 and not is_idempotent(name)} == {}
            assert {name: ran[name] for name in failed if ran[name] > 1} == {}
            assert not list(filter(is_idempotent, failed))
            assert all(ran[name] >= 1 for name in answered)
            lost.update(ran[name] for name in failed)
            eventually(is_reached, "the callee is reached again")
        assert lost[0 if source == "caller" else 1] > 0  # requests were lost, or replies
        assert owned.rpc_sync().run_once("after") == "after"


def call_until(broken: threading.Event, owned: rpc.RRef[Owned]) -> tuple[set[str], set[str]]:
    """Makes calls of each kind until the connection has broken; the names of those that were answered, and failed."""
    answered: set[str] = set()
    failed: set[str] = set()
    kinds: dict[str, Callable[[str], str]] = {
        "sync": lambda name: rpc.rpc_sync("callee", run_once, (name,)),
        "remote": lambda name: rpc.remote("callee", run_once, (name,)).to_here(),
        "method": lambda name: owned.rpc_sync().run_once(name),
        "idempotent": lambda name: rpc.rpc_sync("callee", run_again, (name,)),
    }
    for number in range(NUM_ENVELOPES):
        for kind, call in kinds.items():
            name = f"{kind} {number}"
            try:
                assert call(name) == name
                answered.add(name)
            except (WorkerLost, RRefError):
                failed.add(name)
        if broken.is_set():
            return answered, failed
    raise AssertionError("the connection did not break")


def is_idempotent(name: str) -> bool:
    return name.startswith("idempotent")


def is_reached() -> bool:
    try:
        return rpc.rpc_sync("callee", run_once, ("reached",)) == "reached"
    except WorkerLost:
        return False
