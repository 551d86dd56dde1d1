"""The structure of the code: no circles of imports, names that mean one thing, and tensors that name their device."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp
import networkx  # type: ignore[import-untyped]
import pytest
from docs_programs import ROOT
from house_size import import_circles, import_graph, sources
from torch.utils._device import _device_constructors

# How many entries of these folders may be files: what is more belongs into a subfolder.
MAX_FILES = {ROOT / "collectives": 20, ROOT / "rpcdist" / "rpc": 16}

# Basenames that sibling packages may share, since they mean the same thing in each.
SHARED_BASENAMES = {"__init__.py", "options.py", "constants.py", "functional.py"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """They take 130 MB."""
    yield
    tree_of.cache_clear()


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
        for node in ast.walk(tree_of(path)):
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
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in factories
    ]
    assert {"empty", "as_tensor", "sparse_coo_tensor"} <= names and len(calls) > 50
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, node in calls
        if not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ] == []


# Calls that wait for a GPU, by file and name: of copies through host memory, of numbers in lent memory that a thread of
# the pool reads, and of tensors that a device map sends to the CPU.
WAITS_FOR_GPUS = {
    ("rpcdist/rpc/_devices/cuda_memory.py", "synchronize"): 2,
    ("rpcdist/rpc/_devices/cuda_memory.py", "item"): 1,
    ("rpcdist/rpc/_values/buffers.py", "synchronize"): 2,
    ("rpcdist/rpc/_values/tensors.py", "cpu"): 1,
}


def catches_any_error(handler: ast.ExceptHandler) -> bool:
    kinds = [] if handler.type is None else ast.walk(handler.type)
    return any(isinstance(node, ast.Name) and node.id in {"Exception", "BaseException"} for node in kinds)


def is_its_text(node: ast.AST, name: str) -> bool:
    """Whether the node is `{name}` in an f-string, or `str(name)` or `repr(name)`."""
    if isinstance(node, ast.FormattedValue):
        return isinstance(node.value, ast.Name) and node.value.id == name
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"str", "repr"}
    return called and [each.id for each in node.args if isinstance(each, ast.Name)] == [name]  # type: ignore[attr-defined]


def test_the_text_of_any_error_is_made_by_a_function_that_cannot_fail() -> None:
    """The `str` of a program's exception may raise; then others were not told of the failure, and waited."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for handler in ast.walk(tree_of(path))
        if isinstance(handler, ast.ExceptHandler) and handler.name and catches_any_error(handler)
        for node in ast.walk(handler)
        if isinstance(node, ast.expr) and is_its_text(node, handler.name)
    ]
    assert found == [], "use `text_of` or `described_error` of rpcdist.errors"


def test_only_these_places_wait_for_a_gpu() -> None:
    """Calls and backward passes over several workers do not synchronize the host (docs/gpus.md)."""
    names = {"synchronize", "item", "cpu", "numpy", "tolist", "is_nonzero", "nonzero"}
    found = Counter(
        (str(path.relative_to(ROOT)), node.func.attr)
        for path in sources()
        if path.is_relative_to(ROOT / "rpcdist" / "rpc") or path.is_relative_to(ROOT / "autograd")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
        if not node.args  # an `item` of a stream, for example
    )
    assert dict(found) == WAITS_FOR_GPUS


# Tests should not pin parts that refactoring may move: tests of the shell use the public interface, or one function in
# `tests/support/inside_*.py` that reaches what no public interface shows. Tests of pure parts import their modules.
# Lower a limit when a test has moved.
MAX_FILES_THAT_IMPORT_PRIVATE_SHELL = 188
MAX_FILES_THAT_IMPORT_PRIVATE_PURE_PARTS = 54
MAX_PRIVATE_ATTRIBUTES_IN_TESTS_OF_THE_SHELL = 280
MAX_PRIVATE_ATTRIBUTES_IN_TESTS_OF_PURE_PARTS = 29

