"""Counts what a reader of the product has to learn, and compares each count with its limit.

The product is `rpcdist/`, `autograd/` and `collectives/`, without tests and without generated code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

import grimp
import networkx  # type: ignore[import-untyped]

__all__ = ["LIMITS", "counts", "import_circles", "import_graph", "sources"]

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "rpcdist" / "_proto"
TIME_LIMITS = ROOT / "rpcdist" / "time_limits.py"


class Limit(NamedTuple):
    """How much there may be today, and how much there shall be at the end."""

    today: int
    goal: int


# A change that removes something lowers `today` in the same commit. The commit of a change that raises it names the
# feature.
LIMITS = {
    "lines": Limit(90_174, 63_000),
    "code": Limit(53_995, 36_000),
    "files": Limit(400, 400),
    "classes": Limit(746, 620),
    "protocols": Limit(30, 30),
    "time limits": Limit(90, 90),
    "environment variables": Limit(20, 20),
    "import circles": Limit(0, 0),
}


def sources() -> Iterator[Path]:
    """The product's files. `rpcdist/autograd` and `rpcdist/collectives` are links, which `rglob` does not follow."""
    for folder in ("rpcdist", "autograd", "collectives"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = any(parent.is_symlink() for parent in path.parents)
            if not linked and GENERATED not in path.parents:
                yield path


def counts() -> dict[str, int]:
    """The counts that `LIMITS` limits; "code" is lines that are not blank, comment, docstring or import."""
    found: Counter[str] = Counter()
    variables: set[str] = set()
    for path in sources():
        text = path.read_text()
        tree = ast.parse(text)
        found["files"] += 1
        found["lines"] += len(text.splitlines())
        found["code"] += _code_lines(text, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found["classes"] += 1
                found["protocols"] += any(_name(base) == "Protocol" for base in node.bases)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"RPCDIST_[A-Z_]+", node.value):
                    variables.add(node.value)
    found["time limits"] = len(re.findall(r"^[A-Z_]+: Final = ", TIME_LIMITS.read_text(), re.MULTILINE))
    found["environment variables"] = len(variables)
    found["import circles"] = len(import_circles(import_graph()))
    return {name: found[name] for name in LIMITS}


def import_graph() -> networkx.DiGraph:
    """Which module imports which, with imports for type checkers and imports inside of functions."""
    found = grimp.build_graph("rpcdist", exclude_type_checking_imports=False, cache_dir=None)
    graph = networkx.DiGraph()
    for module in found.modules - {"rpcdist"}:
        graph.add_edges_from((module, imported) for imported in found.find_modules_directly_imported_by(module))
    return graph


def import_circles(graph: networkx.DiGraph) -> list[list[str]]:
    """Groups of modules that import each other."""
    return [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]


def _code_lines(text: str, tree: ast.Module) -> int:
    other: set[int] = {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if not line.strip() or line.lstrip().startswith("#")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            other.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(text.splitlines()) - len(other)


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether this is a string that stands alone: that of a class or function, or the one below a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def main() -> int:
    """Prints the table; 1 if a limit is exceeded."""
    exceeded = False
    print(f"{'':<24}{'now':>8}{'limit':>8}{'goal':>8}")
    for name, now in counts().items():
        limit = LIMITS[name]
        exceeded |= now > limit.today
        print(f"{name:<24}{now:>8,}{limit.today:>8,}{limit.goal:>8,}{'  too many' if now > limit.today else ''}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
