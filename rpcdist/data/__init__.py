"""Which part of a data set each rank trains on."""

from __future__ import annotations

from rpcdist.data._sampler import DistributedSampler

__all__ = ["DistributedSampler"]
