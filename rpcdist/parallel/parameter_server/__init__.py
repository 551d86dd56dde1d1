"""Parameters that live on servers, for trainers which push gradients and take new values (docs/parameter_server.md)."""

from __future__ import annotations

from rpcdist.parallel.parameter_server._parameter_server import ParameterServer
from rpcdist.parallel.parameter_server._sharded_embedding import ShardedEmbedding

__all__ = ["ParameterServer", "ShardedEmbedding"]
