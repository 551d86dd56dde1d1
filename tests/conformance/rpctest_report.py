"""The table at the end of a conformance run, and the numbers in docs/conformance.md."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rpctest_catalogue import CATEGORIES, COUNTED, DIFFERENT, GPU, TARGET, Entry
from rpctest_fleet import Outcome

__all__ = ["reached", "replace_section", "table", "write_page"]

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

Pairs = Sequence[tuple[Entry, Outcome]]


def _passed(outcomes: Pairs, category: str) -> tuple[int, int]:
    """How many tests of a category passed, of how many."""
    statuses = [outcome.status for entry, outcome in outcomes if entry.category == category]
    return statuses.count("passed"), len(statuses)


def _by_suite(outcomes: Pairs, suite: str) -> tuple[int, int, int, int]:
    """Of the counted tests of a suite: how many passed, and of how many; then the same of the optional ones."""
    found: list[int] = []
    for counted in (True, False):
        mine = [outcome for e, outcome in outcomes if e.suite == suite and (e.category in COUNTED) == counted]
        found += [sum(outcome.status == "passed" for outcome in mine), len(mine)]
    return found[0], found[1], found[2], found[3]


def reached(outcomes: Pairs) -> bool:
    """Whether enough of the counted tests passed, in each category."""
    shares = [_passed(outcomes, category) for category in COUNTED]
    return all(passed >= TARGET * total for passed, total in shares)


def table(outcomes: Pairs, num_starts: int) -> str:
    """The result as a Markdown table, and the names of the counted tests that did not pass."""
    lines = ["", "| category | passed | of | share | |", "|---|---:|---:|---:|---|"]
    for category, meaning in CATEGORIES.items():
        passed, total = _passed(outcomes, category)
        if total:
            share = f"{100 * passed / total:.1f} %"
            wanted = f" (target {100 * TARGET:.0f} %)" if category in COUNTED else ""
            lines.append(f"| {category} | {passed} | {total} | {share} | {meaning}{wanted} |")
    lines += [
        "",
        "| suite | counted tests that passed | of | optional tests that passed | of |",
        "|---|---:|---:|---:|---:|",
    ]
    for suite in sorted({entry.suite for entry, _ in outcomes}):
        lines.append(f"| `{suite}` | {' | '.join(map(str, _by_suite(outcomes, suite)))} |")
    lines += ["", f"The four processes were started {num_starts} time{'s' * (num_starts != 1)}."]
    lost = [outcome for entry, outcome in outcomes if entry.category in COUNTED and outcome.status != "passed"]
    if lost:
        lines += ["", "Counted tests that did not pass:", ""]
        lines += [f"- `{outcome.name}` ({DIFFERENT.get(outcome.name, outcome.status)})" for outcome in lost]
    on_gpus = [outcome for entry, outcome in outcomes if entry.category == GPU and outcome.status != "passed"]
    if on_gpus:
        lines += ["", "Tests on GPUs that did not pass:", ""]
        lines += [f"- `{outcome.name}` ({outcome.status})" for outcome in on_gpus]
    return "\n".join(lines)


def write_page(outcomes: Pairs, num_starts: int) -> None:
    """Replace the numbers in docs/conformance.md by those of this run."""
    replace_section("numbers", table(outcomes, num_starts))


def replace_section(name: str, text: str) -> None:
    """Replace what stands in docs/conformance.md between two comments, and say where it was measured."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}"
    body = f"{begin}\nMeasured with {where}.\n\n{text.strip()}\n{end}"
    page = PAGE.read_text()
    replaced, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: body, page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{PAGE} has no place for the numbers (between {begin} and {end})")
    PAGE.write_text(replaced)
