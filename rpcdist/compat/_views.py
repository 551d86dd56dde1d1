"""Modules of torch in which the program finds our names, while torch's own code finds torch's.

torch's DDP hooks, its compiler, and our adapters to torch's groups need `torch.distributed` as it is; the program wants
`torch.distributed.all_reduce` to be ours, also where it writes the name out in full. So a module that is viewed gets a
class whose attribute access looks at who asks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from rpcdist.compat._replaced_names import READS_OURS, advice_against
from rpcdist.errors import ConfigError

__all__ = ["install_views", "refuse_torch_groups"]

_IMPORTS = "importlib."


class _ViewedModule(ModuleType):
    """A module of torch, of which `_OURS` has the names that the program shall find, by the module that has them."""

    def __getattribute__(self, name: str) -> Any:
        ours: dict[str, str] = object.__getattribute__(self, "__dict__").get("_rpcdist_names", {})
        if name in ours and not _asked_by_torch(sys._getframe(1)):
            return getattr(importlib.import_module(ours[name]), name)
        return super().__getattribute__(name)


def install_views(table: Mapping[str, str]) -> None:
    """Lets the program find our names in modules of torch; modules that are imported later, too.

    Args:
        table: torch's module to ours, or to several, with spaces between them.
    """
    sys.meta_path.insert(0, _RefusingFinder())
    for theirs in table:
        importlib.import_module(theirs)  # all of them before the first is viewed: they import each other
    for theirs, ours in table.items():
        module = sys.modules[theirs]
        names: dict[str, str] = {}
        for lent in map(importlib.import_module, ours.split()):
            names |= {name: lent.__name__ for name in vars(module).keys() & _offered(lent) if _is_value(module, name)}
        vars(module)["_rpcdist_names"] = names
        module.__class__ = _ViewedModule


def refuse_torch_groups() -> None:
    """Makes what asks for torch's default group, or would make it, raise `ConfigError` with what to do."""
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    package: Any = importlib.import_module("torch.distributed")

    def refuse(*args: object, **named: object) -> None:
        raise ConfigError(
            "a part of torch asks for torch's own process group, and under rpcdist.compat the program has none: its "
            "groups are ours. Run it without compat, with torch's `init_process_group('rpcdist')` (docs/clusters.md)"
        )

    module._get_default_group = refuse
    for each in (module, package):
        each.init_process_group = refuse  # in torch's own view: what FSDP and device meshes call when there is none


class _RefusingFinder(MetaPathFinder):
    """Refuses what cannot be replaced, with an `ImportError` that says what to do, unless torch imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        advice = advice_against(fullname)
        if advice is not None and not _asked_by_torch(_first_outside_imports(sys._getframe(1))):
            raise ImportError(advice, name=fullname)
        return None


def _offered(module: ModuleType) -> set[str]:
    """The names of our module that are meant to be used, and not merely imported there."""
    listed = getattr(module, "__all__", None) or dir(module)
    return {name for name in listed if not name.startswith("__")}


def _is_value(module: ModuleType, name: str) -> bool:
    # `type` and not `isinstance`, which would use what warns of being deprecated.
    return not issubclass(type(vars(module)[name]), ModuleType)


def _first_outside_imports(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _name_of(frame).startswith(_IMPORTS):
        frame = frame.f_back
    return frame


def _asked_by_torch(frame: FrameType | None) -> bool:
    name = "" if frame is None else _name_of(frame)
    if name.startswith(("torch.", "rpcdist.")):
        return not name.startswith(READS_OURS)
    return name == "torch"


def _name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
