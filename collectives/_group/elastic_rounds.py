"""The rounds in which an elastic group is formed: how long processes wait, the members, and the records in the store.

Every process that wants to be in the next group writes a `Candidate`. The first process that finds that the wait is
over writes the members, once. That closes the round, and processes that are not members continue with the next round.
These decisions are pure.

All records in the store are signed, and checked when they are read. The signature proves that a process of the job
wrote the record, but not that the record is valid: the process may have another version, or be broken. A wrong
signature and an invalid record are errors that name the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final, TypeVar

from rpcdist.collectives._stores.store_base import SignedRecords, Store
from rpcdist.errors import AuthenticationFailed, RendezvousError
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.hub_connector import HubAddress

_STEPS: Final = range(2**63)
_MAX_TEXT_CHARS: Final = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process that wants to be in the next group.

    Attributes:
        identity: unique among all processes that ever are in the job.
        address: the address of its sockets, where others can see whether it lives.
        progress: the number of steps that it has trained.
        is_new: whether it was in no group yet; then the state of a process that was in one takes precedence.
        description: the model that it trains; equal on all members.
    """

    identity: str
    address: str
    progress: int
    is_new: bool
    description: str

    @classmethod
    def from_json(cls, text: str) -> Candidate:
        """The inverse of `json.dumps(asdict(...))`. Raises `ValueError` for invalid text."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, values: object) -> Candidate:
        """Makes a candidate from a JSON object. Raises `ValueError` if the object is invalid."""
        names = [each.name for each in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ValueError(f"a process that wants to be in a group has {', '.join(names)}")
        for name in ("identity", "address", "description"):
            if not isinstance(values[name], str) or len(values[name]) > _MAX_TEXT_CHARS:
                raise ValueError(f"its {name} must be a text of at most {_MAX_TEXT_CHARS} characters")
        if not values["identity"].isalnum():
            raise ValueError("its identity must consist of letters and digits")
        if type(values["progress"]) is not int or values["progress"] not in _STEPS:
            raise ValueError("its progress must be a number of steps")
        if type(values["is_new"]) is not bool:
            raise ValueError("is_new must be true or false")
        HubAddress.parse(values["address"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """The outcome of a round.

    Attributes:
        members: by rank in the group.
        refused: the candidates that train another model, by identity, with the model that the members train.
    """

    members: tuple[Candidate, ...]
    refused: dict[str, str]

    def rank_of(self, identity: str) -> int | None:
        return next((rank for rank, each in enumerate(self.members) if each.identity == identity), None)

    @property
    def source(self) -> int:
        """The rank whose state the others take: the first with most progress of those that were in a group before."""
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
        """The inverse of `to_json`. Raises `ValueError` for invalid text."""
        values = json.loads(text)
        if not isinstance(values, dict) or sorted(values) != ["members", "refused"]:
            raise ValueError("the outcome of a round must have members and refused")
        found, refused = values["members"], values["refused"]
        if not isinstance(found, list) or not found:
            raise ValueError("a closed round must have at least one member")
        if not isinstance(refused, dict) or not all(isinstance(each, str) for each in refused.values()):
            raise ValueError("the reasons for refused processes must be strings")
        members = tuple(map(Candidate.from_fields, found))
        if len({each.identity for each in members}) < len(members):
            raise ValueError("a process is a member twice")
        return cls(members, refused)


def _standing(candidate: Candidate) -> tuple[bool, int]:
    return not candidate.is_new, candidate.progress


def awaited(previous: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the members of the previous group that have not joined yet; each of them joins or is gone."""
    come = {each.identity for each in candidates}
    return [each for each in previous if each.identity not in come]


def is_complete(candidates: Sequence[Candidate], num_ranks: int, min_ranks: int) -> bool:
    """Whether enough processes have joined when the wait for others is over.

    Args:
        num_ranks: how many must join at the start, when no process has a state that could be lost.
        min_ranks: how many must join later.
    """
    members = close(candidates, ()).members
    return len(members) >= (num_ranks if all(each.is_new for each in members) else min_ranks)


def close(candidates: Sequence[Candidate], previous: Sequence[Candidate]) -> ClosedRound:
    """Returns the outcome of a round.

    Args:
        candidates: in order of arrival; the first that was in a group before decides which model is trained.
        previous: the members of the previous group, whose order is kept.
    """
    if not candidates:
        return ClosedRound((), {})
    places = {each.identity: place for place, each in enumerate(previous)}
    ordered = sorted(candidates, key=lambda each: (each.is_new, places.get(each.identity, len(places))))
    description = ordered[0].description
    members = tuple(each for each in ordered if each.description == description)
    return ClosedRound(members, {each.identity: description for each in ordered if each.description != description})


T = TypeVar("T")

