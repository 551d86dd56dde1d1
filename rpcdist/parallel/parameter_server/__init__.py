"""Parameters on servers, for trainers that push gradients and get new values (docs/parameter_server.md)."""

from __future__ import annotations

from rpcdist.parallel.parameter_server._parameter_server import ParameterServer
from rpcdist.parallel.parameter_server._sharded_embedding import ShardedEmbedding

__all__ = ["ParameterServer", "ShardedEmbedding"]
