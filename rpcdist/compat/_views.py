"""Modules of torch in which the program finds our names, while torch's own code finds torch's.

torch's DDP hooks, its compiler, and our adapters to torch's groups need `torch.distributed` as it is; the program wants
`torch.distributed.all_reduce` to be ours, even when it uses the full name. So a viewed module gets a class whose
attribute access depends on the calling module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from rpcdist.compat._replaced_names import READS_OURS, advice_against
from rpcdist.errors import ConfigError


class _ViewedModule(ModuleType):
    """A module of torch in which the program finds our names.

    `_rpcdist_names` maps each name to our module that has it. `_rpcdist_replaced` has the program's replacements, such
    as mocks or wrappers, which torch's own code does not see.
    """

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        ours: dict[str, str] = own.get("_rpcdist_names", {})
        if (name in ours or name == "__dict__") and not _asked_by_torch(sys._getframe(1)):
            return _NamesForProgram(own) if name == "__dict__" else _name_for_program(own, name)
        return super().__getattribute__(name)

    def __dir__(self) -> Iterable[str]:
        return super().__dir__()  # asks for `__dict__` from here, so it looks up none of our names

    def __setattr__(self, name: str, value: object) -> None:
        own = object.__getattribute__(self, "__dict__")
        if name in own.get("_rpcdist_names", ()) and not _asked_by_torch(sys._getframe(1)):
            _replace_for_program(own, name, value)
        else:
            super().__setattr__(name, value)


def _replace_for_program(own: Mapping[str, Any], name: str, value: object) -> None:
    """Makes programs, but not torch's own code, find a value under one of our names from now on."""
    replaced: dict[str, object] = own["_rpcdist_replaced"]
    replaced.pop(name, None)
    if value is not own.get(name) and value is not _name_for_program(own, name):  # mocks restore the old value
        replaced[name] = value


def _name_for_program(own: Mapping[str, Any], name: str) -> Any:
    """The value that a program finds under one of our names in a module with that namespace."""
    replaced: dict[str, object] = own["_rpcdist_replaced"]
    if name in replaced:
        return replaced[name]
    return getattr(importlib.import_module(own["_rpcdist_names"][name]), name)


class _NamesForProgram(dict[str, Any]):
    """The namespace that `vars` of a viewed module returns to a program; writes to it reach the module."""

    def __init__(self, own: dict[str, Any]) -> None:
        super().__init__(own, **{name: _name_for_program(own, name) for name in own["_rpcdist_names"]})
        self._own = own

    def __setitem__(self, name: str, value: object) -> None:
        if name in self._own["_rpcdist_names"]:
            _replace_for_program(self._own, name, value)
        else:
            self._own[name] = value
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._own.pop(name, None)

    update, setdefault, pop = MutableMapping.update, MutableMapping.setdefault, MutableMapping.pop


def install_views(table: Mapping[str, str]) -> None:
    """Lets the program find our names in modules of torch; modules that are imported later, too."""
    for theirs in table:
        importlib.import_module(theirs)  # all of them before the first is viewed: they import each other
    for theirs, ours in table.items():
        _view(ours, sys.modules[theirs])


def install_late(views: Mapping[str, str], refused: Mapping[str, str]) -> None:
    """Changes modules of torch when they are loaded, or now.

    Args:
        views: as for `install_views`.
        refused: torch's module to the functions in it, with spaces between them, that raise `ConfigError` from then on.
    """
    changes: dict[str, list[Callable[[ModuleType], object]]] = {}
    for theirs, ours in views.items():
        changes.setdefault(theirs, []).append(partial(_view, ours))
    for theirs, names in refused.items():
        changes.setdefault(theirs, []).append(partial(_refuse, names))
    for theirs in sys.modules.keys() & changes.keys():
        for change in changes.pop(theirs):
            change(sys.modules[theirs])
    sys.meta_path.insert(0, _ChangingFinder(changes))


def _view(ours: str, module: ModuleType) -> None:
    """Lets the program find names of our modules, with spaces between them, in a loaded module of torch.

    If several have a name, the first one counts.
    """
    names: dict[str, str] = {}
    for lent in map(importlib.import_module, ours.split()):
        found = vars(module).keys() & _offered(lent) - names.keys()
        names |= {name: lent.__name__ for name in found if _is_value(module, name)}
    vars(module).update(_rpcdist_names=names, _rpcdist_replaced={})
    module.__class__ = _ViewedModule


def _refuse(names: str, module: ModuleType) -> None:
    """Replaces functions, or methods of classes, of a module by ones that raise `ConfigError` with advice."""
    for name in names.split():
        owner: Any = module
        *classes, last = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        if not hasattr(owner, last):
            continue  # only other versions of torch have it
        original = getattr(owner, last)
        advice = advice_against(module.__name__) or (
            f"rpcdist.compat cannot replace {module.__name__}.{name}, which is for groups of torch: use new_group or "
            "split_group, or run the program without compat"
        )

        @wraps(original)
        def refuse(*args: object, advice: str = advice, **named: object) -> None:
            raise ConfigError(advice)

        setattr(owner, last, refuse)


def refuse_torch_groups() -> None:
    """Makes the functions that use or make torch's default group raise `ConfigError` with advice."""

    def refuse(*args: object, **named: object) -> None:
        raise ConfigError(
            "a part of torch needs torch's own process group, which a program under rpcdist.compat does not have: "
            "its groups are rpcdist's. Run it without compat, with torch's `init_process_group('rpcdist')` "
            "(docs/clusters.md)"
        )

    c10d = own_names(importlib.import_module("torch.distributed.distributed_c10d"))
    originals = {name: c10d[name] for name in ("_get_default_group", "init_process_group")}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]:
        own = own_names(module)  # of torch's own view; modules that were loaded before have imported the names
        own.update({name: refuse for name, original in originals.items() if own.get(name) is original})


def own_names(module: ModuleType) -> dict[str, Any]:
    """The namespace of a module without the replacements that programs see."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names


class _ChangingFinder(MetaPathFinder):
    """Finds modules of torch at their usual place, and changes them once they are loaded."""

    def __init__(self, changes: Mapping[str, Sequence[Callable[[ModuleType], object]]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._changes else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for change in self._changes[fullname]:
                change(module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010  # of this import alone, as its loader is
        return spec


def _offered(module: ModuleType) -> set[str]:
    """The names that our module offers, without the names that it merely imports."""
    listed = getattr(module, "__all__", None) or dir(module)
    private = {name for name in vars(module) if name.startswith("_")}  # of torch, where torch has them
    return {name for name in {*listed, *private} if not name.startswith("__")}


def _is_value(module: ModuleType, name: str) -> bool:
    # `type` and not `isinstance`, which would trigger the warnings of deprecated objects.
    return not issubclass(type(vars(module)[name]), ModuleType)


def _asked_by_torch(frame: FrameType | None) -> bool:
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    if name.startswith(("torch.", "rpcdist.")):
        return not name.startswith(READS_OURS)
    return name == "torch"
