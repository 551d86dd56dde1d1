"""The parts of a plan: rounds of sends and receives, as data.

Rules for every plan:

 1. Rounds have the same number on all ranks: what a rank sends in round k, its peer receives in round k. A rank with
    nothing to do in a round has an empty one. So plans cannot deadlock when the steps of a round run at once, even if
    a send only ends once it was received; and plans can be merged round by round.
 2. In one round, a rank sends at most one message to each peer, and receives at most one from each.
 3. No step of a round writes what another step of this round reads or writes, except for a `deferred` receive,
    which writes once all sends of the round are done.
 4. In round 0 every rank sends to the next rank and receives from the one before it, if only an empty message. Ranks
    that were called with different operations therefore always notice, whatever each of them waits for: somewhere
    around the ring two neighbours differ.
 5. A plan ends on a rank only after it has heard from all other ranks, directly or through others.

Regions count elements. The docstring of each plan says what its buffers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `start` to `stop` of buffer number `buffer`."""

    buffer: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


NOTHING = Region(0, 0, 0)
"""The empty region: the message only says that its sender has come to this step."""


@dataclass(frozen=True, slots=True)
class SendStep:
    """Sends a region to a peer."""

    peer: int
    region: Region

    def __repr__(self) -> str:
        return f">{self.peer} {self.region if self.region.count else '-'}"


@dataclass(frozen=True, slots=True)
class ReceiveStep:
    """Receives a region from a peer.

    Attributes:
        operand: if given, the message is reduced with this region, and the result goes to `region`, which may be the
            same. The data of the lower rank is the first operand, so that two ranks that exchange get the same bits.
        deferred: whether to reduce only after this round's sends, since they read the region that is written.
    """

    peer: int
    region: Region
    operand: Region | None = None
    deferred: bool = False

    def __repr__(self) -> str:
        sign = "<" if self.operand is None else "+"
        return f"{sign}{self.peer} {self.region if self.region.count else '-'}"


@dataclass(frozen=True, slots=True)
class Round:
    """Steps that run at the same time.

    Attributes:
        final: the region of a receive with an operand, if that receive completes the reduction over all ranks. Other
            ranks may get it from here.
    """

    sends: tuple[SendStep, ...] = ()
    receives: tuple[ReceiveStep, ...] = ()
    final: Region | None = None

    def __repr__(self) -> str:
        return " ".join(map(repr, (*self.sends, *self.receives))) or "."


Plan = tuple[Round, ...]


def merge(main: Plan, other: Plan) -> Plan:
    """Runs both at once: round k has the steps of both, without the empty messages that the main plan makes needless.

    `other` moves no elements.
    """
    return tuple(_merge_rounds(a or Round(), b or Round()) for a, b in zip_longest(main, other))


def _merge_rounds(main: Round, other: Round) -> Round:
    to = {step.peer for step in main.sends}
    from_ = {step.peer for step in main.receives}
    return Round(
        (*main.sends, *(step for step in other.sends if step.peer not in to)),
        (*main.receives, *(step for step in other.receives if step.peer not in from_)),
        main.final,
    )


def chain(*plans: Plan) -> Plan:
    """Runs plans one after the other; each has the same number of rounds on all ranks."""
    return tuple(round_ for plan in plans for round_ in plan)


def split_evenly(count: int, parts: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Start and stop of `parts` neighbouring parts of `count` elements, as equal as possible.

    Args:
        parts: number of parts; some are empty when there are too few elements.
        multiple: parts start at multiples of this many elements.
    """
    units = -(-count // multiple)
    bounds = [min(count, multiple * (units * part // parts)) for part in range(parts)] + [count]
    return list(pairwise(bounds))


def grid(plans: Sequence[Plan]) -> str:
    """All ranks' plans as a table, a row for each rank: `>` sends, `<` receives, `+` receives and reduces."""
    cells = [[repr(round_) for round_ in plan] for plan in plans]
    num_rounds = max((len(row) for row in cells), default=0)
    rows = [["", *(f"round {number}" for number in range(num_rounds))]]
    rows += [[f"rank {rank}", *row] for rank, row in enumerate(cells)]
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(num_rounds + 1)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )
