"""The product does not grow beyond the limits of `tools/house_size.py`."""

from __future__ import annotations

import ast

import house_size
import pytest


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    return house_size.counts()


@pytest.mark.parametrize("name", house_size.LIMITS)
def test_the_product_is_within_its_limits(name: str, counts: dict[str, int]) -> None:
    limit = house_size.LIMITS[name].today
    assert counts[name] <= limit, (
        f"{name}: {counts[name]}, and the limit is {limit}. Remove as much as you add, or raise the limit in "
        f"tools/house_size.py and say in the commit for which feature."
    )


@pytest.mark.parametrize("name", house_size.LIMITS)
def test_a_limit_is_not_below_its_goal(name: str) -> None:
    limit = house_size.LIMITS[name]
    assert limit.goal <= limit.today


def test_links_and_generated_code_are_not_counted() -> None:
    found = [path.relative_to(house_size.ROOT).parts for path in house_size.sources()]
    assert len(found) == len(set(found)) > 200
    assert not [parts for parts in found if parts[:2] in {("rpcdist", "_proto"), ("rpcdist", "collectives")}]


def test_docstrings_comments_imports_and_blank_lines_are_no_code() -> None:
    text = '"""Doc."""\n\nimport sys\n\n# why\ndef f(a: int) -> int:\n    """Two\n\n    lines."""\n    return a\n'
    text += '\n\nX = f(1)\n"""What it is."""\n'
    assert house_size._code_lines(text, ast.parse(text)) == 3
