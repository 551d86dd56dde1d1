"""Modules that live on other workers. The names are those of `torch.distributed.nn`.

The functions of `rpcdist.nn.functional` are attributes of this package too, as in torch.
"""

from __future__ import annotations

from rpcdist.nn import functional
from rpcdist.nn.api.remote_module import RemoteModule

__all__ = ["RemoteModule", "functional"]


def __getattr__(name: str) -> object:
    """Looks up `name` among the collectives of `functional`."""
    if name.startswith("_"):
        raise AttributeError(f"module 'rpcdist.nn' has no attribute {name!r}")
    return getattr(functional, name)
