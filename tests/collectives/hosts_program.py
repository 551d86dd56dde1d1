"""A rank of tests/collectives/test_collectives_hosts.py: a worker of a pool, or a program under torchrun."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch

import rpcdist.collectives as dist


def main() -> dict[str, object]:
    """The results of this rank; also a line of JSON on standard output."""
    torch.set_num_threads(1)
    dist.init_process_group("tcp", timeout=timedelta(seconds=40))
    rank, size = dist.get_rank(), dist.get_world_size()
    small = torch.full((3,), rank + 1.0)
    dist.all_reduce(small)
    large = torch.full((500_000,), float(rank))
    dist.all_reduce(large, op=dist.ReduceOp.AVG)
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    parts = torch.zeros(size)
    dist.all_to_all_single(parts, torch.arange(size) * 10.0 + rank)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    if rank == 0:
        dist.send(torch.tensor([7.0]), size - 1)
    elif rank == size - 1:
        message = torch.zeros(1)
        dist.recv(message, 0)
        assert message.item() == 7.0
    dist.barrier()
    world = dist.group.WORLD
    assert world is not None
    found: dict[str, object] = {
        "rank": rank,
        "transport": repr(world.backend("cpu")),
        "small": small.tolist(),
        "large": [large[0].item(), large[-1].item()],
        "gathered": [tensor[0].item() for tensor in gathered],
        "parts": parts.tolist(),
        "objects": objects,
    }
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
