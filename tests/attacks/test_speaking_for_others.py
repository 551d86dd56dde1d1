"""A worker that has the token speaks for another one: in gatherings, in the shutdown, and to one that serves."""

from __future__ import annotations

import pytest
from peer_timeouts import CALM_S, LIMIT_S

from rpcdist import rpc
from rpcdist.errors import CallRefused
from rpcdist.rpc._membership.departures import DEPART
from rpcdist.rpc._membership.leader import CONTRIBUTE
from rpcdist.rpc._membership.serving import STOP
from rpcdist.rpc._peers.calling_worker import check_speaks_for
from rpcdist.testing import InProcessCluster

CLAIMS = {
    "a gathering": (CONTRIBUTE, (["a", "b", "c"], "c", "forged")),
    "the shutdown": (DEPART, ("c", False)),
    "a request to stop": (STOP, ("c",)),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_nobody_speaks_for_another_worker(claim: str) -> None:
    function, arguments = CLAIMS[claim]
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:
        with cluster.use("b") as agent:
            with pytest.raises(CallRefused, match="worker 'b' cannot speak for worker 'c'"):
                agent.caller.gather(0, function, arguments, LIMIT_S)
        gathering = [cluster.begin(name, rpc.api._all_gather, f"of {name}") for name in ("a", "b", "c")]
        assert gathering[0].result(LIMIT_S) == {name: f"of {name}" for name in "abc"}


def test_a_name_counts_only_in_calls_that_gather_workers() -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster, cluster.use("b"):
        with pytest.raises(CallRefused, match="a call that gathers nobody cannot speak for worker 'b'"):
            rpc.rpc_sync("a", check_speaks_for, ("b",))


@pytest.mark.parametrize(("allowed", "stops"), [([], False), ([STOP], True)])
def test_where_functions_are_listed_nobody_stops_a_worker_unless_that_is_listed(
    allowed: list[str], stops: bool
) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S, allow_functions=allowed) as cluster:
        serving = cluster.begin("a", rpc.serve)
        with cluster.use("b"):
            if stops:
                rpc.stop_serving("a")
                assert serving.result(LIMIT_S) == "worker 'b' asked for it"
            else:
                with pytest.raises(CallRefused, match=r"does not allow calls of rpcdist.rpc._membership.serving:stop"):
                    rpc.stop_serving("a")
        with cluster.use("a") as agent:
            agent.serving.stop("the test is over")
