"""What `torchrun --max-restarts 1` starts in `test_torchrun.py` on two nodes: one rank dies, and all are started again.

In the first attempt rank 1 kills itself once everybody is connected: by RPC, by groups, and by torch's groups on our
backend. The second one ends in order. The store of torchrun's agent outlives both, and the agent of rank 0 counts no
restart, because no rank of its own has failed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

import rpcdist.collectives.torch_backend  # noqa: F401  (registers the backend)
from rpcdist import collectives, rpc
from rpcdist.errors import RankLost

LIMIT = timedelta(seconds=60)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    died = Path("rank 1 has died")

    def sum_of_ranks(all_reduce: Callable[..., object], group: object) -> int:
        total = torch.tensor(rank)
        all_reduce(total, group=group)
        return int(total)

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    by_rpc = sum(int(rpc.rpc_sync(f"worker{other}", max, args=(other, 0))) for other in range(size))
    torch.distributed.init_process_group("rpcdist", timeout=LIMIT)
    by_torch = sum_of_ranks(torch.distributed.all_reduce, torch.distributed.new_group(backend="rpcdist"))
    collectives.init_process_group("tcp", timeout=LIMIT)
    by_groups = sum_of_ranks(collectives.all_reduce, collectives.new_group())
    if rank == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collectives.barrier()
    except RankLost:  # in the first attempt; a rank that failed, too, would raise the count of its agent
        threading.Event().wait(LIMIT.total_seconds())  # torchrun ends it
    collectives.destroy_process_group()
    torch.distributed.destroy_process_group()
    rpc.shutdown()
    print(f"rank {rank}, restart count {count}, got {[by_rpc, by_torch, by_groups]}", flush=True)


if __name__ == "__main__":
    main()
