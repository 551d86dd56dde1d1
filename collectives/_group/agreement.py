"""`agreement`: the ranks of a group find each other in a store in which earlier processes left keys. Pure.

A store may outlive the processes: that of `torchrun`'s agent, a file, or the user's own. The ranks share no knowledge
that tells one start of the job from the next, as agents of `torchrun` count only their own failures. So the ranks agree
on a number through the store, and the group's keys begin with that number.

The agreement proceeds in generations 0, 1, 2, ..., each of which is closed once, by `compare_set` of its outcome:

- `Next`: this generation is over, continue with the next one. The leader, which is the first rank of the group, closes
  a generation in this way when it joins, and then owns the next one.
- `Made`: the owner has read that every rank has joined. The group consists of the processes with these tickets.
- `Disagreement`: two processes want different groups.

Every process draws a ticket when it joins, and records its presence in each generation. Its record in a generation
with an owner was written after that owner joined. So no group contains a dead process of an earlier start.

Rules: no I/O, clock, thread or randomness. `agreement` yields operations of a store, and is sent their results;
`Missing` as the result of a `Get` means that the deadline passed. Invariants, which hold whichever process dies after
any step:

 1. All processes that return from one generation are members of one `Made`, at most one for each rank.
 2. Each member recorded its presence after the owner of the generation joined, and did not give up before `Made`.
 3. If one process for each rank joins after all others have died, all of them return, from the same generation.
 4. Of two living processes of one rank the later one stays; the earlier one returns `Displaced`.
 5. A process that makes the owner's wait pointless (another leader, a rank that wants another group, a rank that gives
    up) sets the keys that the owner waits for. It sets them before it closes the generation, so no other process is
    harmed if it dies in between.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, cast

from rpcdist.collectives._stores.store_operations import Add, Check, CompareSet, Get, Missing, Set, StoreOperation, Wait
from rpcdist.errors import RendezvousError, abridged

R = TypeVar("R")
Steps = Generator[StoreOperation[object], object, R]

HINT: Final = "hint"
TICKETS: Final = "tickets"
_MAX_RANKS: Final = 1 << 16
_MAX_DIGITS: Final = 18
GAVE_UP: Final = -1  # stands for the ticket of a rank that gave up


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process's request to be `rank` of a group of `ranks`, whose first rank leads; `description` names the group.

    Attributes:
        ticket: the number of the process, in the order of arrival; 0 before it arrives.
    """

    rank: int
    ranks: tuple[int, ...]
    description: str
    ticket: int = 0

    def fits(self, other: JoinRequest) -> bool:
        return (self.ranks, self.description) == (other.ranks, other.description)


# ---------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Made:
    """All ranks have joined; the keys of the group in the store begin with the number of the generation."""

    number: int


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Another process wants another group."""

    other: JoinRequest


@dataclass(frozen=True, slots=True)
class Displaced:
    """A later process joined under the same rank."""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The deadline passed before all ranks joined.

    Attributes:
        missing: ranks that have not joined; empty if they are unknown.
        twice: a rank under which several processes joined, if one was noticed.
    """

    missing: tuple[int, ...]
    twice: int | None


Result = Made | Disagreement | Displaced | Incomplete


# ---------------------------------------------------------------- what is in the store


@dataclass(frozen=True, slots=True)
class _Next:
    """The next generation has this owner, or none; `gone` is a rank that gave up."""

    owner: JoinRequest | None
    gone: int | None = None


@dataclass(frozen=True, slots=True)
class _Complete:
    tickets: tuple[int, ...]  # in the order of the ranks


@dataclass(frozen=True, slots=True)
class _Conflict:
    one: JoinRequest
    other: JoinRequest


_Outcome = _Next | _Complete | _Conflict


def _encoded(entry: _Outcome | JoinRequest) -> bytes:
    match entry:
        case JoinRequest():
            values = _request_values(entry)
        case _Next(owner, gone):
            values = ["next", None if owner is None else _request_values(owner), gone]
        case _Complete(tickets):
            values = ["made", tickets]
        case _Conflict(one, other):
            values = ["differ", _request_values(one), _request_values(other)]
    return json.dumps(values, separators=(",", ":")).encode()


def _outcome(text: bytes) -> _Outcome:
    """Reads an outcome. Raises `RendezvousError` for anything that `_encoded` does not write."""
    match _loaded(text):
        case ["next", owner, int() | None as gone]:
            return _Next(None if owner is None else _request_of(owner), gone)
        case ["made", list(tickets)] if all(type(ticket) is int for ticket in tickets):
            return _Complete(tuple(tickets))
        case ["differ", one, other]:
            return _Conflict(_request_of(one), _request_of(other))
        case unknown:
            raise _foreign(unknown)


def _request_values(request: JoinRequest) -> list[object]:
    return [request.rank, _runs(request.ranks), request.description, request.ticket]


