"""The result of torch's tests of collectives and DDP, printed and in docs/conformance.md."""

from __future__ import annotations

from collections.abc import Sequence

from c10dtest_catalogue import DIFFERENT, WAYS, Entry
from rpctest_fleet import Outcome
from rpctest_report import replace_section

__all__ = ["table", "unexplained", "write_section"]

Pairs = Sequence[tuple[Entry, Outcome]]


def unexplained(way: str, outcomes: Pairs) -> list[Outcome]:
    """The tests that did not pass and are not listed with a reason; no reason excuses a hang, a crash or a skipped
    test.
    """
    return [one for _, one in outcomes if one.status != "passed" and not _reason(way, one)]


def _reason(way: str, outcome: Outcome) -> str | None:
    return DIFFERENT[way].get(outcome.name) if outcome.status == "failed" else None


def table(way: str, outcomes: Pairs) -> str:
    """How many passed, and the names of those that did not."""
    passed = sum(outcome.status == "passed" for _, outcome in outcomes)
    lines = [f"With {WAYS[way]}, {passed} of the {len(outcomes)} tests pass.", ""]
    for _, outcome in outcomes:
        if outcome.status != "passed":
            lines.append(f"- `{outcome.name}`: {_reason(way, outcome) or outcome.status}")
        elif outcome.name in DIFFERENT[way]:
            lines.append(f"- `{outcome.name}` passes, and need not be listed")
    return "\n".join(lines)


def write_section(way: str, outcomes: Pairs) -> None:
    """Replaces the result of this way in docs/conformance.md by that of this run."""
    replace_section(way, table(way, outcomes))
