"""Which of torch's RPC tests count: those that torch itself passes on a CPU machine, by category.

`torch_baseline.json` is written by `run_conformance.py --peer torch --write`. A test that uses a part of torch which
this project leaves out, or brings later, says so with its reason; the rule is in `categorize`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CATEGORIES", "TARGET", "Entry", "categorize", "load", "save"]

BASELINE = Path(__file__).with_name("torch_baseline.json")

# The share of the plain tests that has to pass.
TARGET = 0.95

CATEGORIES = {
    "plain": "counted",
    "autograd": "needs distributed autograd, counted with it",
    "profiler": "needs torch's legacy profiler, optional",
    "TorchScript": "sends TorchScript functions or modules, optional",
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


def categorize(used: Iterable[str]) -> tuple[str, str]:
    """The category of a test by the parts of torch that it used while torch ran it, and the reason in words.

    A test that uses two of them is optional if one of them is.
    """
    parts = sorted(used)
    for category in ("TorchScript", "profiler", "autograd"):
        reasons = [part.partition(": ")[2] for part in parts if part.startswith(f"{category}: ")]
        if reasons:
            return category, f"calls {', '.join(reasons)}"
    return "plain", ""


def load() -> list[Entry]:
    """Read the list."""
    rows = json.loads(BASELINE.read_text())
    return [Entry(**row) for row in rows["tests"]]


def save(entries: Iterable[Entry], torch_version: str, skipped: dict[str, str]) -> None:
    """Write the list, with the tests that torch itself skips on this machine and its reasons."""
    rows = [
        {"name": entry.name, "category": entry.category, "reason": entry.reason, "seconds": round(entry.seconds, 1)}
        for entry in sorted(entries, key=lambda entry: entry.name)
    ]
    text = json.dumps({"torch": torch_version, "skipped_by_torch": skipped, "tests": rows}, indent=1)
    BASELINE.write_text(text + "\n")
