"""The program that `torchrun --max-restarts` starts in `test_torchrun.py`, with one rank on each node: ranks die, all
start again.

    restarted_program.py STAGE:RANKS ...      # one for each attempt that fails, such as connected:0,2

The ranks of an attempt kill themselves at its stage: `joining`, while the others wait for them, `between`, when they
have met by RPC and by no group, or `connected`, by RPC, by groups, and by torch's groups on our backend. The attempt
after the last one ends in order. The store of torchrun's agent outlives them all, and each agent counts the failures of
its own rank only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

import rpcdist.collectives.torch_backend  # noqa: F401  (registers the backend)
from rpcdist import collectives, rpc

LIMIT = timedelta(seconds=60)


def deaths_of_this_attempt(arguments: list[str]) -> list[tuple[str, Path]]:
    """The stage and the file of each rank that dies: those of the first attempt in which not all have died yet."""
    for attempt, argument in enumerate(arguments):
        stage, ranks = argument.split(":")
        files = [(stage, Path(f"attempt {attempt}, rank {rank}")) for rank in ranks.split(",")]
        if not all(file.exists() for _, file in files):
            return files
    return []


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    deaths = deaths_of_this_attempt(sys.argv[1:])

    def die_at(stage: str) -> None:
        for its_stage, file in deaths:
            if its_stage == stage and file.name.endswith(f"rank {rank}") and not file.exists():
                file.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def sum_of_ranks(all_reduce: Callable[..., object], group: object) -> int:
        total = torch.tensor(rank)
        all_reduce(total, group=group)
        return int(total)

    try:
        die_at("joining")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
        by_rpc = sum(int(rpc.rpc_sync(f"worker{other}", max, args=(other, 0))) for other in range(size))
        die_at("between")
        torch.distributed.init_process_group("rpcdist", timeout=LIMIT)
        by_torch = sum_of_ranks(torch.distributed.all_reduce, torch.distributed.new_group(backend="rpcdist"))
        collectives.init_process_group("tcp", timeout=LIMIT)
        by_groups = sum_of_ranks(collectives.all_reduce, collectives.new_group())
        collectives.barrier()  # a rank that dies has the sum, and so have the others
        die_at("connected")
        collectives.barrier()
    except RuntimeError:
        if not deaths:
            raise
        threading.Event().wait(LIMIT.total_seconds())  # torchrun ends it; by failing it would raise its agent's count
    collectives.destroy_process_group()
    torch.distributed.destroy_process_group()
    rpc.shutdown()
    print(f"rank {rank}, restart count {count}, got {[by_rpc, by_torch, by_groups]}", flush=True)


if __name__ == "__main__":
    main()
