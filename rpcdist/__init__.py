"""rpcdist: asynchronous RPC, remote references, distributed autograd and collectives for training on PyTorch tensors.

`import rpcdist` alone is cheap: a submodule, and with it torch or gRPC, is imported when it is first used.

    with rpcdist.LocalCluster(4):  # this process and three new ones are the workers of a job
        rpcdist.rpc.rpc_sync("worker1", pow, (2, 10))

    rpcdist.launch(train, workers=4)  # or: calls train(rank) in four new processes
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from rpcdist import _upper_layers

if TYPE_CHECKING:
    from rpcdist import autograd as autograd
    from rpcdist import checkpoint as checkpoint
    from rpcdist import collectives as collectives
    from rpcdist import data as data
    from rpcdist import deadline as deadline
    from rpcdist import errors as errors
    from rpcdist import ids as ids
    from rpcdist import nn as nn
    from rpcdist import optim as optim
    from rpcdist import parallel as parallel
    from rpcdist import rpc as rpc
    from rpcdist._counters import publish as publish
    from rpcdist._launch.job_plan import Role as Role
    from rpcdist._launch.launching import launch as launch
    from rpcdist._launch.placement import Placement as Placement
    from rpcdist._launch.placement import placement_from_environment as placement_from_environment
    from rpcdist._local_cluster import LocalCluster as LocalCluster
    from rpcdist.tracing import trace as trace

    __version__: str

_MODULE_OF: Final = {
    "LocalCluster": "rpcdist._local_cluster",
    "Placement": "rpcdist._launch.placement",
    "Role": "rpcdist._launch.job_plan",
    "launch": "rpcdist._launch.launching",
    "placement_from_environment": "rpcdist._launch.placement",
    "publish": "rpcdist._counters",
    "trace": "rpcdist.tracing",
}
_SUBMODULES: Final = "autograd checkpoint collectives data deadline errors ids nn optim parallel rpc".split()
__all__ = ["__version__", *_MODULE_OF, *_SUBMODULES]


def __getattr__(name: str) -> object:
    """Imports what `name` needs at its first use; `__version__` is that of the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("rpcdist")
    if module := _MODULE_OF.get(name):
        value: object = getattr(_imported(module), name)
        globals()[name] = value
        return value
    if name in __all__:
        return _imported(f"rpcdist.{name}")
    raise AttributeError(f"module 'rpcdist' has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    """Imports a module, which may take seconds; Ctrl-C meanwhile ends a program as in `LocalCluster`."""
    try:
        from rpcdist._launch.supervisor import kept_interrupt

        with kept_interrupt():
            return importlib.import_module(module)
    except KeyboardInterrupt:
        from rpcdist._launch.progress import interrupted

        raise interrupted() from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load_autograd() -> Any:
    """The class of distributed autograd for an agent."""
    return importlib.import_module("rpcdist.autograd").AutogradWorker


def _load_metrics() -> Any:
    """The function that counts an agent's calls and serves metrics on request (`rpcdist.metrics.attach`)."""
    return importlib.import_module("rpcdist.metrics").attach


_upper_layers.register("autograd", _load_autograd)
_upper_layers.register("metrics", _load_metrics)
