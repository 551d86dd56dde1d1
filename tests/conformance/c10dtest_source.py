"""torch's tests of its collectives and DDP, `distributed_test.py` in its wheel, read so that they run without a GPU.

The text of the module is changed, not the modules of torch that it uses: a tensor stays on the CPU where the test moves
it to a device, and decorators that ask for GPUs are left out. Everything else of a test stays as it is. The module gets
a name of its own, since `rpcdist.compat` shows our names to programs only, and torch's to torch.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

__all__ = ["EVERY_RANK", "load", "ranks_asked_for"]

EVERY_RANK: Final = 3
"""The ranks of a test that does not ask for another number."""

_TESTS: Final = "torch.testing._internal.distributed.distributed_test"
_HELPERS: Final = "torch.testing._internal.common_distributed"
_OWN_NAMES: Final = {_TESTS: "c10dtest_tests", _HELPERS: "c10dtest_helpers"}

_NEEDS_GPU: Final = ("skip_if_lt_x_gpu", "skip_if_no_gpu")
_NEEDS_RANKS: Final = ("require_world_size", "require_exact_world_size")
_EVENT_LISTS: Final = (
    "PROFILING_SUPPORTED_BACKENDS",
    "CUDA_PROFILING_SUPPORTED_BACKENDS",
    "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
)
"""Of the backends whose C++ code writes events into profiles."""
_SMALLER: Final = {"test_ddp_uneven_inputs": {"dim": 32}}
"""By test and variable: the size of data that a CPU would compute with for more than an hour."""


def load(backend: str) -> Any:
    """Imports the tests, as tests of Gloo; once in a process.

    Args:
        backend: the name of the backend that takes Gloo's place in them.
    """
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(EVERY_RANK), "INIT_METHOD": "file:///to/be/set"}
    _import(_HELPERS, lambda tree: tree)
    module: Any = _import(_TESTS, _OnCpu().visit)
    for name in _EVENT_LISTS:
        setattr(module, name, [])
    for name in ("gpu", "cuda", "ddp", "subgroup"):
        module.DistTestCases.backend_feature[name].add(backend)
    module.init_multigpu_helper = lambda world_size, _backend: {rank: [rank] for rank in range(world_size)}
    module.BACKEND = backend  # what the decorators asked is answered
    return module


def ranks_asked_for(module: ModuleType, test: str) -> int:
    """How many ranks the decorators of a test ask for."""
    asked: int = getattr(getattr(module.DistributedTest._DistTestBase, test), "ranks_asked_for", EVERY_RANK)
    return asked


def ask_for_ranks(count: int) -> Callable[[Any], Any]:
    """The decorator that stands where a test asks for ranks, or is skipped without them."""

    def decorate(test: Any) -> Any:
        test.ranks_asked_for = count
        return test

    return decorate


def _import(name: str, change: Callable[[ast.Module], ast.Module]) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"this torch has no {name}"
    tree = change(_OwnImports().visit(ast.parse(Path(spec.origin).read_text())))
    module = ModuleType(_OWN_NAMES[name])
    module.__dict__.update(__file__=spec.origin, ask_for_ranks=ask_for_ranks)
    sys.modules[module.__name__] = module
    exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


class _OwnImports(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        node.module = _OWN_NAMES.get(node.module or "", node.module)
        return node


class _OnCpu(ast.NodeTransformer):
    """Replaces what names a GPU by what does the same on the CPU."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        decorators, ranks = [], EVERY_RANK
        for decorator in node.decorator_list:
            name = _name(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if name in _NEEDS_RANKS and isinstance(decorator, ast.Call):
                ranks = max(ranks, ast.literal_eval(decorator.args[0]))
            elif name == "skip_if_small_worldsize":
                ranks = 8
            elif name == "skip_if_odd_worldsize":
                ranks = max(ranks, 4)
            if name not in (*_NEEDS_GPU, *_NEEDS_RANKS):
                decorators.append(decorator)
        if ranks != EVERY_RANK:
            decorators.insert(0, ast.parse(f"ask_for_ranks({ranks})", mode="eval").body)
        node.decorator_list = decorators
        smaller = _SMALLER.get(node.name, {})
        for statement in node.body:
            if isinstance(statement, ast.Assign) and (size := smaller.get(_name(statement.targets[0]))):
                statement.value = ast.Constant(size)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        if _name(node.left) == "BACKEND":
            node.left = ast.Constant("gloo")  # what a test does differently for others is not for ours
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = _name(node.func)
        if name == "torch.device":
            node.args, node.keywords = [ast.Constant("cpu")], []
        elif name == "torch.cuda.manual_seed":
            node.func = ast.parse("torch.manual_seed", mode="eval").body
        elif name in ("torch.cuda.set_device", "torch.cuda.synchronize"):
            return ast.Constant(None)
        elif name == "torch.cuda.current_device":
            return ast.Constant("cpu")
        elif isinstance(node.func, ast.Attribute) and (
            node.func.attr == "cuda" or (node.func.attr == "to" and node.args)
        ):
            return node.func.value
        self._drop_devices(node, name)
        return node

    @staticmethod
    def _drop_devices(node: ast.Call, name: str) -> None:
        kept = []
        for keyword in node.keywords:
            if keyword.arg == "device":
                keyword.value = ast.Constant("cpu")
            if not (name.endswith("DistributedDataParallel") and keyword.arg in ("device_ids", "output_device")):
                kept.append(keyword)
        node.keywords = kept


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
