"""Which of torch's tests of collectives and DDP count: those that Gloo passes here, and why some fail on rpcdist.

`c10d_baseline.json` is written by `run_c10d_conformance.py --peer torch --write`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

__all__ = ["DIFFERENT", "WAYS", "Entry", "load", "save"]

BASELINE = Path(__file__).with_name("c10d_baseline.json")

WAYS: Final = {
    "compat": "`rpcdist.compat` in the place of `torch.distributed`",
    "backend": "torch's own groups and DDP on the backend `rpcdist`",
}

_EVENTS: Final = "expects events in a profile that torch's C++ code records only for its own backends"

_USED_MAP: Final = "reads the map of used parameters of torch's C++ reducer"

DIFFERENT: Final[dict[str, dict[str, str]]] = {
    "compat": {
        "test_all_reduce_complex_unsupported_ops": "expects the product of complex numbers to fail; here it works",
        "test_ddp_control_flow_different_across_ranks": _USED_MAP,
        "test_ddp_control_flow_same_across_ranks": _USED_MAP,
        "test_ddp_profiling_torch_profiler": _EVENTS,
        "test_ddp_unused_params_rebuild_buckets_exception": "expects an error that recommends debug mode for the "
        "parameters' names; here the error always has them",
    },
    "backend": {"test_ddp_profiling_torch_profiler": _EVENTS},
}
"""By way and test: why it fails here on purpose; if it hangs or crashes, that is another reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One test that Gloo passes, on how many ranks, and how long that took."""

    name: str
    ranks: int
    seconds: float = 0.0


def load() -> list[Entry]:
    """Reads the list."""
    return [Entry(**row) for row in json.loads(BASELINE.read_text())["tests"]]


def save(passed: Iterable[Entry], others: dict[str, str], *, keep: bool = False) -> None:
    """Writes the list, with the tests that Gloo does not pass here and why.

    Args:
        passed: what Gloo passes.
        others: by test, why not.
        keep: leave tests in the list that are not among these, since only some were run.
    """
    import torch

    tests = {entry.name: entry for entry in passed}
    if keep and BASELINE.exists():
        old = json.loads(BASELINE.read_text())
        known = tests.keys() | others.keys()
        tests |= {row["name"]: Entry(**row) for row in old["tests"] if row["name"] not in known}
        others = {name: why for name, why in old["not_passed_by_torch"].items() if name not in known} | others
    rows = [asdict(tests[name]) for name in sorted(tests)]
    text = json.dumps({"torch": torch.__version__, "not_passed_by_torch": others, "tests": rows}, indent=1)
    BASELINE.write_text(text + "\n")
