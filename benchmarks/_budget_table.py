"""The table of budgets in `NOTES.md`: one column for each way in which benchmarks/rpc.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from _report import Line, layout

__all__ = ["PAGE", "update", "updated"]

PAGE = Path(__file__).parent / "NOTES.md"
BEGIN, END = "<!-- budgets: written by benchmarks/rpc.py -->", "<!-- end -->"


def update(column: str, titles: Line, lines: Sequence[Line]) -> None:
    """Writes a column of the page's table; rows that were not measured keep what they have."""
    PAGE.write_text(updated(PAGE.read_text(), column, titles, lines))


def updated(page: str, column: str, titles: Line, lines: Sequence[Line]) -> str:
    """The page with the column as it was measured.

    Args:
        page: has a table between `BEGIN` and `END`, whose first two columns say what was measured, and of which size.
        column: title of the table's column.
        titles: the first line of what was measured.
        lines: the others.

    Raises:
        ValueError: the page has no such table or column.
    """
    before, _, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    head, _, *rows = [cells(line) for line in table.splitlines() if line.startswith("|")] or [(), ()]
    if not end or column not in head:
        raise ValueError(f"{PAGE.name} has no table of budgets with a column {column!r} between {BEGIN} and {END}")
    found = {line[:2]: dict(zip(titles, line, strict=True)) for line in lines}
    at = head.index(column)
    rows = [(*row[:at], cell(found[row[:2]]), *row[at + 1 :]) if row[:2] in found else row for row in rows]
    return f"{before}{BEGIN}\n" + "\n".join(layout(head, rows)) + f"\n{END}{after}"


def cells(line: str) -> Line:
    return tuple(part.strip() for part in line.strip().strip("|").split("|"))


def cell(measured: dict[str, str]) -> str:
    """The ratio, or what was measured where the budget is none of ratios; and whether the budget was missed."""
    ratio = next((value for title, value in measured.items() if title.startswith("ours/")), "")
    is_ratio = ratio and (measured["budget"].endswith("x") or not measured["budget"])
    value = ratio if is_ratio else f"{measured['ours']} {measured['unit']}"
    return f"{value}, missed" if measured["ok"] == "NO" else value
