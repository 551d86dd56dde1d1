"""A worker of torchrun agents that come and go: it works until the world has the wanted size, and then ends.

    torchrun --nnodes 2:3 ... growing_program.py rpcdist|backend WANTED_WORLD_SIZE

Its ranks have to meet again in each world, whatever an earlier one has left in the store.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

LIMIT = timedelta(seconds=120)


def main(kind: str, wanted: int) -> None:
    reduce: Any
    end: Any
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind == "rpcdist":
        from rpcdist import collectives, rpc

        collectives.init_process_group(timeout=LIMIT)
        rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcOptions(init_timeout=LIMIT.total_seconds()))
        assert rpc.rpc_sync(f"worker{(rank + 1) % size}", sum, ([1, 2],)) == 3
        reduce, end = collectives.all_reduce, collectives.destroy_process_group
    else:
        import rpcdist.collectives.torch_backend  # noqa: F401 (registers the backend)

        torch.distributed.init_process_group("rpcdist", timeout=LIMIT)
        reduce, end = torch.distributed.all_reduce, torch.distributed.destroy_process_group
    total = torch.tensor(rank + 1.0)
    reduce(total)
    print(f"MET {size} {rank} {total.item()}", flush=True)
    while size != wanted:  # its agent ends it when the world changes
        reduce(torch.ones(1))
    if kind == "rpcdist":
        rpc.shutdown()
    end()
    print(f"DONE {size} {rank}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
