"""Differentiable collectives: an alias of `rpcdist.collectives.functional`, which is imported at first use."""

from __future__ import annotations

import importlib

__all__: list[str] = []


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module 'rpcdist.nn.functional' has no attribute {name!r}")
    return getattr(importlib.import_module("rpcdist.collectives.functional"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("rpcdist.collectives.functional").__all__})