def _request_of(values: object) -> JoinRequest:
    """Reads the values of a request. Raises `RendezvousError` for others: torchrun's store has no token."""
    match values:
        case [int(rank), list(runs), str(description), int(ticket)]:
            ranks: list[int] = []
            for run in runs:
                match run:
                    case [int(first), int(last)] if last - first < _MAX_RANKS - len(ranks):
                        ranks += range(first, last + 1)
                    case _:
                        raise _foreign(run)
            if rank in ranks:
                return JoinRequest(rank, tuple(ranks), description, ticket)
    raise _foreign(values)


def _loaded(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _foreign(text) from None


def _number(text: bytes) -> int:
    if len(text) > _MAX_DIGITS or not text.isdigit():
        raise _foreign(text)
    return int(text)


def _foreign(values: object) -> RendezvousError:
    return RendezvousError(
        f"the store has {abridged(values)} where the ranks of a group find each other, which no process of this "
        "version writes. Let only processes of the job use the store, with one version of rpcdist, and start it again"
    )


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Compresses ranks into ranges, since each rank of a large world writes all of them to the store."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def _here(number: int, rank: int) -> str:
    return f"{number}/here/{rank}"


def _outcome_key(number: int) -> str:
    return f"{number}/outcome"


def _twice_key(number: int) -> str:
    return f"{number}/twice"


# ---------------------------------------------------------------- the steps


def agreement(request: JoinRequest, fresh: bool) -> Steps[Result]:
    """The steps of one process: yields operations on the store, and is sent their results.

    Args:
        fresh: whether only processes of this start have written here, so that an earlier disagreement counts.
    """
    ticket = cast(int, (yield Add(TICKETS, 1)))
    process = _Process(replace(request, ticket=ticket))
    result: Result | None = yield from process.find(fresh)
    while result is None:
        result = yield from process.lead() if request.rank == request.ranks[0] else process.follow()
    return result


class _Process:
    """One process, in the generation `number`, which belongs to `owner`."""

    def __init__(self, me: JoinRequest) -> None:
        self.me = me
        self.number = 0
        self.owner: JoinRequest | None = None
        self.known: set[int] = set()  # ranks that joined and may have gone
        self.twice: int | None = None

    def find(self, fresh: bool) -> Steps[Result | None]:
        """Finds the first open generation. The hint is that number or a lower one; a new store needs none."""
        number = 0
        outcome: _Outcome = _Next(None)
        while (yield Check((_outcome_key(number),))):
            if number == 1 and (yield Check((HINT,))):
                values = yield Get((HINT,))
                number = max(1, _number(cast("tuple[bytes, ...]", values)[0]) - 1)
            outcome = yield from self._read(number)
            number += 1
            if fresh and isinstance(outcome, _Conflict):
                return self._disagreement(outcome)
        self.number = number
        self.owner = outcome.owner if isinstance(outcome, _Next) else None
        return None

    # ------------------------------------------------------------ the leader

    def lead(self) -> Steps[Result | None]:
        if self.owner is not None and self.owner.ticket > self.me.ticket and self._has_my_rank(self.owner):
            return Displaced()
        if self.owner not in (None, self.me):
            yield from self._fill(self.owner, self.me)
        closed = yield from self._close(_Next(self.me))
        if isinstance(closed, _Conflict):
            return self._disagreement(closed)
        self._next_generation(closed)
        if self.owner != self.me:
            return None  # another process closed it
        keys = tuple(_here(self.number, rank) for rank in self.me.ranks[1:])
        values = (yield Get(keys)) if keys else ()
        if isinstance(values, Missing):
            return (yield from self._give_up(values.keys))
        here = [_request_of(_loaded(value)) for value in cast("tuple[bytes, ...]", values)]
        return (yield from self._decide(here))

    def _decide(self, here: Sequence[JoinRequest]) -> Steps[Result | None]:
        """Decides as the owner, from the arrivals of the other ranks."""
        ranks = self.me.ranks[1:]
        for arrival in here:
            if not arrival.fits(self.me):
                return (yield from self._close_with_conflict(arrival))
        for arrival in here:
            if self._has_my_rank(arrival) and arrival.ticket != GAVE_UP:
                return (yield from self._yield_to_next_leader())
        gone = [arrival.rank for arrival in here if arrival.ticket == GAVE_UP]
        if gone or [arrival.rank for arrival in here] != list(ranks):
            self.known.update(gone)
            return None  # `lead` closes this generation and asks again
        tickets = (self.me.ticket, *(arrival.ticket for arrival in here))
        outcome = yield from self._close(_Complete(tickets))
        if outcome == _Complete(tickets):
            yield Set((HINT,), (str(self.number + 1).encode(),))  # a hint, which only saves time
            return Made(self.number)
        if isinstance(outcome, _Next) and outcome.owner is not None:  # the next leader has joined
            if not outcome.owner.fits(self.me):
                yield from self._fill(outcome.owner, self.me, self.number + 1)
                return Disagreement(outcome.owner)
            return (yield from self._yield_to_next_leader())
        self._next_generation(outcome)
        return None

    def _yield_to_next_leader(self) -> Steps[Displaced]:
        """The next leader has joined; it owns, or will own, the next generation."""
        yield Set((_twice_key(self.number + 1),), (str(self.me.rank).encode(),))
        return Displaced()

    def _close_with_conflict(self, other: JoinRequest) -> Steps[Result]:
        outcome = yield from self._close(_Conflict(self.me, other))
        if isinstance(outcome, _Next) and outcome.owner is not None:  # the next leader waits in that generation
            yield from self._fill(outcome.owner, self.me, self.number + 1)
        return Disagreement(other)

    # ------------------------------------------------------------ the others

    def follow(self) -> Steps[Result | None]:
        rank, key, entry = self.me.rank, _here(self.number, self.me.rank), _encoded(self.me)
        if (found := cast(bytes, (yield CompareSet(key, b"", entry)))) != entry:
            before = _request_of(_loaded(found))
            if self._has_my_rank(before) and before.ticket != GAVE_UP:
                if self.owner is not None:  # otherwise that process may have died long ago
                    self.twice = rank
                    yield Set((_twice_key(self.number),), (str(rank).encode(),))
                if before.ticket > self.me.ticket:
                    return Displaced()
            yield Set((key,), (entry,))
        if self.owner is not None and not self.owner.fits(self.me):
            yield from self._fill(self.owner, self.me)
        values = yield Get((_outcome_key(self.number),))
        if isinstance(values, Missing):
            return (yield from self._give_up(()))
        return self._follow_outcome(_outcome(cast("tuple[bytes, ...]", values)[0]))

    def _follow_outcome(self, outcome: _Outcome) -> Result | None:
        if isinstance(outcome, _Conflict):
            return self._disagreement(outcome)
        if isinstance(outcome, _Complete) and self.owner is not None and self.owner.fits(self.me):
            if len(outcome.tickets) != len(self.me.ranks):
                raise _foreign(outcome.tickets)
            member = outcome.tickets[self.me.ranks.index(self.me.rank)]
            if member == self.me.ticket:
                return Made(self.number)
            if member > self.me.ticket:
                return Displaced()
        self._next_generation(outcome)  # the group contains an earlier process of this rank, and cannot work
        return None

    # ------------------------------------------------------------ the end of the time

    def _give_up(self, missing: Sequence[str]) -> Steps[Result | None]:
        """Closes the generation if it has an owner, which must not count on this process any more."""
        request, number, owner = self.me, self.number, self.owner
        keys = tuple(_here(number, rank) for rank in (owner or self.me).ranks[1:])
        if not missing and keys:
            found = yield Wait(keys)
            missing = found.keys if isinstance(found, Missing) else ()
        if (yield Check((_twice_key(number),))):
            self.twice = _number(cast("tuple[bytes, ...]", (yield Get((_twice_key(number),))))[0])
        if owner is not None:
            if owner != self.me:
                yield from self._fill(owner, replace(request, ticket=GAVE_UP))
            outcome = yield from self._close(_Next(None, request.rank))
            if outcome != _Next(None, request.rank) and not isinstance(outcome, _Next):
                return self._follow_outcome(outcome)  # the outcome came at the last moment
        absent = {int(key.rpartition("/")[2]) for key in missing}  # the keys have the prefixes of the store
        late = [rank for rank in request.ranks[1:] if rank in absent and rank not in self.known]
        if request.ranks[0] != request.rank and request.ranks[0] not in self.known and (owner is None or not late):
            late.insert(0, request.ranks[0])
        return Incomplete(tuple(late), self.twice)

    # ------------------------------------------------------------ parts of steps

    def _has_my_rank(self, other: JoinRequest) -> bool:
        return other.rank == self.me.rank and other.fits(self.me)

    def _disagreement(self, outcome: _Conflict) -> Disagreement:
        return Disagreement(outcome.other if outcome.one.fits(self.me) else outcome.one)

    def _read(self, number: int) -> Steps[_Outcome]:
        values = yield Get((_outcome_key(number),))
        return _outcome(cast("tuple[bytes, ...]", values)[0])

    def _close(self, outcome: _Outcome) -> Steps[_Outcome]:
        """Closes the generation unless it is closed already; returns its outcome."""
        text = yield CompareSet(_outcome_key(self.number), b"", _encoded(outcome))
        return _outcome(cast(bytes, text))

    def _fill(self, owner: JoinRequest, entry: JoinRequest, number: int | None = None) -> Steps[None]:
        """Wakes the owner of a generation by setting all keys that it waits for."""
        keys = tuple(_here(self.number if number is None else number, rank) for rank in owner.ranks[1:])
        if keys:
            yield Set(keys, (_encoded(entry),) * len(keys))

    def _next_generation(self, outcome: _Outcome) -> None:
        owner, self.owner = self.owner, outcome.owner if isinstance(outcome, _Next) else None
        self.number += 1
        if isinstance(outcome, _Next) and outcome.gone is not None:
            self.known.add(outcome.gone)
            if owner is not None:
                self.known.add(owner.rank)
