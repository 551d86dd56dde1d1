"""Why a group cannot be used any more: decided once, told to every rank, and raised by every operation from then on.

With it: the two interfaces between the engine (or watchdog) of a group and its watch, and the verdict on an operation
that timed out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, GroupAborted, RankLost

MAX_REASON_LENGTH = 4000


class FailureKind(Enum):
    """The kinds of failure; each decides which error operations raise."""

    LOST = "lost"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """The first failure of a group.

    Attributes:
        kind: decides which error operations raise.
        reason: text for people; names world ranks.
        ranks: the ranks in the group that caused it.
    """

    kind: FailureKind
    reason: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.reason

    def error(self, operation: str) -> CollectiveError:
        """The error that `operation` (a title like "all_reduce #41 of group 'default'") raises."""
        if self.kind is FailureKind.LOST:
            return RankLost(operation, self.reason, self.ranks)
        if self.kind is FailureKind.TIMEOUT:
            return CollectiveTimeout(operation, self.reason, self.ranks)
        kinds: dict[FailureKind, type[CollectiveError]] = {
            FailureKind.MISMATCH: CollectiveMismatch,
            FailureKind.ABORTED: GroupAborted,
        }
        return kinds.get(self.kind, CollectiveError)(operation, self.reason)

    def to_json(self) -> dict[str, object]:
        """Plain values, for the watch's messages."""
        return {"kind": self.kind.value, "reason": self.reason[:MAX_REASON_LENGTH], "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, fields: object) -> GroupFailure:
        """The inverse of `to_json`. Raises ValueError for anything else."""
        if not isinstance(fields, dict):
            raise ValueError(f"a failure is an object, not {json.dumps(fields)[:100]}")
        kind, reason, ranks = fields.get("kind"), fields.get("reason"), fields.get("ranks")
        if not isinstance(reason, str) or not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ValueError("a failure has a reason and ranks")
        return cls(FailureKind(kind), reason, tuple(ranks))


def list_ranks(ranks: list[int] | tuple[int, ...] | frozenset[int]) -> str:
    """ "rank 3" or "ranks 1, 2"."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"


class Reporter:
    """Tells the other ranks what this one found out. The base class, for groups of one rank, tells nobody."""

    def report(self, failure: GroupFailure) -> None:
        """The group failed here. Any thread; does not wait."""

    def report_timeout(self, title: str, sequence: int) -> bool:
        """An operation ran out of time here; returns whether a verdict on who is missing will come."""
        return False

    def explains_losses(self) -> bool:
        """Whether a verdict will come on the state of a rank whose connection broke."""
        return False


def timeout_verdict(
    title: str, sequence: int, answers: Mapping[int, tuple[int, str]], world_ranks: tuple[int, ...]
) -> GroupFailure:
    """Names the ranks that did not come to an operation. Pure.

    Args:
        answers: rank to its newest operation and what it does, for the ranks that answered.
        world_ranks: ranks of the members in the world, by rank in the group.
    """
    silent = [rank for rank in range(len(world_ranks)) if rank not in answers]
    late = [rank for rank, (reached, _) in sorted(answers.items()) if reached < sequence]
    details = [f"rank {world_ranks[rank]} {answers[rank][1]}" for rank in late]
    details += [f"rank {world_ranks[rank]} does not answer" for rank in silent]
    missing = tuple(sorted(late + silent))
    if not missing:
        details = [f"rank {world_ranks[rank]} {text}" for rank, (_, text) in sorted(answers.items())]
        reason = f"Timed out waiting in {title}, though all ranks have come to it: {'; '.join(details)}"
        return GroupFailure(FailureKind.TIMEOUT, reason)
    names = list_ranks([world_ranks[rank] for rank in missing])
    reason = f"Timed out waiting in {title}; {names} did not arrive: {'; '.join(details)}"
    return GroupFailure(FailureKind.TIMEOUT, reason, missing)


def monitored_text(rank: int, missing: Sequence[int], limit_s: float, wait_all_ranks: bool) -> str:
    """The text of torch about a monitored barrier that failed, on one rank."""
    limit_ms = round(limit_s * 1000)
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            "rank 0. Please check rank 0 logs for faulty rank."
        )
    late = [str(other) for other in sorted(missing) if other != 0]
    if not late:
        return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit_ms} ms."
    who = f"Ranks {', '.join(late)}" if wait_all_ranks else f"Rank {late[0]}"
    return f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit_ms} ms."