MAX_PROCESSES: Final = 4096
"""The largest number of candidates for one group."""
_MAX_CANDIDATE_CHARS: Final = 16 * 1024
_ENDED: Final = "ended"


class ElasticRecords:
    """The signed records of an elastic group in the store. Any thread may use it.

    Raises (all methods that read):
        AuthenticationFailed: a process outside the job wrote to the store.
        RendezvousError: a process of the job wrote an invalid record.
        DistStoreError: the store is gone.
    """

    def __init__(self, store: Store, credentials: Credentials) -> None:
        self._store = store
        self._credentials = credentials
        self._signed = SignedRecords(store, credentials)

    # ------------------------------------------------------------ rounds

    def first_open_round(self, after: int) -> int:
        """Returns the first open round after `after`; rounds are closed in order.

        The number of requests grows with the logarithm of the number of closed rounds.
        """
        closed, step = after, 1
        while self.is_closed(closed + step):
            closed, step = closed + step, 2 * step
        while step > 1:
            step //= 2
            if self.is_closed(closed + step):
                closed += step
        return closed + 1

    def is_closed(self, number: int) -> bool:
        return self._store.check([f"{number}/closed"])

    def wait_until_closed(self, number: int, timeout_s: float) -> None:
        """Raises `StoreTimeout` after `timeout_s`."""
        self._store.wait([f"{number}/closed"], timeout_s)

    def closed_round(self, number: int) -> ClosedRound:
        size = MAX_PROCESSES * _MAX_CANDIDATE_CHARS
        return self._read([f"{number}/closed"], size, ClosedRound.from_json)[0]

    def close_round(self, number: int, outcome: ClosedRound) -> ClosedRound:
        """Writes the outcome, unless another process was faster; returns the outcome that is valid."""
        key = f"{number}/closed"
        self._store.compare_set(key, b"", self._credentials.sign(self._store.full_key(key), outcome.to_json().encode()))
        return self.closed_round(number)

    # ------------------------------------------------------------ candidates

    def register(self, number: int, own: Candidate) -> None:
        """Registers a candidate for a round. A process that dies before the last line has not joined."""
        self._signed.set(f"{number}/candidate/{own.identity}", json.dumps(asdict(own)))
        self._store.append(f"{number}/came", f"{own.identity} ")

    def has_candidates(self, number: int) -> bool:
        return self._store.check([f"{number}/came"])

    def candidates(self, number: int, own: Candidate) -> list[Candidate]:
        """Returns the processes that have joined a round, in order; `own` is one of them."""
        names = self._store.get(f"{number}/came") if self.has_candidates(number) else b""
        came = list(dict.fromkeys(names[: MAX_PROCESSES * 64].decode(errors="replace").split()))
        if len(came) > MAX_PROCESSES:
            raise RendezvousError(f"more than {MAX_PROCESSES} processes want to be in round {number} {self._where()}")
        keys = [f"{number}/candidate/{identity}" for identity in came]
        if own.identity not in came or not self._store.check(keys):  # written before the list
            raise AuthenticationFailed(
                f"the list {self._store.full_key(f'{number}/came')!r} of processes, {self._where()}, was changed by "
                "another program. Let only the machines of the job reach the store, and start the job again"
            )
        found = self._read(keys, _MAX_CANDIDATE_CHARS, Candidate.from_json)
        for identity, candidate in zip(came, found, strict=True):
            if candidate.identity != identity:
                raise RendezvousError(f"process {candidate.identity} wrote the record of {identity} {self._where()}")
        return found

    # ------------------------------------------------------------ the end

    def leave(self, identity: str) -> None:
        """Records that a process leaves, so that the others do not wait for it."""
        self._signed.set(f"gone/{identity}", "left")

    def has_left(self, identity: str) -> bool:
        return self._exists(f"gone/{identity}")

    def end(self) -> None:
        self._signed.set(_ENDED, "ended")

    def has_ended(self) -> bool:
        return self._exists(_ENDED)

    # ------------------------------------------------------------ inside

    def _exists(self, key: str) -> bool:
        """Whether a record with a valid signature exists."""
        if not self._store.check([key]):
            return False
        self._signed.get([key])
        return True

    def _read(self, keys: Sequence[str], max_chars: int, parse: Callable[[str], T]) -> list[T]:
        found = []
        for key, text in zip(keys, self._signed.get(keys), strict=True):
            try:
                if len(text) > max_chars:
                    raise ValueError(f"it has {len(text)} characters, but at most {max_chars} are allowed")
                found.append(parse(text))
            except (ValueError, RecursionError) as exc:
                raise RendezvousError(
                    f"the record {self._store.full_key(key)!r} is invalid: {exc}. A process of the job wrote it, "
                    f"{self._where()}: start all of them with the same version of rpcdist"
                ) from exc
        return found

    def _where(self) -> str:
        return f"in the store at {self._store.address}"
