"""Why a group cannot be used any more: decided once, told to every rank, and raised by every operation from then on."""

from __future__ import annotations

import json
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
