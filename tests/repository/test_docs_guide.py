"""The program in docs/guide.md does what the page says."""

from __future__ import annotations

import ast
import sys

import pytest
from docs_programs import ROOT, environment, page, run, script_of


def test_the_script_of_the_guide_is_what_the_page_says() -> None:
    """Comments may differ: the script has those of its steps."""
    script, _ = script_of(page("docs/guide.md"))
    tree = ast.parse(page("docs/guide.py"))
    del tree.body[0]  # the docstring
    assert ast.unparse(tree) == script


@pytest.mark.multiproc
def test_the_guide_for_newcomers_prints_what_it_says() -> None:
    _, expected = script_of(page("docs/guide.md"))
    assert len(expected) >= 15
    [printed] = run([([sys.executable, "guide.py"], environment(OMP_NUM_THREADS="1"))], ROOT / "docs")
    assert printed.splitlines() == expected
