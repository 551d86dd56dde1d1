"""How the benchmarks show what they measured: tables, the machine, and the sections of RESULTS.md."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["RESULTS", "Line", "about_machine", "layout", "show", "write_results"]

RESULTS = Path(__file__).with_name("RESULTS.md")
Line = tuple[str, ...]


def show(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def layout(head: Line, lines: Sequence[Line]) -> list[str]:
    """A Markdown table that is also readable as plain text."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    rule = tuple("-" * width for width in widths)
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (head, rule, *lines)
    ]


def about_machine(*packages: str) -> list[str]:
    """Where and with what this is measured: two list items."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return [
        f"- machine: {cpu_name()}, {cores} cores, {platform.system()} {platform.release()}; load before: {load}",
        f"- versions: Python {platform.python_version()}, {versions}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    ]


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def write_results(name: str, lines: Iterable[str]) -> None:
    """Replaces the section of `python benchmarks/<name>` in RESULTS.md, or appends it; other sections stay."""
    mark = name.replace(" --", ", ")  # a comment must not hold two hyphens
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    old = RESULTS.read_text() if RESULTS.exists() else "# Results of the benchmarks\n"
    section = "\n".join([begin, f"## `python benchmarks/{name}`", "", *lines, end])
    if begin in old:
        before, _, rest = old.partition(begin)
        new = before + section + rest.partition(end)[2]
    else:
        new = f"{old.rstrip()}\n\n{section}\n"
    RESULTS.write_text(new)
