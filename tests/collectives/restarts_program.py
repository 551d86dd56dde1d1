"""What `torchrun --max-restarts` starts in `test_restarts.py`: one rank dies in the middle, and all are started again.

    torchrun --nproc-per-node 2 --max-restarts 1 restarts_program.py rpc|torch|groups

In the first attempt rank 1 kills itself once everybody is connected; the second one ends in order. The store of
torchrun's agent outlives both.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch

LIMIT = timedelta(seconds=60)


def die_in_the_first_attempt() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def run_rpc() -> int:
    from rpcdist import rpc

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    total = sum(int(rpc.rpc_sync(f"worker{other}", max, args=(other, 0))) for other in range(size))
    die_in_the_first_attempt()
    rpc.shutdown()
    return total


def run_torch() -> int:
    import torch.distributed as dist

    import rpcdist.collectives.torch_backend  # noqa: F401  (registers the backend)

    dist.init_process_group("rpcdist", timeout=LIMIT)
    return sum_of_ranks(dist.all_reduce, dist.new_group(backend="rpcdist")) + end(dist.destroy_process_group)


def run_groups() -> int:
    from rpcdist import collectives

    collectives.init_process_group("tcp", timeout=LIMIT)
    return sum_of_ranks(collectives.all_reduce, collectives.new_group()) + end(collectives.destroy_process_group)


def sum_of_ranks(all_reduce: object, group: object) -> int:
    total = torch.tensor(int(os.environ["RANK"]))
    all_reduce(total, group=group)  # type: ignore[operator]  # torch's or ours
    die_in_the_first_attempt()
    all_reduce(torch.zeros(1), group=group)  # type: ignore[operator]
    return int(total)


def end(destroy: object) -> int:
    destroy()  # type: ignore[operator]
    return 0


if __name__ == "__main__":
    run = {"rpc": run_rpc, "torch": run_torch, "groups": run_groups}[sys.argv[1]]
    print(f"rank {os.environ['RANK']} of attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} got {run()}", flush=True)
