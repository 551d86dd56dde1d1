"""The reference has every public module, every public name says what it is, and the navigation has every page."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docs_programs import ROOT
from site_names import (
    REFERENCE,
    VERSION,
    WITHOUT_IMPORT,
    documented_modules,
    is_of_torch,
    list_versions,
    public_names,
)

MODULES = documented_modules()
ENTRIES = (
    "rpcdist", "rpcdist.metrics", "rpcdist.inspection", "rpcdist.tracing", "rpcdist.testing", "rpcdist.compat",
    "rpcdist.ray",
)  # fmt: skip
"""All public modules are reached from these by way of `__all__`; `rpcdist` itself does not offer the last ones."""


def public_modules() -> Iterator[str]:
    waiting, seen = [name for name in ENTRIES if name not in WITHOUT_IMPORT], set(WITHOUT_IMPORT)
    yield from WITHOUT_IMPORT
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        module = importlib.import_module(name)
        waiting += [value.__name__ for each in module.__all__ if isinstance(value := getattr(module, each), ModuleType)]


def test_every_public_module_is_in_the_reference() -> None:
    assert set(public_modules()) <= set(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in WITHOUT_IMPORT])
def test_every_public_name_says_what_it_is(module: str) -> None:
    undocumented = [f"{module}.{name}" for name, value in public_names(module).items() for name in lacks(name, value)]
    assert not undocumented


def test_every_public_name_is_on_a_page() -> None:
    """The site shows what a documented module defines, what its source lists in `__all__`, and what a page names; of a
    module without such a list, it shows what is imported there with a star."""
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    shown: dict[int, str] = {}
    others: dict[int, str] = {}
    for module in MODULES.keys() - WITHOUT_IMPORT.keys():
        listed = listed_names(module)
        for name, value in public_names(module).items():
            is_shown = not listed or name in listed or getattr(value, "__module__", "") == module or is_of_torch(value)
            (shown if is_shown or f"::: {module}.{name}\n" in pages else others)[id(value)] = f"{module}.{name}"
    assert [name for value, name in others.items() if value not in shown] == []


def listed_names(module: str) -> set[str]:
    """The names that the source of a module lists for `__all__`, without tables that are read when it runs."""
    found = importlib.import_module(module)
    listed = [each for each in ast.parse(inspect.getsource(found)).body if ast.unparse(each).startswith("__all__")]
    nodes = [node for each in listed for node in ast.walk(each)]
    added = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    names = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names.union(*(getattr(found, each).__all__ for each in added if hasattr(found, each)))


def lacks(name: str, value: Any) -> Iterator[str]:
    """The name, and those of its methods, that have no docstring."""
    if is_of_torch(value):
        return
    if inspect.isroutine(value):
        if not inspect.getdoc(value):
            yield name
    elif inspect.isclass(value):
        if not (value.__doc__ or "").strip():
            yield name
        yield from (f"{name}.{each}" for each in methods_without_docstring(value))
    elif name not in documented_constants():
        yield name


def methods_without_docstring(cls: type) -> Iterator[str]:
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        is_method = inspect.isfunction(function) and function.__module__.startswith("rpcdist")
        if is_method and not name.startswith("_") and not inspect.getdoc(getattr(cls, name)):
            yield name


@functools.cache
def documented_constants() -> set[str]:
    """The names that are assigned at the top of some module, and explained there."""
    found = {"__version__"}
    for folder in ("rpcdist", "autograd", "collectives"):
        for path in (ROOT / folder).rglob("*.py"):
            for statement, after in itertools.pairwise(ast.parse(path.read_text()).body):
                explains = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if explains and isinstance(statement, ast.Assign | ast.AnnAssign):
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def test_names_of_torch_are_listed_by_hand() -> None:
    for module in MODULES.keys() - WITHOUT_IMPORT.keys():
        of_torch = {name for name, value in public_names(module).items() if is_of_torch(value)}
        listed = set(re.findall(r"`(\w+)`", MODULES[module].read_text()))
        assert of_torch <= listed, f"{MODULES[module].name}: {sorted(of_torch - listed)}"


def test_the_navigation_has_every_page_once() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    found = list(pages_of(config["nav"]))
    docs = ROOT / "docs"
    assert sorted(found) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(each)


def test_the_index_arranges_pages_as_the_navigation_does() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE)[1:]
    shown = {text.partition("\n")[0]: re.findall(r"^\| \[(\w+\.md)\]", text, re.MULTILINE) for text in sections}
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    arranged = {name: pages for entry in nav for name, pages in entry.items() if name != "Start"}
    assert shown == {name: [page for page in pages if isinstance(page, str)] for name, pages in arranged.items()}


def test_no_page_links_out_of_the_site() -> None:
    """Files of the repository are named, and not linked: the site does not have them."""
    for page in (ROOT / "docs").rglob("*.md"):
        depth = len(page.relative_to(ROOT / "docs").parts)
        outside = re.findall(rf"\]\((?:\.\./){{{depth}}}[^)]*\)", page.read_text())
        assert not outside, f"{page.name}: {outside}"


def test_the_reference_has_no_page_without_a_module() -> None:
    assert {Path(page) for page in REFERENCE.glob("*.md")} == set(MODULES.values())


def test_each_version_of_the_site_has_a_folder(tmp_path: Path) -> None:
    for version in ("0.2.0", "0.10.1", "0.9.0"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "objects.inv").touch()
    assert list_versions(tmp_path) == ["0.10.1", "0.9.0", "0.2.0"]
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [(one["version"], one["aliases"]) for one in listed] == [
        ("0.10.1", ["latest"]),
        ("0.9.0", []),
        ("0.2.0", []),
    ]
    assert 'url=0.10.1/index.html"' in (tmp_path / "index.html").read_text()
    assert tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["site_dir"] == f"out/site/{VERSION}"
