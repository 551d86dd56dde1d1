"""Puts rpcdist in the place of torch's RPC modules, so that torch's own tests run against it.

[Note: nothing falls through]
After `install()`, `torch.distributed.rpc`, `.autograd`, `.optim` and `.nn`, and every module below them, are the
modules of rpcdist of the same name. A submodule or a name that rpcdist lacks is an ImportError or AttributeError that
names it: torch's own modules are out of reach, because the finder below answers for all of these names before torch's
folders are searched. torch has loaded some of them by then (`import torch` does), so whatever holds their functions
already could still start torch's agent; `torch_agent_is_set()` shows that nobody did.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

__all__ = ["MAPPED", "install", "torch_agent_is_set"]

MAPPED = {
    "torch.distributed.rpc": "rpcdist.rpc",
    "torch.distributed.autograd": "rpcdist.autograd",
    "torch.distributed.optim": "rpcdist.optim",
    "torch.distributed.nn": "rpcdist.nn",
}


def _ours(name: str) -> str | None:
    """The name of our module for one of torch's, or None if the name is not mapped."""
    for theirs, ours in MAPPED.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return None


class _Missing(ModuleType):
    """A module of torch's that rpcdist does not have; every use of it names what is missing."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"rpcdist has no module {_ours(self.__name__)!r}, which {name!r} should come from")


class _AliasLoader(Loader):
    """Answers the import of one of torch's names with our module, once imported under its own name."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        ours = _ours(spec.name)
        assert ours is not None
        module = importlib.import_module(ours)
        # The import system writes torch's name into the module that it is given; `exec_module` takes that back.
        self._true_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._true_spec


class _AliasFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if _ours(fullname) is None else ModuleSpec(fullname, _AliasLoader())


def install() -> None:
    """Map torch's names to ours in this process; once, and before a module that uses them is imported."""
    for name in [name for name in sys.modules if _ours(name) is not None]:
        del sys.modules[name]
    sys.meta_path.insert(0, _AliasFinder())
    for theirs, ours in MAPPED.items():
        try:
            module: ModuleType = importlib.import_module(ours)
        except ModuleNotFoundError as exc:
            if exc.name != ours:
                raise
            module = _Missing(theirs)
        sys.modules[theirs] = module
        setattr(torch.distributed, theirs.rpartition(".")[2], module)


def torch_agent_is_set() -> bool:
    """Whether torch's own RPC agent runs in this process."""
    return bool(torch._C._distributed_rpc._is_current_rpc_agent_set())
