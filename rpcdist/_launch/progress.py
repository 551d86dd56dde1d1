"""Decides when a job has ended, which failure ended it, and which ranks restart. Pure: no process, no clock.

1. A job succeeds when every rank for which it waits has returned and its process has ended. It does not wait for the
   ranks of daemon roles.
2. A job fails with the first failure. Failures that look like the loss of another rank (`may_be_consequence`) count
   last: after such a failure, other ranks have `cause_limit_s` to report a better reason.
3. A process that ended without a report counts as failed before all reports that were seen at the same time: its peers
   notice its closed connections, and report, while its parent is still waking up.
4. A process that ended without a report is not a failure while its rank has restarts left. An exception is a failure at
   once.
"""

from __future__ import annotations

import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from rpcdist._launch.reports import Event, Exited, ProcessEnded, Raised, Ready, Returned
from rpcdist.deadline import backoff
from rpcdist.errors import ProcessFailed
from rpcdist.time_limits import FIRST_PAUSE_S, QUICK_ANSWER_LIMIT_S, RESTART_LONGEST_PAUSE_S, SLOW_WORK_LIMIT_S


@dataclass(frozen=True, slots=True)
class Failed:
    """`rank` failed first."""

    rank: int
    cause: ProcessEnded | Exited | Raised


@dataclass(frozen=True, slots=True)
class Late:
    """The time limit has passed; `ranks` have not ended."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stuck:
    """The function of `rank` returned, but its process does not end."""

    rank: int


Outcome = tuple[bytes | None, ...] | Failed | Late | Stuck
"""A tuple if every rank for which the job waits has returned: pickled results in rank order, None for daemons."""


def restart_pause_s(number: int) -> float:
    """Returns the pause before restart `number` of a rank: longer each time, and random, so that ranks differ."""
    pauses = backoff(FIRST_PAUSE_S, RESTART_LONGEST_PAUSE_S)
    return [next(pauses) for _ in range(number)][-1]


@dataclass(eq=False, repr=False)
class Progress:
    """The state of the ranks of a job.

    Args:
        deadline: the time by which the job must end; infinity for never. All times are of one clock, in seconds.
        cause_limit_s: how long a failure that may be a consequence waits for its cause.
        exit_limit_s: how long a process may take to end after its report.
        max_restarts: how often each rank is started again after its process was lost; 0 for missing ranks.
        daemons: ranks for which the job does not wait.
        pause_s: returns the pause before a restart, from its number.
    """

    _ranks: Sequence[int]
    _deadline: float = math.inf
    cause_limit_s: float = QUICK_ANSWER_LIMIT_S
    exit_limit_s: float = SLOW_WORK_LIMIT_S
    _: KW_ONLY
    max_restarts: Mapping[int, int] = field(default_factory=dict)
    daemons: Collection[int] = ()
    pause_s: Callable[[int], float] = restart_pause_s
    _starts: Counter[int] = field(default_factory=Counter)  # by rank; with starts that the engine lost before they ran
    _restarts: Counter[int] = field(default_factory=Counter)  # without those starts
    _deaths: dict[int, ProcessEnded] = field(default_factory=dict)  # the last one of each restarted rank
    _results: dict[int, bytes] = field(default_factory=dict)
    _failures: dict[int, ProcessEnded | Exited | Raised] = field(default_factory=dict)
    _ready: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)
    _exit_deadlines: dict[int, float] = field(default_factory=dict)
    _cause_deadline: float = math.inf

    def __post_init__(self) -> None:
        self._waits_for = [rank for rank in self._ranks if rank not in self.daemons] or self._ranks
        self._due = dict.fromkeys(self._ranks, -math.inf)  # when to start each rank

    def to_start(self, now: float) -> list[tuple[int, int]]:
        """Returns the ranks to start now, each with the number of its start, from 0; marks them as started."""
        ranks = [rank for rank, moment in self._due.items() if now >= moment]
        for rank in ranks:
            del self._due[rank]
            self._starts[rank] += 1
        return [(rank, self._starts[rank] - 1) for rank in ranks]

    def take(self, rank: int, event: Event, now: float) -> None:
        if isinstance(event, ProcessEnded):
            self._take_end(rank, event, now)
        elif isinstance(event, Ready):
            self._ready.add(rank)
        elif isinstance(event, Returned):
            self._results[rank] = event.result
            self._exit_deadlines[rank] = now + self.exit_limit_s
        else:
            self._fail(rank, event, now)

    def not_ready(self) -> list[int]:
        """Returns the ranks that have not finished their imports."""
        return [rank for rank in self._ranks if rank not in self._ready]

    def outcome(self, now: float) -> Outcome | None:
        """Returns how the job has ended; None while it runs."""
        if self._failures:
            rank, cause = min(self._failures.items(), key=_order)
            if not _may_be_consequence(cause) or now >= self._cause_deadline or self._all_have_reported():
                return Failed(rank, cause)
        elif self._ended.issuperset(self._waits_for):
            return tuple(self._results.get(rank) for rank in self._ranks)
        late = [rank for rank, limit in self._exit_deadlines.items() if now >= limit]
        if late:
            return Stuck(min(late))
        if now >= self._deadline:
            return Late(tuple(rank for rank in self._ranks if rank not in self._ended))
        return None

    def next_deadline(self) -> float:
        """Returns when `outcome` or `to_start` may change without a report; infinity for never."""
        return min(self._deadline, self._cause_deadline, *self._exit_deadlines.values(), *self._due.values())

    def next_start(self) -> float:
        """Returns when the next rank must be started; infinity for never."""
        return min(self._due.values(), default=math.inf)

    def state(self, rank: int) -> str:
        """Describes the state or the end of a rank."""
        if rank in self._failures:
            state = _words(self._failures[rank])
        elif rank in self._results:
            state = "returned"
        elif rank in self._due:
            state = f"{_words(self._deaths[rank])}, and starts again" if rank in self._deaths else "starts"
        else:
            state = "runs" if rank in self._ready else "starts"
        return f"{state} ({self._restarts_of(rank)})" if self._restarts[rank] else state

    def losses(self) -> dict[int, str]:
        """Describes the losses of each restarted rank: "was killed by SIGKILL ..., and was restarted 1 of 3 times"."""
        return {rank: f"{death}, and was {self._restarts_of(rank)}" for rank, death in self._deaths.items()}

    def has_ended(self, rank: int) -> bool:
        """Whether its process has ended and is not restarted."""
        return rank in self._ended

    def is_over(self, rank: int) -> bool:
        """Whether its function or its process has ended and is not restarted."""
        return rank in self._ended or rank in self._results or rank in self._failures

    def _take_end(self, rank: int, end: ProcessEnded, now: float) -> None:
        self._exit_deadlines.pop(rank, None)
        has_returned = rank in self._results
        if rank not in self._failures and not (has_returned and end.returncode == 0):
            death = replace(end, has_run=True, has_returned=has_returned)
            may_restart = not end.has_run or self._restarts[rank] < self.max_restarts.get(rank, 0)
            if not has_returned and may_restart:
                self._restarts[rank] += end.has_run
                self._deaths[rank] = death
                self._ready.discard(rank)
                self._due[rank] = now + self.pause_s(self._starts[rank])
                return
            self._fail(rank, death, now)
        self._ended.add(rank)

    def _restarts_of(self, rank: int) -> str:
        return f"restarted {self._restarts[rank]} of {self.max_restarts.get(rank, 0)} times"

    def _fail(self, rank: int, cause: ProcessEnded | Exited | Raised, now: float) -> None:
        self._failures[rank] = cause
        self._cause_deadline = min(self._cause_deadline, now + self.cause_limit_s)

    def _all_have_reported(self) -> bool:
        return all(rank in self._results or rank in self._failures for rank in self._ranks)


def _words(cause: ProcessEnded | Exited | Raised) -> str:
    if isinstance(cause, Raised):
        return f"raised {cause.type_name}"
    return f"exited with {cause.code!r}" if isinstance(cause, Exited) else str(cause)


def _may_be_consequence(cause: ProcessEnded | Exited | Raised) -> bool:
    return isinstance(cause, Raised) and cause.may_be_consequence


def is_unread_output(cause: ProcessEnded | Exited | Raised) -> bool:
    """Whether a rank failed because it wrote to a pipe that nobody reads."""
    if isinstance(cause, Raised):
        return cause.type_name == BrokenPipeError.__name__
    return isinstance(cause, ProcessEnded) and cause.returncode == -signal.SIGPIPE


def _order(failure: tuple[int, ProcessEnded | Exited | Raised]) -> tuple[bool, float, int]:
    rank, cause = failure
    moment = cause.alive_at if isinstance(cause, ProcessEnded) else cause.moment
    return _may_be_consequence(cause), moment, rank


# ---------------------------------------------------------------- the exceptions for the outcome of a job


class Interrupted(KeyboardInterrupt, SystemExit):
    """Ctrl-C. If it is not caught, the program ends with exit code 130 and without a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.code = 128 + signal.SIGINT


def interrupted(report: Callable[[str], object] = lambda text: print(text, file=sys.stderr)) -> BaseException:
    """Returns the error after Ctrl-C: `Interrupted`, or `KeyboardInterrupt` in a notebook or at a prompt.

    Args:
        report: prints a line to stderr.
    """
    if hasattr(sys, "ps1"):
        return KeyboardInterrupt()
    report("\ninterrupted")
    return Interrupted()


def error_of(outcome: Failed | Stuck) -> BaseException:
    """Makes the exception for a job that did not succeed."""
    if isinstance(outcome, Stuck):
        what = f"returned, but its process did not end within {SLOW_WORK_LIMIT_S:g} s: is a thread still running?"
        return ProcessFailed(outcome.rank, what)
    cause = outcome.cause
    if isinstance(cause, Exited):
        return SystemExit(cause.code)
    if isinstance(cause, Raised):
        return ProcessFailed(outcome.rank, f"raised {cause.type_name}", traceback=cause.traceback)
    return ProcessFailed(outcome.rank, str(cause), exit_code=cause.returncode)
