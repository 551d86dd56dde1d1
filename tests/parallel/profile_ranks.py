"""The functions that the ranks of `rank_pool` profile."""

from __future__ import annotations

import torch
from ddp_ranks import plain, scenario
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rpcdist import collectives
from rpcdist.parallel import DistributedDataParallel

__all__ = ["profile_step"]


@scenario
def profile_step(rank: int, size: int) -> tuple[list[str], int]:
    """The ranges of DDP's buckets in a step, and how many reductions the profile has."""
    model = DistributedDataParallel(plain(), bucket_cap_mb=0.0001)
    inputs = torch.randn(4, 8)
    model(inputs).sum().backward()  # buckets are rearranged after the first
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
        model(inputs).sum().backward()
        collectives.all_reduce(inputs)
    found = {each.key: each.count for each in profiled.key_averages()}
    buckets = sorted(key for key in found if key.startswith("DDP bucket"))
    return buckets, sum(count for key, count in found.items() if key.startswith("all_reduce of group "))
