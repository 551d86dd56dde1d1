"""The outcome of every call, written by caller and callee into files that survive SIGKILL, and the verdict on it.

Rules, for each call by its number:

 1. It ran at most once, and exactly once if it was answered.
 2. It was answered or it failed, never both; if its caller lived to the end, one of the two.
 3. It failed with an error that a fault explains, and its answer was the right one.
 4. A thread that waited for it waited at most `LATE_LIMIT_S` beyond its deadline, time without a processor aside.

A record is one write of 64 bytes, which the kernel keeps after the death of any process: records never cross a page.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "ANSWERED",
    "FAILED",
    "ISSUED",
    "LATE_LIMIT_S",
    "RAN",
    "Ledger",
    "Record",
    "Verdict",
    "read_records",
    "verdict_on",
]

LATE_LIMIT_S = 2.0 * float(os.environ.get("RPCDIST_TEST_SCALE", "1"))
MAX_PROBLEMS = 40

ISSUED, RAN, ANSWERED, FAILED = b"I", b"R", b"A", b"F"

_RECORD = struct.Struct("<c7xQd40s")
_COUNTER_BITS = 32

# The possible effects of a fault on a call. `Cancelled` where a caller's loss ends what its handler had called.
# `RRefError` where the call of a `remote()` passed its deadline.
EXPLAINED = frozenset(
    "WorkerLost OwnerLost LeaseExpired DeadlineExceeded TimeoutError Cancelled BackwardError RRefError".split()
)
NO_CALLS = frozenset({"backward"})  # accounted for like calls, but they run no function of a user


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a ledger.

    Attributes:
        kind: ISSUED and RAN at the beginning; ANSWERED or FAILED at the caller.
        call: the number of the call.
        late_s: for outcomes, how long the caller waited beyond the deadline.
        text: the kind of call, or the name of the error.
    """

    kind: bytes
    call: int
    late_s: float
    text: str


class Ledger:
    """One process's. Any thread may write.

    Args:
        path: the file, which only this process writes.
        process: a number that no other process of the run has: it makes the calls' numbers unique.
    """

    def __init__(self, path: str, process: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._process = process

    def issued(self, number: int, kind: str) -> int:
        """A call begins; its number. `number` tells it from others of this process."""
        call = self._process << _COUNTER_BITS | number
        self._write(ISSUED, call, 0.0, kind)
        return call

    def ran(self, call: int, kind: str) -> None:
        self._write(RAN, call, 0.0, kind)

    def answered(self, call: int, late_s: float) -> None:
        self._write(ANSWERED, call, late_s, "")

    def failed(self, call: int, late_s: float, error: str) -> None:
        self._write(FAILED, call, late_s, error)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, kind: bytes, call: int, late_s: float, text: str) -> None:
        os.write(self._file, _RECORD.pack(kind, call, late_s, text.encode()[:40]))


def read_records(folder: Path) -> Iterator[Record]:
    """The records of all processes."""
    for path in sorted(folder.glob("*.ledger")):
        for kind, call, late_s, text in _RECORD.iter_unpack(path.read_bytes()):
            yield Record(kind, call, late_s, text.rstrip(b"\0").decode())


@dataclass(slots=True)
class Verdict:
    """The findings of all ledgers together.

    Attributes:
        problems: sentences about calls that broke a rule; the first ones.
        num_issued: calls, by kind.
        num_ran, num_answered: calls.
        num_failed: calls, by error.
        longest_late_s: the longest wait beyond a deadline.
    """

    problems: list[str] = field(default_factory=list)
    num_issued: Counter[str] = field(default_factory=Counter)
    num_ran: int = 0
    num_answered: int = 0
    num_failed: Counter[str] = field(default_factory=Counter)
    longest_late_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{sum(self.num_issued.values())} calls {dict(self.num_issued)}: {self.num_ran} ran, "
            f"{self.num_answered} answered, {sum(self.num_failed.values())} failed {dict(self.num_failed)}; "
            f"the longest wait beyond a deadline: {self.longest_late_s:.2f} s"
        )


@dataclass(slots=True)
class _Fate:
    kind: str = ""
    num_ran: int = 0
    outcomes: list[str] = field(default_factory=list)


def verdict_on(records: Iterable[Record], ended: Collection[int]) -> Verdict:
    """Judges all calls.

    Args:
        records: of all processes, in any order.
        ended: the numbers of processes that were killed: their last calls have no outcome.
    """
    verdict = Verdict()
    fates: dict[int, _Fate] = {}
    for record in records:
        fate = fates.setdefault(record.call, _Fate())
        if record.kind == ISSUED:
            fate.kind = record.text
            verdict.num_issued[record.text] += 1
        elif record.kind == RAN:
            fate.num_ran += 1
            verdict.num_ran += 1
        else:
            fate.outcomes.append(record.text)
            _count_outcome(verdict, record)
            if record.late_s > LATE_LIMIT_S:
                _complain(verdict, record.call, fate, f"the caller waited {record.late_s:.2f} s beyond the deadline")
    for call, fate in fates.items():
        for complaint in _complaints(fate, call >> _COUNTER_BITS in ended):
            _complain(verdict, call, fate, complaint)
    return verdict


def _count_outcome(verdict: Verdict, record: Record) -> None:
    verdict.longest_late_s = max(verdict.longest_late_s, record.late_s)
    if record.kind == ANSWERED:
        verdict.num_answered += 1
    else:
        verdict.num_failed[record.text] += 1


def _complaints(fate: _Fate, caller_ended: bool) -> Iterator[str]:
    if not fate.kind:
        yield "nobody has made it"
    if fate.num_ran > 1:
        yield f"it ran {fate.num_ran} times"
    if fate.outcomes == [""] and fate.num_ran == 0 and fate.kind not in NO_CALLS:
        yield "it was answered, but it never ran"
    if len(fate.outcomes) > 1:
        yield f"it has several outcomes: {fate.outcomes}"
    if not fate.outcomes and not caller_ended:
        yield "its caller has no outcome"
    for error in fate.outcomes:
        if error and error not in EXPLAINED:
            yield f"it failed with {error}"


def _complain(verdict: Verdict, call: int, fate: _Fate, what: str) -> None:
    if len(verdict.problems) < MAX_PROBLEMS:
        verdict.problems.append(f"call {call:#x} ({fate.kind}): {what}")
