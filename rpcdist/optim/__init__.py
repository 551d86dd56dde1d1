"""Optimizers for parameters that live on many workers. The names are those of `torch.distributed.optim`."""

from __future__ import annotations

import importlib
from typing import Any

from rpcdist.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

# torch has the first two here; they need process groups, so they live elsewhere. The others are torch's own.
_ELSEWHERE = {
    "PostLocalSGDOptimizer": "rpcdist.parallel.model_averaging",
    "ZeroRedundancyOptimizer": "rpcdist.parallel.zero_redundancy",
    "_apply_optimizer_in_backward": "torch.distributed.optim.apply_optimizer_in_backward",
    "_get_in_backward_optimizers": "torch.distributed.optim.apply_optimizer_in_backward",
    "as_functional_optim": "torch.distributed.optim.utils",
    "_NamedOptimizer": "torch.distributed.optim.named_optimizer",
    **{
        f"_Functional{name}": f"torch.distributed.optim.functional_{name.lower()}"
        for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "Rprop", "SGD")
    },
}


def __getattr__(name: str) -> Any:
    """Imports names from other packages at their first use."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'rpcdist.optim' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE[name]), name)
