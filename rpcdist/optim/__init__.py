"""Optimizers for parameters that live on many workers. The names are those of `torch.distributed.optim`."""

from __future__ import annotations

from rpcdist.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
