"""Resolves the names in a module to the imports that bind them, at the place of each use.

It also maps torch's names to ours.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Final

from rpcdist.compat._replaced_names import ALIASES, REFUSED, VIEWS, is_within

_MODULES: Final = {theirs: ours.split() for theirs, ours in (VIEWS | ALIASES).items()}
"""torch's modules, and ours that have their names."""

_PARTS: Final = ("torch.nn.parallel", "torch.utils.data")
"""Modules of which only the names that we have are replaced: the rest has nothing to do with processes."""

_CLASSES: Final = dict.fromkeys(
    ("torch.nn.SyncBatchNorm", "torch.nn.modules.SyncBatchNorm", "torch.nn.modules.batchnorm.SyncBatchNorm"),
    "rpcdist.parallel.SyncBatchNorm",
)

_STAYS: Final = (
    *("elastic", "launch", "launcher", "run"),
    *("_remote_device", "_serialization", "algorithms._checkpoint", "argparse_util"),
    *("optim._apply_optimizer_in_backward", "optim._NamedOptimizer"),
)
"""Names below `torch.distributed` that start processes or concern one process. They use no group, so they stay."""

_CHECKPOINT: Final = (
    "treats each rank as a single process, because torch's process group is not initialized: save from one rank, or "
    "run the program by `python -m rpcdist run --compat`, where it finds our groups"
)


@dataclass(frozen=True)
class Meaning:
    """The replacement of one of torch's names.

    Attributes:
        ours: our full name that replaces it; None if torch's name stays.
        module: the module that must be imported before `ours` can be used.
        advice: why the name cannot be replaced, and what to do; None if there is nothing to do.
    """

    ours: str | None = None
    module: str = ""
    advice: str | None = None


@cache
def meaning_of(name: str) -> Meaning:
    """The meaning of a full name such as `torch.distributed.rpc.api.remote`; accepts any name."""
    for theirs, ours in _CLASSES.items():
        if is_within(name, theirs):
            return Meaning(ours + name.removeprefix(theirs), ours.rpartition(".")[0])
    for refused, advice in REFUSED.items():
        if is_within(name, refused):
            return Meaning(advice=f"stays torch's, and {advice}")
    if is_within(name, "torch.distributed.checkpoint"):
        return Meaning(advice=f"stays torch's, and {_CHECKPOINT}")
    if any(is_within(name, f"torch.distributed.{module}") for module in _STAYS):
        return Meaning()
    fitting = [theirs for theirs in _MODULES if is_within(name, theirs)]
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


def _find(module: str, names: str) -> str | None:
    """The innermost module that must be imported for `module.names`, or None if the name does not exist."""
    first, _, rest = names.partition(".")
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__path__") and importlib.util.find_spec(f"{module}.{first}") is not None:
        return _find(f"{module}.{first}", rest) if rest else f"{module}.{first}"
    value = getattr(loaded, first, None)
    is_ours = value is not None and not isinstance(value, ModuleType)
    return module if is_ours else None


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Import:
    """A name that an import binds: `means` the full name of an object, and `local` in the program."""

    means: str
    local: str
    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    scope: Scope


@dataclass(eq=False)
class Scope:
    """A module, function, class or comprehension, and the names that it binds: a name maps to None if it is not bound
    by an import."""

    is_class: bool = False
    names: dict[str, Import | None] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)


@dataclass(frozen=True)
class Use:
    """A use of an imported name: `written` as `dist.ReduceOp.SUM`, it `means` `torch.distributed.ReduceOp.SUM`."""

    node: ast.expr
    written: str
    means: str
    binding: Import


def read_uses(tree: ast.Module) -> tuple[list[Import], list[Use]]:
    """All names that imports bind in a module, and all their uses, in the order of the text."""
    imports: list[Import] = []
    uses = list(_uses(tree, [_read_scope(tree, imports)], imports))
    return imports, uses


def _uses(node: ast.AST, scopes: list[Scope], imports: list[Import]) -> Iterator[Use]:
    if (dotted := _dotted(node)) is not None:
        assert isinstance(node, ast.expr)
        root, _, rest = dotted.partition(".")
        binding = next((scope.names[root] for scope in reversed(scopes) if root in scope.names), None)
        if binding is not None:
            yield Use(node, dotted, ".".join(filter(None, (binding.means, rest))), binding)
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield from _uses(child, scopes, imports)
            continue
        # Decorators, defaults and bases belong to the enclosing scope, but see the same names in the inner one, unless
        # a parameter has the name of the import.
        inner = _read_scope(child, imports)
        yield from _uses(child, [*(scope for scope in scopes if not scope.is_class), inner], imports)


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := _dotted(node.value)) is not None:
        return f"{value}.{node.attr}"
    return None


def _read_scope(node: ast.AST, imports: list[Import]) -> Scope:
    scope = Scope(isinstance(node, ast.ClassDef))
    if isinstance(node, _FUNCTIONS):
        arguments = node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            scope.names[argument.arg] = None
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                scope.names[rest.arg] = None
    elsewhere: set[str] = set()
    for inner in _own_nodes(node):
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            _read_import(inner, scope)
        elif isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            scope.names.setdefault(inner.id, None)
        elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.names.setdefault(inner.name, None)
        elif isinstance(inner, ast.ExceptHandler) and inner.name is not None:
            scope.names.setdefault(inner.name, None)
        elif isinstance(inner, (ast.Global, ast.Nonlocal)):
            elsewhere.update(inner.names)
    for name in elsewhere:
        scope.names.pop(name, None)
    imports += scope.imports
    return scope


def _read_import(statement: ast.Import | ast.ImportFrom, scope: Scope) -> None:
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            local = alias.asname or alias.name.partition(".")[0]
            means = alias.name if alias.asname else local
        elif statement.level or statement.module is None:
            scope.names.setdefault(alias.name, None)
            continue
        else:
            local, means = alias.asname or alias.name, f"{statement.module}.{alias.name}"
        bound = Import(means, local, statement, alias, scope)
        scope.imports.append(bound)
        before = scope.names.get(local)
        if before is None or not before.means.startswith("torch"):
            scope.names[local] = bound


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside a scope, without the nodes of nested scopes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _own_nodes(child)
