"""Tools for testing programs that use rpcdist: worker processes that tests call, kill, stop and replace.

    with WorkerPool() as pool:
        world = pool.world("trainer", "server")
        assert world["trainer"].run(rpc.rpc_sync, "server", my_module.add, (1, 2)) == 3
        world["server"].kill()

Linux and other systems that can fork. Every wait has a time limit; see `rpcdist.testing.limits`.
"""

from rpcdist.testing.forking import preload, server_pid
from rpcdist.testing.limits import LIMIT_S, UNIT_S
from rpcdist.testing.polling import eventually, eventually_async, wait_until_asleep
from rpcdist.testing.program import Program, free_port
from rpcdist.testing.rank_pool import RankPool
from rpcdist.testing.rpc_world import RpcWorld
from rpcdist.testing.worker import Pending, Worker, WorkerEnded, WorkerTimeout, wait_for_any
from rpcdist.testing.worker_pool import WorkerPool

__all__ = [
    "LIMIT_S",
    "UNIT_S",
    "Pending",
    "Program",
    "RankPool",
    "RpcWorld",
    "Worker",
    "WorkerEnded",
    "WorkerPool",
    "WorkerTimeout",
    "eventually",
    "eventually_async",
    "free_port",
    "preload",
    "server_pid",
    "wait_for_any",
    "wait_until_asleep",
]
