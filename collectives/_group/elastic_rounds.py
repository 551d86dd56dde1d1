"""The rounds in which an elastic group is formed: who is waited for, and who is in. Pure.

Everybody who wants to be in the next group writes down a `Candidate`; the first who finds that nobody has to be waited
for any longer writes down the members, once. Then the round is closed, and whoever is not a member goes on to the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Candidate", "ClosedRound", "awaited", "close", "is_complete"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process that wants to be in the next group.

    Attributes:
        identity: tells this process from all others that ever were or will be in the job.
        address: where its sockets listen; whether it lives can be seen there.
        progress: what its state has behind it, e.g. a number of steps.
        is_new: whether it was in no group yet, so that its state counts for less than anybody's who was.
        description: what it trains; equal on all members.
    """

    identity: str
    address: str
    progress: int
    is_new: bool
    description: str


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """The outcome of a round.

    Attributes:
        members: by rank in the group.
        refused: identity to what the members train, for candidates that train something else.
    """

    members: tuple[Candidate, ...]
    refused: dict[str, str]

    def rank_of(self, identity: str) -> int | None:
        """The rank of a process; None if it is no member."""
        return next((rank for rank, each in enumerate(self.members) if each.identity == identity), None)

    @property
    def source(self) -> int:
        """The rank whose state counts: of those who were in a group before, the first with the most progress."""
        return max(range(len(self.members)), key=lambda rank: (*_standing(self.members[rank]), -rank))

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks that need the state of `source`."""
        best = self.members[self.source]
        return tuple(
            rank
            for rank, each in enumerate(self.members)
            if rank != self.source and (each.is_new or _standing(each) != _standing(best))
        )

    def to_json(self) -> str:
        return json.dumps({"members": [asdict(each) for each in self.members], "refused": self.refused})

    @classmethod
    def from_json(cls, text: str) -> ClosedRound:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(tuple(Candidate(**each) for each in fields["members"]), dict(fields["refused"]))


def _standing(candidate: Candidate) -> tuple[bool, int]:
    return not candidate.is_new, candidate.progress


def awaited(previous: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """The members of the previous group that have not come yet; each of them comes, or is gone."""
    come = {each.identity for each in candidates}
    return [each for each in previous if each.identity not in come]


def is_complete(candidates: Sequence[Candidate], num_ranks: int, min_ranks: int) -> bool:
    """Whether enough have come, once nobody else is waited for.

    Args:
        candidates: those who have come.
        num_ranks: how many there have to be at the start, when nobody has a state that would be lost.
        min_ranks: how many there have to be later.
    """
    members = close(candidates, ()).members
    return len(members) >= (num_ranks if all(each.is_new for each in members) else min_ranks)


def close(candidates: Sequence[Candidate], previous: Sequence[Candidate]) -> ClosedRound:
    """The outcome of a round.

    Args:
        candidates: in the order of their coming; the first who was in a group before decides what is trained.
        previous: the members of the previous group, whose order is kept.
    """
    if not candidates:
        return ClosedRound((), {})
    places = {each.identity: place for place, each in enumerate(previous)}
    ordered = sorted(candidates, key=lambda each: (each.is_new, places.get(each.identity, len(places))))
    description = ordered[0].description
    members = tuple(each for each in ordered if each.description == description)
    return ClosedRound(members, {each.identity: description for each in ordered if each.description != description})
