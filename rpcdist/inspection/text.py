"""An explanation as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rpcdist.inspection.facts import Frame
from rpcdist.inspection.waits import Chain, Explanation, WaitLink

__all__ = ["describe", "printable_lines"]

MAX_DETAIL_LINES: Final = 60


def describe(explanation: Explanation, most_chains: int = 20) -> str:
    """The text: what everybody waits for first, and then each chain with its stacks."""
    if not explanation.chains:
        return "nothing waits: no call, collective or backward pass is older than the limit"
    lines = [f"DEADLOCK: {sentence}" for sentence in explanation.deadlocks]
    for culprit, number in explanation.culprits:
        lines.append(f"{number} {'chain ends' if number == 1 else 'chains end'} here: {culprit}")
    if not lines:
        lines.append("each chain ends at a call that has just begun: the work that waits for it goes on")
    shown: set[str] = set()
    chain_of: dict[tuple[WaitLink, ...], int] = {}  # of each end of a chain that was shown
    for number, chain in enumerate(explanation.chains[:most_chains], 1):
        lines += ["", f"chain {number}{' (ends in a circle)' if chain.is_circle else ''}:"]
        lines += _chain_lines(chain, number, shown, chain_of)
    if len(explanation.chains) > most_chains:
        lines += ["", f"{len(explanation.chains) - most_chains} more chains are not shown"]
    return printable_lines("\n".join(lines))


def _chain_lines(
    chain: Chain, number: int, shown: set[str], chain_of: dict[tuple[WaitLink, ...], int]
) -> Iterator[str]:
    """The lines of a chain; the end that it has in common with one before is left out."""
    for depth, link in enumerate(chain.links):
        indent = "  " * (depth + 1)
        rest = chain.links[depth:]
        before = chain_of.setdefault(rest, number)
        if before != number and len(rest) > 1:
            yield f"{indent}{link.worker}: {link.text}, and so on as in chain {before}"
            return
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
