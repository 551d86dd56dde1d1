"""`GroupState`: the state of a group as one rank knows it, a pure state machine: events in, actions out.

A `GroupFailure` says why a group cannot be used any more. It is decided once and sent to every rank, and every later
operation raises it.

Rules: no socket, clock, thread, lock or logging. A shell (the engine, the NCCL watchdog, the setup watch) calls the
events' methods under its own lock, and carries out the actions without the lock. Times are passed in. Queries may be
called without the lock, as the values that they read are replaced, never changed in place.

Invariants:

 1. The first failure is final. Operations fail with it once in the life of a group, and it is reported at most once.
 2. This rank tells the other ranks of a failure that it found, not of one that it heard of, as they heard of it too.
 3. A rank that left took part in all operations up to its last sequence number: only later ones fail because of it.
    If several ranks left, the first one is the reason, as the others may have given up because of it.
 4. While the group is made, events have no actions; `open` returns the actions of all of them, departures first.
 5. Accepted operations are numbered 1, 2, 3, ...; none is accepted after the group failed or began to close.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from rpcdist.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    RankLost,
    described_error,
)

MAX_REASON_LENGTH = 4000


_KINDS: Final = {
    kind.__name__: kind for kind in (RankLost, CollectiveMismatch, CollectiveTimeout, GroupAborted, CollectiveError)
}


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """The first failure of a group.

    Attributes:
        kind: the class of the error that operations raise.
        reason: text for people; names world ranks.
        ranks: the ranks in the group that caused it.
    """

    kind: type[CollectiveError]
    reason: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.reason

    def error(self, operation: str) -> CollectiveError:
        """The error that `operation` (a title like "all_reduce #41 of group 'default'") raises."""
        if issubclass(self.kind, RankLost | CollectiveTimeout):
            return self.kind(operation, self.reason, self.ranks)
        return self.kind(operation, self.reason)

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind.__name__, "reason": self.reason[:MAX_REASON_LENGTH], "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, fields: object) -> GroupFailure:
        """The inverse of `to_json`. Raises ValueError for invalid values."""
        if not isinstance(fields, dict):
            raise ValueError(f"a failure is an object, not {json.dumps(fields)[:100]}")
        kind, reason, ranks = fields.get("kind"), fields.get("reason"), fields.get("ranks")
        if not isinstance(reason, str) or not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ValueError("a failure has a reason and ranks")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(f"{kind!r} is not a kind of failure")
        printable = reason.encode(errors="backslashreplace").decode()  # names of files may have surrogates
        return cls(_KINDS[kind], printable, tuple(ranks))


def list_ranks(ranks: list[int] | tuple[int, ...] | frozenset[int]) -> str:
    """ "rank 3" or "ranks 1, 2"."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"


class Reporter:
    """Tells the other ranks of failures that this one found. The base class, for groups of one rank, sends nothing."""

    def report(self, failure: GroupFailure) -> None:
        """Reports that the group failed here. Any thread may call it; does not wait."""

    def report_timeout(self, title: str, sequence: int) -> bool:
        """Reports that an operation timed out here; returns whether a verdict on the missing ranks will come."""
        return False

    def explains_losses(self) -> bool:
        """Whether a verdict will come on the state of a rank whose connection broke."""
        return False


def timeout_verdict(
    title: str, sequence: int, answers: Mapping[int, tuple[int, str]], world_ranks: tuple[int, ...]
) -> GroupFailure:
    """Names the ranks that did not call an operation. Pure.

    Args:
        answers: for each rank that answered, its newest operation and a text that says what it does.
        world_ranks: ranks of the members in the world, by rank in the group.
    """
    silent = [rank for rank in range(len(world_ranks)) if rank not in answers]
    late = [rank for rank, (reached, _) in sorted(answers.items()) if reached < sequence]
    details = [f"rank {world_ranks[rank]} {answers[rank][1]}" for rank in late]
    details += [f"rank {world_ranks[rank]} does not answer" for rank in silent]
    missing = tuple(sorted(late + silent))
    if not missing:
        details = [f"rank {world_ranks[rank]} {text}" for rank, (_, text) in sorted(answers.items())]
        reason = f"Timed out waiting in {title}, although all ranks have called it: {'; '.join(details)}"
        return GroupFailure(CollectiveTimeout, reason)
    names = list_ranks([world_ranks[rank] for rank in missing])
    reason = f"Timed out waiting in {title}; {names} did not arrive: {'; '.join(details)}"
    return GroupFailure(CollectiveTimeout, reason, missing)


def monitored_text(rank: int, missing: Sequence[int], limit_s: float, wait_all_ranks: bool) -> str:
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


_WHY_RANKS_LEAVE: Final = "destroy_process_group, or the end of its program"

LEFT: Final = "it left the default group"
"""The reason for a rank that left in order."""


# ---------------------------------------------------------------- actions


class GroupActions(NamedTuple):
    """The actions of a rank after an event, in this order.

    Attributes:
        wakes: whether the running operation checks the state again, as it cannot be finished any more.
        departed: the ranks from which no message will come any more, with the reasons.
        fails: the failure of the running operation, of those that wait, and of all messages.
        reports: the failure to report to the other ranks.
    """

    wakes: bool = False
    departed: tuple[tuple[int, str], ...] = ()
    fails: GroupFailure | None = None
    reports: GroupFailure | None = None


class RunningOperation(Protocol):
    """The operation that a rank is in."""

    @property
    def sequence(self) -> int: ...

    @property
    def title(self) -> str: ...


# ---------------------------------------------------------------- the machine


