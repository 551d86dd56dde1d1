"""Puts rpcdist in the place of torch's RPC modules, so that torch's own tests run against it.

Only what these tests are about is replaced, and not `torch.distributed` itself: their harness needs that.
"""

from __future__ import annotations

import torch
from torch.autograd import profiler_legacy

from rpcdist.compat._aliases import install_aliases
from rpcdist.profile_ranges import profile

__all__ = ["MAPPED", "install", "torch_agent_is_set"]

MAPPED = {
    "torch.distributed.rpc": "rpcdist.rpc",
    "torch.distributed.autograd": "rpcdist.autograd",
    "torch.distributed.optim": "rpcdist.optim",
    "torch.distributed.nn": "rpcdist.nn",
}


def install() -> None:
    """Map torch's names to ours in this process; once, and before a module that uses them is imported."""
    install_aliases(MAPPED, {})
    profiler_legacy.profile = profile  # type: ignore[misc]


def torch_agent_is_set() -> bool:
    """Whether torch's own RPC agent runs in this process."""
    return bool(torch._C._distributed_rpc._is_current_rpc_agent_set())
