"""The rounds in which an elastic group is formed: for which processes it waits, and which are its members. Pure.

Everybody who wants to be in the next group writes down a `Candidate`; the first who finds that nobody has to be waited
for any longer writes down the members, once.Then the round is closed, and processes that are not members go on to the
next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final

from rpcdist.transport.hub_connector import HubAddress

_STEPS: Final = range(2**63)
_MAX_TEXT_CHARS: Final = 4096


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

    @classmethod
    def from_json(cls, text: str) -> Candidate:
        """The inverse of `json.dumps(asdict(...))`. Raises `ValueError` for anything else."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, values: object) -> Candidate:
        """One made of what JSON says. Raises `ValueError` if that is none."""
        names = [each.name for each in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ValueError(f"a process that wants to be in a group has {', '.join(names)}")
        for name in ("identity", "address", "description"):
            if not isinstance(values[name], str) or len(values[name]) > _MAX_TEXT_CHARS:
                raise ValueError(f"its {name} has to be a text of at most {_MAX_TEXT_CHARS} characters")
        if not values["identity"].isalnum():
            raise ValueError("its identity has to be letters and digits")
        if type(values["progress"]) is not int or values["progress"] not in _STEPS:
            raise ValueError("its progress has to be a number of steps")
        if type(values["is_new"]) is not bool:
            raise ValueError("is_new has to be true or false")
        HubAddress.parse(values["address"])
        return cls(**values)


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
        """The inverse of `to_json`. Raises `ValueError` for anything else."""
        values = json.loads(text)
        if not isinstance(values, dict) or sorted(values) != ["members", "refused"]:
            raise ValueError("the outcome of a round has members and refused")
        found, refused = values["members"], values["refused"]
        if not isinstance(found, list) or not found:
            raise ValueError("a round is closed with at least one member")
        if not isinstance(refused, dict) or not all(isinstance(each, str) for each in refused.values()):
            raise ValueError("of those that are refused it says in words what the others train")
        members = tuple(map(Candidate.from_fields, found))
        if len({each.identity for each in members}) < len(members):
            raise ValueError("a process is a member twice")
        return cls(members, refused)


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