class GroupState:
    """See the module's docstring.

    Args:
        world_ranks: ranks of the members in the world, by rank in the group; errors name these.

    Attributes:
        failure: why the group ended; None while it works.
        departed: the ranks that left, in order, each with the last sequence number in which it took part.
        errors: those with which ranks left, as text.
        refusal: why new operations are refused; None while they are accepted.
        sequence: number of operations accepted so far; the shell counts, after it has checked `refusal`.
        last: title of the operation that ended last; the shell sets it.
        last_ended: when that operation ended, in seconds of a monotonic clock.
    """

    def __init__(self, group: str, rank: int, world_ranks: tuple[int, ...]) -> None:
        self.group = group
        self.rank = rank
        self.world_ranks = world_ranks
        self.failure: GroupFailure | None = None
        self.departed: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.refusal: GroupFailure | None = None
        self.sequence = 0
        self.current: RunningOperation | None = None
        self.last: object | None = None
        self.last_ended = 0.0
        self._opened = False

    # ------------------------------------------------------------ events: they return the actions

    def open(self) -> GroupActions:
        """All ranks are connected, so operations may be called."""
        self._opened = True
        departed = tuple((rank, self.departure(rank).reason) for rank in self.departed)
        return GroupActions(departed=departed, fails=self.failure)

    def fail(self, failure: GroupFailure, *, heard: bool) -> GroupActions:
        """The group failed: this rank found the failure, or heard of it from another rank."""
        if self.failure is not None:
            return GroupActions()
        self.failure = self.refusal = failure
        return GroupActions(fails=failure if self._opened else None, reports=None if heard else failure)

    def leave(self, rank: int, last_sequence: int, error: str = "") -> GroupActions:
        """A rank left the group in order, after taking part in all operations up to `last_sequence`.

        Args:
            error: the error with which the program of that rank ends; empty if it has none.
        """
        if error:
            self.errors = {**self.errors, rank: error}
        self.departed = {**self.departed, rank: last_sequence}
        if not self._opened:
            return GroupActions()
        current = self.current  # it may end meanwhile
        wakes = current is not None and current.sequence > last_sequence
        return GroupActions(wakes, ((rank, self.departure(rank).reason),))

    def close(self) -> None:
        """This rank destroys the group."""
        self.refusal = self.refusal or GroupFailure(GroupAborted, "the group was destroyed on this rank")

    # ------------------------------------------------------------ verdicts

    def departure(self, rank: int) -> GroupFailure:
        last = self.departed[rank]
        when = f"after collective #{last}" if last else "before its first collective"
        why = f"its error was {self.errors[rank]}" if rank in self.errors else _WHY_RANKS_LEAVE
        return GroupFailure(RankLost, f"rank {self.world_ranks[rank]} left the group ({why}) {when}", (rank,))

    def departure_before(self, sequence: int) -> GroupFailure | None:
        for rank, last_sequence in self.departed.items():
            if sequence > last_sequence:
                return self.departure(rank)
        return None

    def setup_failure(self) -> GroupFailure | None:
        """Returns why the group cannot be made; None while it can."""
        if self.failure is not None:
            return self.failure
        for rank in self.departed:
            reason = f"rank {self.world_ranks[rank]} gave up; see what it raised"
            return GroupFailure(RankLost, reason, (rank,))
        return None

    def explains(self, rank: int | None) -> bool:
        """Whether this rank knows why a rank does not answer; with None, why an operation does not end."""
        return self.failure is not None or rank in self.departed

    def lost_connection(self, rank: int, reason: str, sequence: int) -> GroupFailure:
        """Returns the failure of an operation during which the connection with a rank broke."""
        departure = self.departure_before(sequence)
        if departure is not None:
            return departure
        if rank in self.departed:
            return self.departure(rank)
        ends = f"rank {self.world_ranks[self.rank]} with rank {self.world_ranks[rank]}"
        return GroupFailure(RankLost, f"the connection of {ends} broke: {reason}", (rank,))

    def timed_out(self, waiting_for: frozenset[int]) -> GroupFailure:
        """Returns the failure of an operation that timed out, as far as this rank can see."""
        if not waiting_for:
            return GroupFailure(CollectiveTimeout, "Timed out waiting")
        names = list_ranks([self.world_ranks[rank] for rank in waiting_for])
        reason = f"Timed out waiting on rank {self.world_ranks[self.rank]} for {names}"
        return GroupFailure(CollectiveTimeout, reason, tuple(sorted(waiting_for)))

    def mismatch(self, views: dict[int, str]) -> GroupFailure:
        calls = "; ".join(f"rank {self.world_ranks[rank]} called {view}" for rank, view in sorted(views.items()))
        return GroupFailure(CollectiveMismatch, f"the ranks called different operations: {calls}")

    def raised(self, error: BaseException) -> GroupFailure:
        reason = f"rank {self.world_ranks[self.rank]} raised {described_error(error)}"
        return GroupFailure(CollectiveError, reason)

    def aborted(self, reason: str) -> GroupFailure:
        return GroupFailure(GroupAborted, f"rank {self.world_ranks[self.rank]} aborted the group: {reason}")

    def lost_ranks(self) -> dict[int, str]:
        left = dict.fromkeys(self.departed, LEFT)
        if self.failure is None or self.failure.kind is not RankLost:
            return left
        return {**dict.fromkeys(self.failure.ranks, self.failure.reason), **left}

    def where(self, now: float) -> tuple[int, str]:
        """Returns the newest operation that this rank has called, and a text that says what the rank does now."""
        if not self._opened:
            return 0, "is making the group"
        current = self.current  # it may end meanwhile
        if current is not None:
            return self.sequence, f"is in {current.title}"
        if self.last is None:
            return self.sequence, "has called nothing yet"
        ago = f"{now - self.last_ended:.1f} s ago"
        return self.sequence, f"finished {self.last} {ago} and has called nothing since"
