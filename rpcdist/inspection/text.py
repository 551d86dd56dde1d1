"""An explanation as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rpcdist.inspection.facts import Frame
from rpcdist.inspection.waits import Chain, Explanation

__all__ = ["describe", "printable_lines"]

MAX_DETAIL_LINES: Final = 60


def describe(explanation: Explanation, most_chains: int = 20) -> str:
    """The text: what everybody waits for first, and then each chain with its stacks."""
    if not explanation.chains:
        return "nothing waits: no call, collective or backward pass is older than the limit"
    lines = [f"DEADLOCK: {sentence}" for sentence in explanation.deadlocks]
    for culprit, number in explanation.culprits:
        lines.append(f"{number} {'chain ends' if number == 1 else 'chains end'} here: {culprit}")
    shown: set[str] = set()
    for number, chain in enumerate(explanation.chains[:most_chains], 1):
        lines += ["", f"chain {number}{' (a circle)' if chain.is_circle else ''}:", *_chain_lines(chain, shown)]
    if len(explanation.chains) > most_chains:
        lines += ["", f"{len(explanation.chains) - most_chains} more chains are not shown"]
    return printable_lines("\n".join(lines))


def _chain_lines(chain: Chain, shown: set[str]) -> Iterator[str]:
    for depth, link in enumerate(chain.links):
        indent = "  " * (depth + 1)
        yield f"{indent}{link.worker}: {link.text}"
        yield from (f"{indent}    {_frame_text(frame)}" for frame in link.stack)
        if link.details and link.details not in shown:
            shown.add(link.details)
            yield from (f"{indent}    | {line}" for line in link.details.splitlines()[:MAX_DETAIL_LINES])


def _frame_text(frame: Frame) -> str:
    return f'File "{frame.file}", line {frame.line}, in {frame.function}'


def printable_lines(text: str) -> str:
    """Text of other processes without characters that a terminal would act on."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
