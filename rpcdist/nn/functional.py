"""Differentiable collectives: an alias of `rpcdist.collectives.functional`, which is imported at first use."""

from __future__ import annotations

import importlib

__all__: list[str] = []

_SOURCE = "rpcdist.collectives.functional"


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module 'rpcdist.nn.functional' has no attribute {name!r}")
    try:
        source = importlib.import_module(_SOURCE)
    except ModuleNotFoundError as exc:
        if exc.name != _SOURCE:
            raise
        raise AttributeError(f"rpcdist.nn.functional has no {name!r}: this version has no {_SOURCE}") from exc
    return getattr(source, name)


def __dir__() -> list[str]:
    try:
        source = importlib.import_module(_SOURCE)
    except ModuleNotFoundError:
        return sorted(globals())
    return sorted({*globals(), *source.__all__})
