"""Names of actors, the end of a creation, and what a reference says of itself."""

from __future__ import annotations

from collections.abc import Iterator

import actor_functions as there
import pytest
from actor_functions import LIMIT_S, Journal, new_gate

from rpcdist import rpc
from rpcdist.errors import ActorNameTaken, ConfigError, RRefError, UnknownActor, WorkerLost
from rpcdist.testing import InProcessCluster, eventually


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", "c") as cluster:
        yield cluster


def fail() -> None:
    raise KeyError("no such actor")


@pytest.mark.parametrize("owner", ["a", "b", "c"])
def test_everybody_finds_an_actor_by_its_name(cluster: InProcessCluster, owner: str) -> None:
    with cluster.use("b"):
        made = rpc.remote(owner, Journal, serial=True, name="journal")
        assert made.rpc_sync().note(1) == 1
        del made  # the name keeps it
    for number, name in enumerate(("a", "b", "c"), 2):
        with cluster.use(name):
            assert rpc.get_actor("journal").rpc_sync().note(number) == number


def test_a_name_that_is_taken_is_refused(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        rpc.remote("b", Journal, serial=True, name="journal")
    with cluster.use("c"):
        with pytest.raises(
            ActorNameTaken, match=r"'b' already has an actor named 'journal'; .*rpc\.get_actor\('journal'"
        ):
            rpc.remote("c", Journal, serial=True, name="journal")
        with pytest.raises(UnknownActor, match=r"'jornal'; rpc\.remote.*Did you mean 'journal'\?"):
            rpc.get_actor("jornal")
        for name in ("", "x" * 1001):
            with pytest.raises(ConfigError, match="1 to 1000 characters"):
                rpc.remote("c", Journal, name=name)


def test_a_creation_that_fails_leaves_the_name_free(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        with pytest.raises(KeyError, match="no such actor"):
            rpc.remote("b", fail, name="journal")
        with pytest.raises(UnknownActor):
            rpc.get_actor("journal")
        assert rpc.remote("b", Journal, name="journal").rpc_sync().note(1) == 1


def test_a_name_ends_with_the_worker_of_its_actor(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Journal, serial=True, name="journal")
        cluster.kill("b")
        with pytest.raises(WorkerLost, match="'b'"):
            actor.rpc_sync().note(1)
        with pytest.raises(UnknownActor):
            rpc.get_actor("journal")
        rpc.remote("c", Journal, serial=True, name="journal")
        assert rpc.get_actor("journal").rpc_sync().note(1) == 1
    cluster.shutdown(graceful=False)


@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_creation_can_be_cancelled(cluster: InProcessCluster, owner: str) -> None:
    with cluster.use("a"):
        gate = new_gate(owner)
        rref = rpc.remote(owner, Journal, (owner,))
        assert there.entered[owner].wait(LIMIT_S)
        assert repr(rref) == f"<RRef of Journal on {owner!r}, not there yet>"
        assert rref.cancel()
        gate.set()
        assert not rref.cancel()
        with pytest.raises(RRefError, match="before its value existed"):
            rref.to_here()
        assert repr(rref) == f"<RRef of Journal on {owner!r}, failed: RRefError>"


def test_what_a_reference_says_of_itself(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        rref = rpc.remote("b", Journal)
        eventually(rref.confirmed_by_owner)
        assert repr(rref) == "<RRef of Journal on 'b', ready>"
        assert not rref.cancel()
        assert repr(rpc.RRef([1])) == "<RRef of list on 'a', ready>"
        failed = rpc.remote("b", fail)
        assert isinstance(failed._get_future().exception(LIMIT_S), KeyError)
        assert repr(failed) == "<RRef of a value on 'b', failed: KeyError>"
