"""What lower layers need of upper ones, registered by the root of the package: so that no import goes upwards.

The RPC layer serves calls that carry an autograd context, also in a worker whose program never imports
`rpcdist.autograd`. It must not import that layer, which is built on it; so `rpcdist/__init__.py`, which may know all
layers, registers a loader here, and each agent calls it when it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], Any]] = {}


def register(name: str, loader: Callable[[], Any]) -> None:
    """Says how to load a part of an upper layer; the loader may import."""
    _loaders[name] = loader


def load(name: str) -> Any:
    """The part that was registered under a name; its type is stated where it is used."""
    return _loaders[name]()
