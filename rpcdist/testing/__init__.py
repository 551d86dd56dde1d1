"""Tools for testing programs that use rpcdist: worker processes, and workers in one process on a network in memory.

    with WorkerPool() as pool:
        world = pool.world("trainer", "server")
        assert world["trainer"].run(rpc.rpc_sync, "server", my_module.add, (1, 2)) == 3
        world["server"].kill()

    with InProcessCluster("trainer", "server") as cluster:
        assert cluster.run("trainer", rpc.rpc_sync, "server", my_module.add, (1, 2)) == 3
        cluster.network.cut("trainer", "server")

Linux and other systems that can fork. Every wait has a time limit; see `rpcdist.testing.limits`.
"""

from rpcdist.testing.in_process_cluster import InProcessCluster
from rpcdist.testing.limits import LIMIT_S, UNIT_S, eventually, eventually_async, wait_until_asleep
from rpcdist.testing.memory_network import MemoryNetwork
from rpcdist.testing.program import Program, free_port
from rpcdist.testing.worker import Pending, Worker, WorkerEnded, WorkerTimeout, preload, server_pid, wait_for_any
from rpcdist.testing.worker_pool import RankPool, RpcWorld, WorkerPool

__all__ = [
    "LIMIT_S", "UNIT_S", "InProcessCluster", "MemoryNetwork", "Pending", "Program", "RankPool", "RpcWorld", "Worker",
    "WorkerEnded", "WorkerPool", "WorkerTimeout", "eventually", "eventually_async", "free_port", "preload",
    "server_pid", "wait_for_any", "wait_until_asleep",
]  # fmt: skip
