"""Training one model on many workers: pipelines of stages, data parallelism, and parameter servers.

A name is imported when it is first used, so that a script that needs one part does not load the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpcdist.parallel import algorithms as algorithms
    from rpcdist.parallel import comm_hooks as comm_hooks
    from rpcdist.parallel import diloco as diloco
    from rpcdist.parallel import distributed as distributed
    from rpcdist.parallel import elastic as elastic
    from rpcdist.parallel import model_averaging as model_averaging
    from rpcdist.parallel import parameter_server as parameter_server
    from rpcdist.parallel import pipeline as pipeline
    from rpcdist.parallel import published as published
    from rpcdist.parallel._ddp._ddp_arguments import MixedPrecision as MixedPrecision
    from rpcdist.parallel.algorithms import Join as Join
    from rpcdist.parallel.diloco import DiLoCoOptimizer as DiLoCoOptimizer
    from rpcdist.parallel.distributed import DistributedDataParallel as DistributedDataParallel
    from rpcdist.parallel.elastic import ElasticDataParallel as ElasticDataParallel
    from rpcdist.parallel.parameter_server import ParameterServer as ParameterServer
    from rpcdist.parallel.parameter_server import ShardedEmbedding as ShardedEmbedding
    from rpcdist.parallel.pipeline import Pipeline as Pipeline
    from rpcdist.parallel.published import Published as Published
    from rpcdist.parallel.published import TensorPart as TensorPart
    from rpcdist.parallel.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from rpcdist.parallel.zero_redundancy import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer

_SUBMODULES = (
    "algorithms comm_hooks diloco distributed elastic model_averaging parameter_server pipeline published "
    "sync_batch_norm zero_redundancy"
).split()
_HOMES = {
    "DiLoCoOptimizer": "diloco",
    "DistributedDataParallel": "distributed",
    "ElasticDataParallel": "elastic",
    "Join": "algorithms",
    "MixedPrecision": "_ddp._ddp_arguments",
    "ParameterServer": "parameter_server",
    "Pipeline": "pipeline",
    "Published": "published",
    "ShardedEmbedding": "parameter_server",
    "SyncBatchNorm": "sync_batch_norm",
    "TensorPart": "published",
    "ZeroRedundancyOptimizer": "zero_redundancy",
}
__all__ = [*_HOMES, *_SUBMODULES]


def __getattr__(name: str) -> object:
    """Imports what `name` needs, at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'rpcdist.parallel' has no attribute {name!r}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"rpcdist.parallel.{_HOMES[name]}"), name)
    return importlib.import_module(f"rpcdist.parallel.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
