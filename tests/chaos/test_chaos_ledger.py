"""The ledger finds every way in which a call may go wrong, and the faults are those of their seed."""

from __future__ import annotations

import signal
from itertools import islice
from pathlib import Path

import pytest
from chaos_faults import FAULTS, faults_from
from chaos_ledger import ANSWERED, FAILED, ISSUED, LATE_LIMIT_S, RAN, Ledger, Record, read_records, verdict_on

from rpcdist.testing import WorkerPool

CALL = 7 << 32 | 1


def records(*lines: tuple[bytes, str] | tuple[bytes, str, float]) -> list[Record]:
    return [Record(line[0], CALL, line[2] if len(line) == 3 else 0.0, line[1]) for line in lines]


@pytest.mark.parametrize(
    "lines",
    [
        [(ISSUED, "call"), (RAN, "echo"), (ANSWERED, "")],
        [(RAN, "echo"), (ANSWERED, ""), (ISSUED, "call")],
        [(ISSUED, "call"), (FAILED, "WorkerLost")],
        [(ISSUED, "call"), (RAN, "echo"), (FAILED, "WorkerLost", LATE_LIMIT_S)],
        [(ISSUED, "backward"), (ANSWERED, "")],
    ],
)
def test_what_may_be(lines: list[tuple[bytes, str]]) -> None:
    assert verdict_on(records(*lines), ended=()).problems == []


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([(ISSUED, "call"), (RAN, "echo"), (RAN, "echo"), (ANSWERED, "")], "it ran 2 times"),
        ([(ISSUED, "call"), (RAN, "echo"), (RAN, "echo"), (FAILED, "WorkerLost")], "it ran 2 times"),
        ([(ISSUED, "call"), (ANSWERED, "")], "it was answered, but it never ran"),
        ([(ISSUED, "call"), (RAN, "echo"), (ANSWERED, ""), (FAILED, "WorkerLost")], "several outcomes"),
        ([(ISSUED, "call"), (RAN, "echo")], "its caller has no outcome"),
        ([(ISSUED, "call"), (RAN, "echo"), (FAILED, "WrongAnswer")], "it failed with WrongAnswer"),
        ([(ISSUED, "call"), (FAILED, "DeadlineExceeded", LATE_LIMIT_S + 0.1)], "beyond the deadline"),
        ([(RAN, "echo")], "nobody has made it"),
    ],
)
def test_what_must_not_be(lines: list[tuple[bytes, str]], complaint: str) -> None:
    problems = verdict_on(records(*lines), ended=()).problems
    assert any(complaint in problem for problem in problems), problems


def test_the_last_calls_of_a_caller_that_was_killed_have_no_outcome() -> None:
    assert verdict_on(records((ISSUED, "call"), (RAN, "echo")), ended={7}).problems == []
    assert verdict_on(records((ISSUED, "call"), (RAN, "echo"), (RAN, "echo")), ended={7}).problems != []


def write_and_die(path: str) -> None:
    ledger = Ledger(path, 7)
    call = ledger.issued(1, "call")
    for _ in range(1000):
        ledger.ran(call, "echo")
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.multiproc
def test_what_was_written_survives_sigkill(worker_pool: WorkerPool, tmp_path: Path) -> None:
    worker = worker_pool.start("writer")
    worker.begin(write_and_die, str(tmp_path / "7.ledger"))
    assert worker.wait() == -signal.SIGKILL
    verdict = verdict_on(read_records(tmp_path), ended={7})
    assert verdict.num_ran == 1000 and verdict.num_issued == {"call": 1}


def test_the_same_seed_draws_the_same_faults_and_every_round_has_all_of_them() -> None:
    faults = list(islice(faults_from("7", FAULTS, "abcd", {"a"}), 40))
    assert faults == list(islice(faults_from("7", FAULTS, "abcd", {"a"}), 40))
    assert faults != list(islice(faults_from("8", FAULTS, "abcd", {"a"}), 40))
    for first in range(0, 40, len(FAULTS)):
        assert {fault.kind for fault in faults[first : first + len(FAULTS)]} == set(FAULTS)
    assert all(fault.victim != "a" for fault in faults if fault.kind == "kill")
