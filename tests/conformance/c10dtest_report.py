"""The result of torch's tests of collectives and DDP, printed and in docs/conformance.md."""

from __future__ import annotations

from collections.abc import Sequence

from c10dtest_catalogue import DIFFERENT, WAYS, Entry
from rpctest_fleet import Outcome
from rpctest_report import replace_section

__all__ = ["table", "unexplained", "write_section"]

Pairs = Sequence[tuple[Entry, Outcome]]


def unexplained(way: str, outcomes: Pairs) -> list[Outcome]:
    """What did not pass and is not listed with a reason."""
    return [one for _, one in outcomes if one.status != "passed" and one.name not in DIFFERENT[way]]


def table(way: str, outcomes: Pairs) -> str:
    """How many passed, and the names of those that did not."""
    passed = sum(outcome.status == "passed" for _, outcome in outcomes)
    lines = [f"With {WAYS[way]}, {passed} of the {len(outcomes)} tests pass.", ""]
    for _, outcome in outcomes:
        reason = DIFFERENT[way].get(outcome.name)
        if outcome.status != "passed":
            lines.append(f"- `{outcome.name}`: {reason or outcome.status}")
        elif reason is not None:
            lines.append(f"- `{outcome.name}` passes, and need not be listed")
    return "\n".join(lines)


def write_section(way: str, outcomes: Pairs) -> None:
    """Replaces the result of this way in docs/conformance.md by that of this run."""
    replace_section(way, table(way, outcomes))
