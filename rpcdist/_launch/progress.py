"""Decides when a job has ended, and which rank's failure ended it. Pure: no process, no clock.

1. A job succeeds when every rank has returned and its process has ended.
2. A job fails with the first failure. Failures that look like the loss of another rank (`may_be_consequence`) count
   last: after such a failure, other ranks have `cause_limit_s` to report a better reason.
3. A process that ended without a report has failed before everything that was seen together with it: its peers notice
   its closed connections, and report, while its parent is still waking up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rpcdist._launch.reports import Exited, Raised, Ready, Report, Returned

__all__ = ["Died", "Failed", "Late", "Outcome", "Progress", "Stuck", "Succeeded"]


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended without a report, or with an exit code other than 0 after the function had returned.

    `returncode` is as in `subprocess`: the exit code, or the negative number of a signal; None if the process closed
    its pipe and went on. `alive_at` is when its end had not been seen yet.
    """

    returncode: int | None
    alive_at: float
    has_returned: bool = False


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Every rank has returned; the results are pickled, in the order of the ranks."""

    results: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """`rank` failed first."""

    rank: int
    cause: Died | Exited | Raised


@dataclass(frozen=True, slots=True)
class Late:
    """The time limit is over; `ranks` have not ended."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stuck:
    """The function of `rank` returned, but its process does not end."""

    rank: int


Outcome = Succeeded | Failed | Late | Stuck


class Progress:
    """What the ranks of a job have done so far.

    Args:
        ranks: those that run.
        deadline: when the job must have ended; infinity for never. All times are those of one clock, in seconds.
        cause_limit_s: how long a failure that may be a consequence waits for its cause.
        exit_limit_s: how long a process may take to end after its report.
    """

    def __init__(self, ranks: Sequence[int], deadline: float, cause_limit_s: float, exit_limit_s: float) -> None:
        self._ranks = ranks
        self._deadline = deadline
        self._cause_limit_s = cause_limit_s
        self._exit_limit_s = exit_limit_s
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, Died | Exited | Raised] = {}
        self._ready: set[int] = set()
        self._ended: set[int] = set()
        self._exit_deadlines: dict[int, float] = {}
        self._cause_deadline = math.inf

    def reported(self, rank: int, report: Ready | Report, now: float) -> None:
        """The function of `rank` begins, or has ended."""
        if isinstance(report, Ready):
            self._ready.add(rank)
        elif isinstance(report, Returned):
            self._results[rank] = report.result
            self._exit_deadlines[rank] = now + self._exit_limit_s
        else:
            self._fail(rank, report, now)

    def ended(self, rank: int, returncode: int | None, alive_at: float, now: float) -> None:
        """The process of `rank` has ended; without a report, that is a failure."""
        self._ended.add(rank)
        self._exit_deadlines.pop(rank, None)
        has_returned = rank in self._results
        if rank not in self._failures and not (has_returned and returncode == 0):
            self._fail(rank, Died(returncode, alive_at, has_returned), now)

    def has_reported(self, rank: int) -> bool:
        return rank in self._results or rank in self._failures

    def not_ready(self) -> list[int]:
        """The ranks that have not imported everything yet."""
        return [rank for rank in self._ranks if rank not in self._ready]

    def all_have_ended(self) -> bool:
        """Whether no process is left."""
        return len(self._ended) == len(self._ranks)

    def outcome(self, now: float) -> Outcome | None:
        """How the job has ended; None while it runs."""
        if self._failures:
            rank, cause = min(self._failures.items(), key=_order)
            if not _may_be_consequence(cause) or now >= self._cause_deadline or self._all_have_reported():
                return Failed(rank, cause)
        elif self.all_have_ended():
            return Succeeded(tuple(self._results[rank] for rank in self._ranks))
        late = [rank for rank, limit in self._exit_deadlines.items() if now >= limit]
        if late:
            return Stuck(min(late))
        if now >= self._deadline:
            return Late(tuple(rank for rank in self._ranks if rank not in self._ended))
        return None

    def next_deadline(self) -> float:
        """When `outcome` may change though nothing is reported; infinity for never."""
        return min(self._deadline, self._cause_deadline, *self._exit_deadlines.values())

    def _fail(self, rank: int, cause: Died | Exited | Raised, now: float) -> None:
        self._failures[rank] = cause
        self._cause_deadline = min(self._cause_deadline, now + self._cause_limit_s)

    def _all_have_reported(self) -> bool:
        return all(self.has_reported(rank) for rank in self._ranks)


def _may_be_consequence(cause: Died | Exited | Raised) -> bool:
    return isinstance(cause, Raised) and cause.may_be_consequence


def _order(failure: tuple[int, Died | Exited | Raised]) -> tuple[bool, float, int]:
    rank, cause = failure
    moment = cause.alive_at if isinstance(cause, Died) else cause.moment
    return _may_be_consequence(cause), moment, rank
