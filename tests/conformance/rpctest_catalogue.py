"""Which of torch's RPC tests count: those that torch itself passes on a CPU machine, by category.

`torch_baseline.json` is written by `run_conformance.py --peer torch --write`. A test that uses a part of torch which
this project leaves out, or brings later, says so with its reason; the rule is in `categorize`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "CATEGORIES",
    "COUNTED",
    "DIFFERENT",
    "GPU",
    "NOT_WATCHED",
    "TARGET",
    "WITHOUT_GPUS",
    "Entry",
    "categorize",
    "gpu_tests",
    "load",
    "save",
]

BASELINE = Path(__file__).with_name("torch_baseline.json")

# The share of the tests in each counted category that has to pass.
TARGET = 0.95
COUNTED = ("plain", "autograd", "profiler")

# torch's optimizer compiles its steps with TorchScript, which cannot compile what watches them; all of these tests are
# about the optimizer itself, with gradients of distributed autograd.
NOT_WATCHED = ("DistOptimizerTest",)

# Counted, although they fail: what they ask for is different here on purpose.
DIFFERENT = {
    "DistAutogradTest.test_dist_autograd_profiling": "expects the names of torch's C++ nodes, SendRpcBackward and "
    "RecvRpcBackward, in a profile",
    "DistAutogradTest.test_post_hooks": "expects hooks of AccumulateGrad nodes to run; here gradients are captured "
    "before these nodes",
    "RemoteModuleTest.test_unsupported_methods": "expects `to`, `state_dict`, `load_state_dict`, `named_parameters` "
    "and `requires_grad_` to raise; here they work",
    "RpcTest.test_custom_exception_throw_during_reconstruction": "expects a RuntimeError for a class whose "
    "constructor takes further arguments; here the caller gets the original exception",
    "RpcTest.test_rref_proxy_non_exist": "expects `remote()` of a method that does not exist to raise; here the "
    "returned reference raises when it is used",
    "TensorPipeAgentRpcTest.test_rref_proxy_timeout": "expects `remote()` of a method to wait for a value that does "
    "not exist yet; here it returns at once, and the returned reference raises",
    "RpcTest.test_shutdown_errors": "makes the private function `_broadcast_to_followers` fail, which does not exist "
    "here",
    "TensorPipeAgentRpcTest.test_op_with_invalid_args": "expects the error text of TorchScript's dispatcher, which "
    "calls here do not use",
}

GPU = "gpu"
GPU_SUITES = {
    "CudaDistAutogradTest": "rpc/dist_autograd_test.py",
    "CudaRemoteModuleTest": "nn/api/remote_module_test.py",
    "CudaRpcTest": "rpc/rpc_test.py",
    "TensorPipeAgentCudaRpcTest": "rpc/rpc_test.py",
    "TensorPipeCudaDistAutogradTest": "rpc/dist_autograd_test.py",
}
"""The files of the classes whose tests need GPUs, in `torch/testing/_internal/distributed`."""

WITHOUT_GPUS = (
    "test_cuda_future_device_not_cuda",
    "test_device_map_cpu",
)
"""Tests of `TensorPipeAgentCudaRpcTest` that pass without the GPUs for which they look."""

CATEGORIES = {
    "plain": "counted",
    "autograd": "uses distributed autograd, counted",
    "node names": "expects the names of torch's C++ graph nodes, optional",
    "profiler": "uses torch's older profiler, counted",
    "TorchScript": "sends TorchScript functions or modules, optional",
    GPU: "needs GPUs; run on machines with a GPU",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One test that torch passes: `suite.test`, its category, and what put it there."""

    name: str
    category: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def suite(self) -> str:
        return self.name.partition(".")[0]

    @property
    def test(self) -> str:
        return self.name.partition(".")[2]


def categorize(used: Iterable[str], name: str = "") -> tuple[str, str]:
    """The category of a test by the parts of torch that it used while torch ran it, and the reason in words.

    A test that uses two of them is optional if one of them is.

    Args:
        used: what it used.
        name: of the test; those that look at the graph's nodes are told by it.
    """
    if name.partition(".")[0] in NOT_WATCHED:
        return "autograd", "steps with the gradients of a context"
    parts = sorted(used)
    if "graph_for" in name:
        return "node names", "expects C++ nodes, torch::distributed::autograd::RecvRpcBackward"
    for category in ("TorchScript", "profiler", "autograd"):
        reasons = [part.partition(": ")[2] for part in parts if part.startswith(f"{category}: ")]
        if reasons:
            return category, f"calls {', '.join(reasons)}"
    return "plain", ""


def gpu_tests() -> list[Entry]:
    """The tests that need GPUs. torch skips them where the baseline is made, so they are read from its files."""
    spec = find_spec("torch.testing._internal")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "distributed"
    found = []
    for file in sorted(set(GPU_SUITES.values())):
        for node in ast.parse((folder / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and GPU_SUITES.get(node.name) == file:
                names = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
                found += [Entry(f"{node.name}.{name}", GPU) for name in names if name.startswith("test_")]
    return found


def load() -> list[Entry]:
    """Read the list."""
    rows = json.loads(BASELINE.read_text())
    return [Entry(**row) for row in rows["tests"]]


def save(entries: Iterable[Entry], torch_version: str, skipped: dict[str, str], *, keep: bool = False) -> None:
    """Write the list, with the tests that torch itself skips on this machine and its reasons.

    Args:
        entries: the tests that torch passes.
        torch_version: of the torch that ran them.
        skipped: by test, why.
        keep: leave tests in the list that are not among these, since only some were run.
    """
    if keep:
        old = json.loads(BASELINE.read_text())
        entries = list(entries)
        new = {entry.name for entry in entries} | skipped.keys()
        entries += [Entry(**row) for row in old["tests"] if row["name"] not in new]
        skipped = {name: why for name, why in old["skipped_by_torch"].items() if name not in new} | skipped
    rows = [
        {"name": entry.name, "category": entry.category, "reason": entry.reason, "seconds": round(entry.seconds, 1)}
        for entry in sorted(entries, key=lambda entry: entry.name)
    ]
    text = json.dumps({"torch": torch_version, "skipped_by_torch": skipped, "tests": rows}, indent=1)
    BASELINE.write_text(text + "\n")
