"""Workers that leave by agreement: their connections end one after the other, and nobody opens them again."""

from __future__ import annotations

import threading

from rpcdist import rpc
from rpcdist.testing import InProcessCluster
from rpcdist.testing.limits import LIMIT_S


def test_a_connection_that_ends_by_agreement_is_opened_again_only_for_a_message() -> None:
    with InProcessCluster("a", "b") as cluster:
        assert cluster.run("a", rpc.rpc_sync, "b", abs, (-1,)) == 1
        with cluster.use("a") as agent:
            ended = threading.Event()
            agent.events.broken.listen(lambda *broken: ended.set())
            agent.watch.all_leave({})
            cluster.network.cut("a", "b")
            assert ended.wait(LIMIT_S)
            assert agent.router.peer(1).state == "idle"
            cluster.network.heal("a", "b")
            assert rpc.rpc_sync("b", abs, (-2,)) == 2
