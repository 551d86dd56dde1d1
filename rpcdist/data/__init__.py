"""Distributes a data set over the ranks of a group."""

from __future__ import annotations

from rpcdist.data._sampler import DistributedSampler

__all__ = ["DistributedSampler"]