# A module is of the shell if it, or one that it imports, imports one of these, or starts a thread.
SHELL_MODULES = {
    *("asyncio", "atexit", "concurrent", "fcntl", "grpc", "http", "multiprocessing", "pathlib", "select", "selectors"),
    *("shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "time", "uvloop"),
}

# These import a module of the shell, and make no shell of the modules that import them.
PURE_NEVERTHELESS = {
    "rpcdist.own_shortage": "adds the reason to an error of the system",
    "rpcdist.rpc._values.hash_work": "limits the work for the keys of one value, in processor time",
}

# Functions that find an attribute by its name; `object` is that of `mock.patch`.
BY_NAME = {"setattr", "delattr", "getattr", "hasattr", "object"}

# Names that torch has and its programs use, so the product has them too. `_replace` is a tuple's.
NAMES_OF_TORCH_AND_PYTHON = frozenset(
    """
    _C _Options _abort_process_group _all_gather _all_gather_base _allgather_base _autograd _barrier _base
    _broadcast_coalesced _build_debug_param_to_name_mapping _build_params_for_reducer _check_reducer_finalized
    _coalescing_manager _concatenate _context_id _delay_all_reduce _flatten _fp_param _get_all_pg_configs
    _get_backend _get_backend_name _get_current_rpc_agent _get_ddp_logging_data _get_debug_info
    _get_default_group _get_default_store _get_future _get_object_coll_device _get_pg_config
    _get_process_group_name _get_profiling_future _get_type _ignore_rref_leak _is_current_rpc_agent_set
    _known_worker_ids _make_nccl_premul_sum _metadata _mp_param _new_process_group_helper _parameters
    _pg_group_ranks _pg_map _pg_names _pid _post_accumulate_grad_hooks _rebuild_buckets _recv_functions
    _reduce_scatter_base _register_backend _register_buffer_comm_hook _register_builtin_comm_hook
    _register_fused_optim _register_process_group _replace _require_initialized _resolve_process_group
    _send_functions _serialize _server_process_global_profile _set_ddp_runtime_logging_sample_rate
    _set_ddp_sink_clone _set_default_backend _set_default_timeout _set_group_desc _set_group_name
    _set_params_and_buffers_to_ignore_for_model _set_rpc_timeout _set_sequence_number_for_group
    _set_static_graph _sleep _sync_module_states _to_worker_info _underlying_non_prefix_store _unflatten
    _unregister_process_group _version _world
    """.split()
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports_of(tree: ast.Module) -> set[str]:
    return {name for node in ast.walk(tree) for name in imported(node)}


def reached_names(tree: ast.Module) -> Iterator[str]:
    """The private attributes of objects that a file uses, also those that it replaces or looks up by their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and ast.unparse(node.value) not in {"self", "cls", "super()"}:
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value.rpartition(".")[2]


def private_names_of_the_product() -> set[str]:
    """Of functions, classes, variables and attributes; without those that torch has too."""
    found = set()
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return set(filter(is_private, found)) - NAMES_OF_TORCH_AND_PYTHON


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "rpcdist" else ("rpcdist", *parts))


class ProductModules:
    """The product's modules, and which of them are the shell."""

    def __init__(self) -> None:
        graph = grimp.build_graph(
            "rpcdist", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
        )
        self._all = set(graph.modules)
        for module in self._all:
            if module in PURE_NEVERTHELESS or module.startswith("rpcdist._proto"):
                graph.remove_module(module)
        starting_threads = {module_of(path) for path in sources() if "threading.Thread(" in path.read_text()}
        self._shell = set(starting_threads)
        for module in (SHELL_MODULES | starting_threads) & graph.modules:
            self._shell |= graph.find_downstream_modules(module)

    def private_parts(self, names: Iterable[str]) -> set[str]:
        """The private modules behind imported names. The messages of the wire are not private: `proto/` has them."""
        found = set()
        for name in names:
            parts = name.split(".")
            if parts[0] == "rpcdist" and any(map(is_private, parts)):
                while name not in self._all:
                    name = name.rpartition(".")[0]
                found.add(name)
        return {name for name in found if not name.startswith("rpcdist._proto")}

    def has_shell(self, modules: set[str]) -> bool:
        return bool(modules & self._shell)


@pytest.fixture(scope="module")
def product_modules() -> ProductModules:
    return ProductModules()


def test_pure_parts_and_the_shell_are_told_apart(product_modules: ProductModules) -> None:
    """Else the limits of the next test would say nothing."""
    for pure in ("rpcdist.autograd._verdicts", "rpcdist.transport._framing.frames", "rpcdist.rpc._values.codec"):
        assert not product_modules.has_shell(product_modules.private_parts([f"{pure}.anything"]))
    for shell in (
        "rpcdist.rpc._agent",
        "rpcdist.rpc._api.call_functions",
        "rpcdist.transport._channels.socket_channel",
    ):
        assert product_modules.has_shell(product_modules.private_parts([shell]))


def test_tests_do_not_reach_further_into_private_parts(product_modules: ProductModules) -> None:
    own = private_names_of_the_product()
    files, attributes = Counter[str](), Counter[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(path.read_text())
        parts = product_modules.private_parts(imports_of(tree))
        kind = "pure" if parts and not product_modules.has_shell(parts) else "shell"
        files[kind] += bool(parts)
        attributes[kind] += sum(name in own for name in reached_names(tree))
    assert files["shell"] <= MAX_FILES_THAT_IMPORT_PRIVATE_SHELL
    assert files["pure"] <= MAX_FILES_THAT_IMPORT_PRIVATE_PURE_PARTS
    assert attributes["shell"] <= MAX_PRIVATE_ATTRIBUTES_IN_TESTS_OF_THE_SHELL
    assert attributes["pure"] <= MAX_PRIVATE_ATTRIBUTES_IN_TESTS_OF_PURE_PARTS
