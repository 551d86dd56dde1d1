"""Jobs whose ranks run on Ray: `pip install 'rpcdist[ray]'`. Only this module imports Ray.

    results = rpcdist.ray.launch(train, workers=8, resources={"CPU": 2}, max_restarts=3)
    with rpcdist.ray.Cluster(8, resources={"GPU": 1}) as cluster:  # as LocalCluster: this process is worker0
        ...

Ray places the processes, and starts them on its nodes; all communication between them goes through rpcdist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcdist.errors import ConfigError, raised_as

with raised_as(ConfigError, "rpcdist.ray needs Ray: pip install 'rpcdist[ray]'", ImportError):
    import ray as _ray  # noqa: F401

from rpcdist.ray._ray_launch import launch

if TYPE_CHECKING:
    from rpcdist.ray._cluster import Cluster as Cluster
    from rpcdist.ray._train import RpcdistConfig as RpcdistConfig

__all__ = ["Cluster", "RpcdistConfig", "launch"]


def __getattr__(name: str) -> object:
    """Imports `Cluster`, which needs torch, and `RpcdistConfig`, which needs `ray[train]`, at their first use."""
    if name == "Cluster":
        from rpcdist.ray._cluster import Cluster

        return Cluster
    if name == "RpcdistConfig":
        from rpcdist.ray._train import RpcdistConfig

        return RpcdistConfig
    raise AttributeError(f"module 'rpcdist.ray' has no attribute {name!r}")
