"""Parts of upper layers that lower layers use: the root of the package registers them, so that no import goes upwards.

The RPC layer serves calls with an autograd context even in a worker whose program never imports `rpcdist.autograd`. It
must not import that layer, which builds on it. So `rpcdist/__init__.py`, which may know all layers, registers a loader
here, and each agent calls the loader when it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], Any]] = {}


def register(name: str, loader: Callable[[], Any]) -> None:
    """Sets the loader of a part of an upper layer; the loader may import."""
    _loaders[name] = loader


def load(name: str) -> Any:
    """Loads the part that was registered under a name; the caller knows its type."""
    return _loaders[name]()
