"""The program of the four processes in which torch's tests run: each runs the body of a test for its rank.

`run` takes a `Case` and answers with a `Result`. Once all four have answered, `tidy` removes what the test left
behind. torch's own harness runs each test in
fresh processes, so tests may leave anything behind: an agent, a process group, changed globals, environment variables.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import os
import traceback
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch.distributed as dist
from rpctest_catalogue import NOT_WATCHED

__all__ = ["WORLD_SIZE", "Case", "Result", "prepare", "run", "tidy"]

WORLD_SIZE = 4
PRELOAD = "torch.testing._internal.common_distributed"
"""It imports modules of torch that need torch's own names, so it comes before rpcdist takes their place."""

_peer: list[str] = []
"""Whose RPC the tests of this process run on."""
_kept: list[_State] = []
"""The state of this process before the test that runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test to run: a method of a class in `rpctest_suites`, and a file that only this run of it uses."""

    suite: str
    test: str
    file_name: str

    def __str__(self) -> str:
        return f"{self.suite}.{self.test}"


@dataclass(frozen=True, slots=True)
class Result:
    """How the body of a test ended on one rank: `ok`, `skipped` or `error`, and what it used on the way.

    For a process that gave no answer the status is `crashed` or `late`.
    """

    status: str
    text: str = ""
    used: frozenset[str] = field(default_factory=frozenset)


def prepare(peer: str) -> None:
    """Import what the tests need; once in each process, and first.

    Args:
        peer: `rpcdist` or `torch`.
    """
    importlib.import_module(PRELOAD)
    if peer == "rpcdist":
        import rpctest_modules

        rpctest_modules.install()
    importlib.import_module("rpctest_suites")
    gc.freeze()  # `tidy` collects what a test left, not the half a million objects of these modules
    _peer.append(peer)


def run(case: Case, rank: int) -> Result:
    """Run the body of a test for a rank."""
    _kept[:] = [_State.now()]
    with _recording(watched=_peer == ["torch"] and case.suite not in NOT_WATCHED) as used:
        result = _run(importlib.import_module("rpctest_suites"), case, rank)
    return Result(result.status, result.text, frozenset(used))


def tidy(peer: str) -> list[str]:
    """Remove what the last test left behind; the problems with that."""
    problems = _tidy(_kept.pop(), peer)
    if peer == "rpcdist":
        import rpctest_modules

        if rpctest_modules.torch_agent_is_set():
            problems.append("torch's own RPC agent was started")
    return problems


def _run(suites: ModuleType, case: Case, rank: int) -> Result:
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase

    test = getattr(suites, case.suite)(case.test)
    if rank >= test.world_size:
        return Result("ok")  # the test is for fewer workers
    test.rank = rank
    test.file_name = case.file_name
    common_utils.set_rng_seed()
    common_utils.PRINT_REPRO_ON_FAILURE = False
    try:
        getattr(test, case.test)()
    except unittest.SkipTest as exc:
        return Result("skipped", str(exc))
    except SystemExit as exc:
        if exc.code in {skip.exit_code for skip in TEST_SKIPS.values()}:
            return Result("skipped", f"exit code {exc.code}")
        if exc.code in (0, None):
            return Result("ok")
        kind = "error" if rank == 0 or exc.code == MultiProcessTestCase.TEST_ERROR_EXIT_CODE else "ok"
        return Result(kind, f"exit code {exc.code}")
    except BaseException:
        return Result("error", traceback.format_exc())
    return Result("ok")


@dataclass(frozen=True)
class _State:
    """State that tests change in a process, which torch would have thrown away."""

    environment: dict[str, str]
    backend_type: type
    test_globals: dict[str, Any]

    @classmethod
    def now(cls) -> _State:
        return cls(dict(os.environ), _rpc("backend_registry").BackendType, dict(vars(_tests())))

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        _rpc("backend_registry").BackendType = self.backend_type
        tests = _tests()
        for name in vars(tests).keys() - self.test_globals.keys():
            delattr(tests, name)
        vars(tests).update(self.test_globals)
        # These two are completed by the tests that use them, and a future can be completed only once.
        tests.VALUE_FUTURE = concurrent.futures.Future()
        tests.DONE_FUTURE = concurrent.futures.Future()
        # The autograd tests tell each other through these which contexts there are.
        autograd_tests = importlib.import_module("torch.testing._internal.distributed.rpc.dist_autograd_test")
        autograd_tests.rpc_done[:] = [False] * WORLD_SIZE
        autograd_tests.ctx_ids[:] = [-1] * WORLD_SIZE
        autograd_tests.known_context_ids.clear()
        autograd_tests.DistAutogradTest._test_clean_context_backward_context_id = None
        autograd_tests.SimulateBackwardError._simulate_error = True


def _tests() -> Any:
    return importlib.import_module("torch.testing._internal.distributed.rpc.rpc_test")


def _rpc(name: str) -> Any:
    return importlib.import_module(f"torch.distributed.rpc.{name}")


def _tidy(keep: _State, peer: str) -> list[str]:
    """Remove what a test left behind, and return what went wrong with that."""
    problems: list[str] = []
    api = _rpc("api")
    steps: dict[str, Callable[[], None]] = {"shutdown": lambda: _shut_down(api), "process group": _destroy_groups}
    for what, step in steps.items():
        try:
            step()
        except BaseException:
            problems.append(f"{what} after the test: {traceback.format_exc()}")
    keep.restore()
    api._ignore_rref_leak = True
    gc.collect()
    if peer == "rpcdist" and api._is_current_rpc_agent_set():
        problems.append("an agent is still set after the test and shutdown()")
    return problems


def _shut_down(api: Any) -> None:
    if api._is_current_rpc_agent_set():
        api.shutdown(graceful=False)


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _recording(watched: bool) -> Iterator[set[str]]:
    """Record which optional parts of torch a test uses when torch runs it: autograd, the profiler, TorchScript."""
    used: set[str] = set()
    with contextlib.ExitStack() as stack:
        for module_name, names, part in _PARTS if watched else ():
            module = importlib.import_module(module_name)
            for name in names:
                stack.enter_context(_patched(module, name, f"{part}: {name}", used))
        yield used


_PARTS = (
    ("torch.distributed.autograd", ("context", "backward", "get_gradients", "_retrieve_context"), "autograd"),
    ("torch.testing._internal.distributed.rpc.rpc_test", ("_profile",), "profiler"),
    ("torch.distributed.rpc", ("_server_process_global_profile",), "profiler"),
    ("torch.autograd.profiler", ("profile", "record_function"), "profiler"),
    ("torch.distributed.rpc.api", ("_invoke_rpc_torchscript", "_invoke_remote_torchscript"), "TorchScript"),
    ("torch.jit", ("save", "load", "script"), "TorchScript"),
)


@contextlib.contextmanager
def _patched(module: ModuleType, name: str, entry: str, used: set[str]) -> Iterator[None]:
    # A class keeps its identity, because tests send it by name: what is replaced is its constructor.
    owner: Any = module
    attribute = name
    if isinstance(getattr(module, name), type):
        owner, attribute = getattr(module, name), "__init__"
    original = getattr(owner, attribute)

    def noting(*args: Any, **kwargs: Any) -> Any:
        used.add(entry)
        return original(*args, **kwargs)

    setattr(owner, attribute, noting)
    try:
        yield
    finally:
        setattr(owner, attribute, original)
