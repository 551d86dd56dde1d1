"""A job whose other workers are processes that this one starts: `rpcdist.LocalCluster`."""

from __future__ import annotations

from rpcdist._cluster.local_cluster import LocalCluster

__all__ = ["LocalCluster"]
