"""rpcdist: asynchronous RPC, remote references, distributed autograd and collectives for training on PyTorch tensors.

`import rpcdist` alone is cheap: a submodule, and with it torch or gRPC, is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rpcdist import _upper_layers

if TYPE_CHECKING:
    from rpcdist import autograd as autograd
    from rpcdist import collectives as collectives
    from rpcdist import data as data
    from rpcdist import deadline as deadline
    from rpcdist import errors as errors
    from rpcdist import ids as ids
    from rpcdist import launch as launch
    from rpcdist import nn as nn
    from rpcdist import optim as optim
    from rpcdist import parallel as parallel
    from rpcdist import rpc as rpc

    __version__: str

__all__ = [
    "__version__",
    "autograd",
    "collectives",
    "data",
    "deadline",
    "errors",
    "ids",
    "launch",
    "nn",
    "optim",
    "parallel",
    "rpc",
]


def __getattr__(name: str) -> object:
    """Imports the submodule `name` at its first use; `__version__` is that of the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("rpcdist")
    if name in __all__:
        return importlib.import_module(f"rpcdist.{name}")
    raise AttributeError(f"module 'rpcdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load_autograd() -> Any:
    """What makes distributed autograd for an agent (`rpcdist.rpc._autograd_hooks.MakeAutograd`)."""
    return importlib.import_module("rpcdist.autograd").AutogradWorker


_upper_layers.register("autograd", _load_autograd)
