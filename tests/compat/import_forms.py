"""Each form of an import of each public module of torch's tree, for `names_under_compat.py`."""

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

PACKAGES = ("distributed", "nn.parallel", "utils.data")


def modules_below(folder: Path, name: str) -> Iterator[str]:
    """The public modules in a folder of torch's tree, whether they can be imported or not."""
    yield name
    for each in pkgutil.iter_modules([str(folder)]):
        if each.name.startswith("_"):
            continue
        if each.ispkg:
            yield from modules_below(folder / each.name, f"{name}.{each.name}")
        else:
            yield f"{name}.{each.name}"


def wrong_with(name: str) -> str:
    """The errors in a module; none if it needs a package of somebody else's."""
    parent, _, last = name.rpartition(".")
    found: dict[str, object] = {}
    try:
        exec(f"import {name} as by_as\nfrom {parent} import {last} as by_from\nimport {name}", found)
        module, by_name = importlib.import_module(name), eval(name, found)
    except ImportError as error:
        is_foreign = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(("torch", "rpcdist"))
        return "" if is_foreign else f"{name}: {error}"
    if not found["by_as"] is found["by_from"] is by_name:
        return f"{name}: the forms find {found['by_as']}, {found['by_from']}, {by_name}"
    # torch has functions with the names of their modules: rendezvous, replicate and more.
    if by_name is not module and isinstance(by_name, ModuleType):
        return f"{name}: {by_name}, not {module}"
    return ", ".join(lent_names_of_torch(module))


def lent_names_of_torch(module: ModuleType) -> Iterator[str]:
    """The names that a module lends from another one, where a program finds something else under the name."""
    offered = dir(module) if hasattr(module, "__path__") else ()
    for name in getattr(module, "__all__", offered):
        found = getattr(module, name, None)
        home = sys.modules.get(str(getattr(found, "__module__", None)))
        if hasattr(home, "_rpcdist_names") and not name.startswith("_") and getattr(home, name, found) is not found:
            yield f"{module.__name__}.{name} is torch's, which {home} does not have for programs"


def check_imports() -> None:
    root = Path(torch.__file__).parent
    names = [name for each in PACKAGES for name in modules_below(root / each.replace(".", "/"), f"torch.{each}")]
    if len(names) < 200:
        sys.exit(f"torch's tree has {names} only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules say so
        if wrong := list(filter(None, map(wrong_with, names))):
            sys.exit("\n".join(wrong))
