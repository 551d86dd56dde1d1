"""Modules of torch that are modules of rpcdist as a whole, under torch's names.

[Note: nothing falls through]
After `install_aliases`, torch's names of the table, and every module below them, are the modules of rpcdist that the
table gives. A submodule or a name that rpcdist lacks is an ImportError or AttributeError that names it: torch's own
modules are out of reach, because the finder below answers for all of these names before torch's folders are searched.
torch has loaded some of them by then (`import torch` does), so what holds their functions already keeps them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install_aliases"]


def install_aliases(table: Mapping[str, str]) -> None:
    """Makes torch's names mean modules of ours in this process; before a module that uses them is imported.

    Args:
        table: torch's module to ours. Of two entries that fit a name, the longer one counts.
    """
    finder = _AliasFinder(table)
    for name in [name for name in sys.modules if finder.our_name(name) is not None]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    for theirs, ours in table.items():
        try:
            module: ModuleType = importlib.import_module(ours)
        except ModuleNotFoundError as exc:
            if exc.name != ours:
                raise
            module = _MissingModule(theirs, ours)
        sys.modules[theirs] = module
        parent, _, name = theirs.rpartition(".")
        if finder.our_name(parent) is None:  # an attribute of a module of ours would be another thing to maintain
            setattr(importlib.import_module(parent), name, module)


class _MissingModule(ModuleType):
    """A module of torch's that rpcdist does not have; every use of it names what is missing."""

    def __init__(self, theirs: str, ours: str) -> None:
        super().__init__(theirs)
        self._ours = ours

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"rpcdist has no module {self._ours!r}, which {name!r} should come from")


class _AliasLoader(Loader):
    """Answers the import of one of torch's names with our module, once imported under its own name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        # The import system writes torch's name into the module that it is given; `exec_module` takes that back.
        self._true_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._true_spec


class _AliasFinder(MetaPathFinder):
    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = dict(table)

    def our_name(self, name: str) -> str | None:
        """The name of our module for one of torch's, or None if the name is not in the table."""
        fitting = [theirs for theirs in self._table if name == theirs or name.startswith(f"{theirs}.")]
        if not fitting:
            return None
        longest = max(fitting, key=len)
        return self._table[longest] + name.removeprefix(longest)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = self.our_name(fullname)
        return None if ours is None else ModuleSpec(fullname, _AliasLoader(ours))
