"""Modules of torch that are modules of rpcdist as a whole, under torch's names.

[Note: what falls through]
After `install_aliases`, torch's names of the table, and every module below them, are the modules of rpcdist that the
table gives. A name that rpcdist lacks raises an AttributeError that names it. A submodule that only torch has is
torch's own file, in which the names of the table mean ours: optimizers written as functions, for one, need no groups.
torch has loaded some modules by then (`import torch` does), so code that holds their functions already keeps them.

`install` replaces torch's modules by rpcdist's in this process, and in the processes that it starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from rpcdist.compat._replaced_names import ALIASES, LATE_VIEWS, MISSING, TAKES_GROUPS, VIEWS, is_within
from rpcdist.compat._views import install_late, install_views, own_names, refuse_torch_groups
from rpcdist.errors import ConfigError


def install_aliases(table: Mapping[str, str], missing: Mapping[str, str]) -> None:
    """Makes torch's names mean modules of ours in this process. Call it before importing modules that use them.

    Args:
        table: torch's module to ours. Of two entries that fit a name, the longer one counts.
        missing: torch's modules that are empty, and what to do instead.
    """
    finder = _AliasFinder(table, missing)
    for name in [name for name in sys.modules if finder.our_name(name) is not None]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    for theirs, ours in table.items():
        sys.modules[theirs] = importlib.import_module(ours)
    for theirs in table:
        parent, _, name = theirs.rpartition(".")
        # `import a.b as c` asks the parent, which may be a module of ours that has no submodules.
        setattr(importlib.import_module(parent), name, sys.modules[theirs])


def _missing_module(theirs: str, advice: str) -> ModuleType:
    """A module of torch that rpcdist does not have; every use of it raises an error that names it."""

    def refuse(name: str) -> object:
        raise AttributeError(f"rpcdist has nothing for {theirs}, which {name!r} should come from: {advice}")

    module = ModuleType(theirs)
    vars(module).update(__path__=[], __getattr__=refuse)
    return module


class _AliasFinder(MetaPathFinder, Loader):
    """Resolves imports of torch's names to our modules, or to modules whose use raises an error."""

    def __init__(self, table: Mapping[str, str], missing: Mapping[str, str]) -> None:
        self._table = dict(table)
        self._missing = dict(missing)
        self._true_specs: dict[str, ModuleSpec | None] = {}  # of our modules, while they are imported as torch's

    def our_name(self, name: str) -> str | None:
        """The name of our module for one of torch's, or None if the name is not in the table."""
        fitting = [theirs for theirs in self._table if is_within(name, theirs)]
        if not fitting:
            return None
        longest = max(fitting, key=len)
        return self._table[longest] + name.removeprefix(longest)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._advice(fullname) is not None:
            return ModuleSpec(fullname, self)
        ours = self.our_name(fullname)
        if ours is None:
            return None
        theirs = None if _is_there(ours) else PathFinder.find_spec(fullname, [_torch_folder(fullname)])
        return theirs or ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        advice, ours = self._advice(spec.name), self.our_name(spec.name)
        if advice is not None or ours is None:
            return _missing_module(spec.name, advice or "")
        module = importlib.import_module(ours)  # under its own name
        # The import system writes torch's name into the module that it is given; `exec_module` takes that back.
        self._true_specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None and module.__spec__.name in self._true_specs:
            module.__spec__ = self._true_specs.pop(module.__spec__.name)

    def _advice(self, name: str) -> str | None:
        """The advice for a module that rpcdist does not have; None for other modules."""
        return next((advice for gone, advice in self._missing.items() if is_within(name, gone)), None)


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the module above it is none, or has none below it
        return False


def _torch_folder(name: str) -> str:
    """The folder in which torch has the module of this name."""
    root, *parents = name.split(".")[:-1]
    return os.path.join(os.path.dirname(str(sys.modules[root].__file__)), *parents)


_MARK: Final = "rpcdist_compat"
"""The entry in the preparation data that `multiprocessing` sends to its children."""


def install() -> None:
    """Makes `torch.distributed`, its RPC, autograd, optimizers and algorithms, and torch's DDP, sampler and
    `SyncBatchNorm` mean ours in this process, and in processes that `multiprocessing`, `torch.multiprocessing` and
    `rpcdist.launch` start from it. torch's own code still finds torch's names. Calling it again does nothing.

    Call it before importing the modules that use these names: `from torch.distributed import all_reduce` binds the
    current meaning of the name.

    Raises:
        ConfigError: this torch has no `torch.distributed`, or its process group is initialized already.
    """
    if is_installed():
        return
    import torch.distributed
    from torch import nn
    from torch.autograd import profiler_legacy

    from rpcdist.profile_ranges import profile

    if not torch.distributed.is_available():
        raise ConfigError("this torch was built without torch.distributed; use rpcdist itself instead")
    if torch.distributed.is_initialized():
        raise ConfigError(
            "torch's process group is initialized: call rpcdist.compat.install() before the program starts"
        )
    from rpcdist.data import DistributedSampler
    from rpcdist.parallel.sync_batch_norm import SyncBatchNorm

    install_views(VIEWS)  # first: these modules of torch import some of the others
    install_aliases(ALIASES, MISSING)
    install_late(LATE_VIEWS, TAKES_GROUPS)
    refuse_torch_groups()
    places: list[Any] = [nn, nn.modules, nn.modules.batchnorm]
    for place in places:
        place.SyncBatchNorm = SyncBatchNorm  # for torch, too: it is of torch's class
    own_names(sys.modules["torch.utils.data.distributed"])["DistributedSampler"] = DistributedSampler
    profiler_legacy.profile = profile  # type: ignore[misc]
    _prepare_children()


def is_installed() -> bool:
    """Whether `install` has been called in this process."""
    return hasattr(multiprocessing.spawn.get_preparation_data, _MARK)


def _prepare_children() -> None:
    """Makes each child of `multiprocessing` call `install` before it imports the main module."""
    original: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), _MARK: _InstallWhenRead()}

    setattr(get_preparation_data, _MARK, True)
    multiprocessing.spawn.get_preparation_data = get_preparation_data


class _InstallWhenRead:
    """Calls `install` in the process that unpickles it: children read their preparation before anything else."""

    def __reduce__(self) -> tuple[Callable[[list[str]], None], tuple[list[str]]]:
        return _install_in_child, (list(sys.path),)


def _install_in_child(path: list[str]) -> None:
    sys.path[:] = path
    install()
