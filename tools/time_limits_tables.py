"""Writes the tables of `docs/time_limits.md` from `rpcdist/time_limits.py`; `--check` compares without writing."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path

from rpcdist import time_limits
from rpcdist._limit_dependencies import DEPENDENCIES

__all__ = ["dependency_table", "limit_tables", "updated"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "time_limits.md"
TABLES = re.compile(
    r"(<!-- (?P<name>[a-z]+): written by tools/time_limits_tables.py -->\n).*?(<!-- end -->)", re.DOTALL
)
HEADING = re.compile(r"^# -{20,} (.+)$")


def limit_tables() -> str:
    """One table for each group of limits, under the heading that the module gives it."""
    source = (ROOT / "rpcdist" / "time_limits.py").read_text()
    body = ast.parse(source).body
    comments = {
        statement.lineno: after.value.value
        for statement, after in itertools.pairwise(body)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }
    lines: list[str] = []
    for number, line in enumerate(source.splitlines(), start=1):
        if heading := HEADING.match(line):
            lines += ["", f"### {heading[1]}", "", "| limit | value | what it covers |", "|---|---|---|"]
        elif limit := re.match(r"([A-Z_]+): Final = ", line):
            value = getattr(time_limits, limit[1])
            lines.append(f"| `{limit[1]}` | {_text(limit[1], value)} | {' '.join(comments[number].split())} |")
    return "\n".join(lines).strip("\n") + "\n"


def dependency_table() -> str:
    """What is compared at import."""
    lines = ["| limit | must exceed | because |", "|---|---|---|"]
    for longer, shorter, why in DEPENDENCIES:
        lines.append(f"| `{longer}` | {' + '.join(f'`{name}`' for name in shorter)} | {why} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with its tables as the module has them."""
    tables = {"limits": limit_tables(), "dependencies": dependency_table()}
    return TABLES.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n{match[3]}", page)


def _text(name: str, value: float) -> str:
    if not name.endswith(("_S", "_MS")):
        return f"{value:g}"
    seconds = value / 1000 if name.endswith("_MS") else value
    for unit, unit_s in (("days", 24 * 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= unit_s and not (unit == "min" and seconds < 5 * unit_s):
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds / 1e-6:g} us"


def main() -> int:
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        is_same = updated(page) == page
        print("" if is_same else "docs/time_limits.md differs: run python tools/time_limits_tables.py")
        return 0 if is_same else 1
    PAGE.write_text(updated(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
