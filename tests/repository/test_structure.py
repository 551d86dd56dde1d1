"""The structure of the code: no circles of imports, names that mean one thing, and tensors that name their device."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import networkx  # type: ignore[import-untyped]
import pytest
from docs_programs import ROOT
from house_size import import_circles, import_graph, sources
from torch.utils._device import _device_constructors

# How many entries of these folders may be files: what is more belongs into a subfolder.
MAX_FILES = {ROOT / "collectives": 20, ROOT / "rpcdist" / "rpc": 16}

# Basenames that sibling packages may share, since they mean the same thing in each.
SHARED_BASENAMES = {"__init__.py", "options.py", "constants.py", "functional.py"}


@pytest.fixture(scope="module")
def imports() -> networkx.DiGraph:
    """Imports for type checkers and imports inside of functions included."""
    return import_graph()


def test_the_graph_counts_imports_for_type_checkers(imports: networkx.DiGraph) -> None:
    """Else the next test would not see the circles that are easiest to make."""
    assert imports.number_of_edges() > 1000
    assert any("TYPE_CHECKING" in path.read_text() for path in sources())
    path = networkx.shortest_path(imports, "rpcdist.parallel.distributed", "rpcdist.errors")
    assert len(path) >= 2


def test_no_module_imports_itself_by_way_of_others(imports: networkx.DiGraph) -> None:
    assert import_circles(imports) == []


@pytest.mark.parametrize("folder", MAX_FILES, ids=lambda folder: folder.name)
def test_a_folder_is_its_own_table_of_contents(folder: Path) -> None:
    files = [path.name for path in folder.iterdir() if path.is_file()]
    assert len(files) <= MAX_FILES[folder], sorted(files)


def test_a_class_name_means_one_thing() -> None:
    """In one file a class and its private base may share a name."""
    where = defaultdict(set)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].add(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_a_basename_means_one_thing() -> None:
    where = defaultdict(list)
    for path in sources():
        if path.name not in SHARED_BASENAMES:
            where[path.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_a_new_tensor_names_its_device() -> None:
    """Else it is made on the default device that the program has set: a GPU, or "meta", which has no memory."""
    names = {getattr(function, "__name__", "") for function in _device_constructors()}
    factories = {f"{module}.{name}" for name in names for module in ("torch", "torch.nested")}
    calls = [
        (path, node)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in factories
    ]
    assert {"empty", "as_tensor", "sparse_coo_tensor"} <= names and len(calls) > 50
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, node in calls
        if not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ] == []


# Tests should not pin parts that refactoring may move: tests of the shell use the public interface, and those of pure
# parts their module. Lower a limit when a test has moved.
MAX_TEST_FILES_WITH_PRIVATE_IMPORTS = 272
MAX_PRIVATE_ATTRIBUTES_IN_TESTS = 945

PRODUCT = {"rpcdist", "autograd", "collectives"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_tests_do_not_reach_further_into_private_parts() -> None:
    files, num_attributes = set(), 0
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for root, *parts in [name.split(".") for name in imported(node)]:
                if root in PRODUCT and any(map(is_private, parts)):
                    files.add(path)
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                num_attributes += not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
    assert len(files) <= MAX_TEST_FILES_WITH_PRIVATE_IMPORTS
    assert num_attributes <= MAX_PRIVATE_ATTRIBUTES_IN_TESTS
