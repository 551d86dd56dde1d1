"""The tables of attacks, of who may say what, and of guarantees name tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TABLES = {"tests/attacks/README.md": (1, 30), "docs/security.md": (3, 60), "docs/gpus.md": (1, 10)}
"""How many tables of tests there are at least, and how many rows they have together."""


@pytest.mark.parametrize("document", TABLES)
def test_each_row_has_a_test_that_exists(document: str) -> None:
    tables = list(tables_of_tests((REPOSITORY / document).read_text()))
    missing = [problem for rows in tables for row in rows for problem in problems_of(row)]
    assert not missing
    least_tables, least_rows = TABLES[document]
    assert len(tables) >= least_tables and sum(map(len, tables)) >= least_rows


def test_a_row_without_a_test_is_noticed() -> None:
    of_tests = "| a | test |\n|---|---|\n| **One** | |\n| a | `tests/no.py::test_a` |\n| b | |\n"
    [rows] = tables_of_tests(f"{of_tests}\n| c | d |\n|---|---|\n| e | |")
    assert [problems_of(row) for row in rows] == [["tests/no.py::test_a"], ["| b | |"]]


def tables_of_tests(text: str) -> Iterator[list[str]]:
    """The rows of each table whose last column is headed "test", without its headings."""
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = table.splitlines()
        if head.endswith("| test |"):
            yield [row for row in rows if not row.startswith("| **")]


def problems_of(row: str) -> list[str]:
    """Tests in a row that do not exist; the row itself, if it has none."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row.rsplit("| ", 1)[-1])
    return [f"{path}::{name}" for path, name in named if not exists(path, name)] if named else [row]


def exists(path: str, name: str) -> bool:
    file = REPOSITORY / path
    return file.exists() and f"def {name}(" in file.read_text()
