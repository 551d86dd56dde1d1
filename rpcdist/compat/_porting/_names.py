"""Which of our names stands for one of torch's."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Final

from rpcdist.compat._replaced_names import ALIASES, REFUSED, VIEWS

_MODULES: Final = {theirs: ours.split() for theirs, ours in (VIEWS | ALIASES).items()}
"""torch's modules, and ours that have their names."""

_PARTS: Final = ("torch.nn.parallel", "torch.utils.data")
"""Modules of which only what we have is replaced: the rest has nothing to do with processes."""

_CLASSES: Final = dict.fromkeys(
    (
        "torch.nn.SyncBatchNorm",
        "torch.nn.modules.SyncBatchNorm",
        "torch.nn.modules.batchnorm.SyncBatchNorm",
    ),
    "rpcdist.parallel.SyncBatchNorm",
)

_STAYS: Final = ("elastic", "launch", "launcher", "run")
"""Submodules of `torch.distributed` that start processes, ours as well as others."""

_CHECKPOINT: Final = (
    "takes each rank to be alone, as torch's process group is not initialized: save from one rank, or run the program "
    "by `python -m rpcdist run --compat`, where it finds our groups"
)


@dataclass(frozen=True)
class Meaning:
    """What is to become of one of torch's names.

    Attributes:
        ours: the full name of ours that takes its place; None where torch's stays.
        module: what has to be imported before `ours` may be written.
        advice: why it cannot be replaced, and what to do; None if there is nothing to do.
    """

    ours: str | None = None
    module: str = ""
    advice: str | None = None


@cache
def meaning_of(name: str) -> Meaning:
    """What a full name such as `torch.distributed.rpc.api.remote` becomes; names of anything may be asked for."""
    for theirs, ours in _CLASSES.items():
        if _is_within(name, theirs):
            return Meaning(ours + name.removeprefix(theirs), ours.rpartition(".")[0])
    for refused, advice in REFUSED.items():
        if _is_within(name, refused):
            return Meaning(advice=f"stays torch's, and {advice}")
    if _is_within(name, "torch.distributed.checkpoint"):
        return Meaning(advice=f"stays torch's, and {_CHECKPOINT}")
    if any(_is_within(name, f"torch.distributed.{module}") for module in _STAYS):
        return Meaning()
    fitting = [theirs for theirs in _MODULES if _is_within(name, theirs)]
    if not fitting:
        return Meaning()
    theirs = max(fitting, key=len)
    is_part = theirs.startswith(_PARTS)
    rest = name.removeprefix(theirs).strip(".")
    if not rest:
        module = _MODULES[theirs][0]
        return Meaning() if is_part else Meaning(module, module)
    for module in _MODULES[theirs]:
        if (found := _find(module, rest)) is not None:
            return Meaning(f"{module}.{rest}", found)
    return Meaning() if is_part else Meaning(advice="rpcdist has nothing of this name (docs/coming_from_torch.md)")


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _find(module: str, names: str) -> str | None:
    """The innermost module that has to be imported for `module.names`, or None if there is nothing of this name."""
    first, _, rest = names.partition(".")
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__path__") and importlib.util.find_spec(f"{module}.{first}") is not None:
        return _find(f"{module}.{first}", rest) if rest else f"{module}.{first}"
    value = getattr(loaded, first, None)
    is_ours = value is not None and not isinstance(value, ModuleType)
    return module if is_ours else None
