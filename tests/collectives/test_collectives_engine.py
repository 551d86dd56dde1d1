"""The engine of a group: order, threads, and what a failure means to every operation."""

from __future__ import annotations

import json
import os
import re
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside_groups import Control, Transport, TransportMismatch, TransportPeerLost, TransportTimeout

from rpcdist.collectives import flight_recorder
from rpcdist.collectives._group.engine import Engine
from rpcdist.collectives._group.flight_records import FlightRecorder
from rpcdist.collectives._group.state import GroupFailure, GroupState, Reporter
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, GroupAborted, RankLost
from rpcdist.private_files import FOLDER_VARIABLE

LIMIT_S = 10.0


class ScriptedTransport(Transport):
    """Notes what it runs and on which thread; waits at a gate, and raises, when told to."""

    rank = 1
    size = 3

    def __init__(self) -> None:
        self.seen: list[tuple[Kind, int, str]] = []
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.error: BaseException | None = None

    def run(self, operation: Operation, control: Control) -> None:
        self.seen.append((operation.kind, control.sequence, threading.current_thread().name))
        self.entered.set()
        while self.gate is not None and not self.gate.wait(0.01):
            control.check()
            if control.deadline.expired():
                raise TransportTimeout(frozenset({2}))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass


class NotedReports(Reporter):
    def __init__(self) -> None:
        self.failures: list[GroupFailure] = []
        self.timeouts: list[int] = []

    def report(self, failure: GroupFailure) -> None:
        self.failures.append(failure)

    def report_timeout(self, title: str, sequence: int) -> bool:
        self.timeouts.append(sequence)
        return False


@pytest.fixture(autouse=True)
def dump_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "flight"))
    return tmp_path / "flight"


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def recorder() -> FlightRecorder:
    return FlightRecorder()


@pytest.fixture
def reports() -> NotedReports:
    return NotedReports()


@pytest.fixture
def told() -> list[GroupFailure]:
    """The failures that the messages of the group are told of."""
    return []


@pytest.fixture
def engine(
    transport: ScriptedTransport, recorder: FlightRecorder, reports: NotedReports, told: list[GroupFailure]
) -> Iterator[Engine]:
    state = GroupState("g", 1, (10, 11, 12))
    engine = Engine(transport, state, timeout_s=LIMIT_S, recorder=recorder, reporter=reports, on_failure=told.append)
    engine.opened()
    yield engine
    if transport.gate is not None:
        transport.gate.set()
    engine.close(LIMIT_S)
    engine.free()


def submit(engine: Engine, asynchronous: bool = False, timeout_s: float | None = None) -> Work:
    return engine.submit(Operation(Kind.BARRIER), asynchronous, timeout_s, None, None)


def test_a_blocking_operation_of_an_idle_group_runs_on_the_callers_thread(
    engine: Engine, transport: ScriptedTransport
) -> None:
    me = threading.current_thread().name
    assert submit(engine).is_success()
    assert submit(engine).is_success()
    assert transport.seen == [(Kind.BARRIER, 1, me), (Kind.BARRIER, 2, me)]


def test_operations_run_in_the_order_of_the_calls(engine: Engine, transport: ScriptedTransport) -> None:
    transport.gate = threading.Event()
    works = [submit(engine, asynchronous=True) for _ in range(5)]
    assert transport.entered.wait(LIMIT_S)
    assert not any(work.is_completed() for work in works)
    transport.gate.set()
    submit(engine)
    assert all(work.is_success() for work in works)
    assert [sequence for _, sequence, _ in transport.seen] == [1, 2, 3, 4, 5, 6]
    assert transport.seen[0][2] == "rpcdist group g"


def test_without_a_thread_of_its_own_each_caller_carries_out_its_operation(
    engine: Engine, transport: ScriptedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers stay in the order in which the operations run: the other ranks go by them."""
    blocking = threading.Thread(target=submit, args=(engine,), name="blocking")
    others = [threading.Thread(target=submit, args=(engine, True), name="asynchronous") for _ in range(2)]
    transport.gate = threading.Event()
    blocking.start()
    assert transport.entered.wait(LIMIT_S)
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread not in others:
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for thread in others:
        thread.start()
    transport.gate.set()
    for thread in (blocking, *others):
        thread.join(LIMIT_S)
    assert submit(engine, asynchronous=True).is_success()
    monkeypatch.undo()
    assert submit(engine, asynchronous=True).wait(LIMIT_S)
    names = ["blocking", "asynchronous", "asynchronous", threading.current_thread().name, "rpcdist group g"]
    assert [(sequence, name) for _, sequence, name in transport.seen] == list(enumerate(names, start=1))


def test_two_threads_take_turns(engine: Engine, transport: ScriptedTransport) -> None:
    def call() -> None:
        for _ in range(200):
            submit(engine)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [sequence for _, sequence, _ in transport.seen] == list(range(1, 601))


def test_operations_can_be_given_a_name(engine: Engine, recorder: FlightRecorder) -> None:
    with flight_recorder.record_comm("the optimizer's"):
        submit(engine)
        submit(engine, asynchronous=True).wait(LIMIT_S)
    submit(engine)
    assert [record.label for record in recorder.entries()] == ["the optimizer's"] * 2 + [""]


@pytest.mark.parametrize(
    "how", ["a blocking call", "waiting for another", "waiting for a future", "waiting for a callback"]
)
def test_a_callback_may_wait_for_a_later_operation(engine: Engine, transport: ScriptedTransport, how: str) -> None:
    transport.gate = threading.Event()
    first, second, third = (submit(engine, asynchronous=True) for _ in range(3))

    def goes_on(_: object) -> list[bool]:
        if how == "a blocking call":
            submit(engine)
        elif how == "waiting for another":
            third.wait()
        elif how == "waiting for a future":
            torch.futures.collect_all([third.get_future()]).wait()
        else:
            submit(engine, asynchronous=True).get_future().then(lambda _: submit(engine)).wait()
        return [work.is_success() for work in (first, second, third)]

    future = first.get_future().then(goes_on)
    transport.gate.set()
    assert third.wait(LIMIT_S)
    assert future.wait() == [True] * 3
    assert [sequence for _, sequence, _ in transport.seen][:3] == [1, 2, 3]


def test_a_wait_in_a_callback_ends_at_the_limit_of_what_it_waits_for(
    engine: Engine, transport: ScriptedTransport
) -> None:
    transport.gate = threading.Event()
    first = submit(engine, asynchronous=True)
    assert transport.entered.wait(LIMIT_S)

    def waits(_: object) -> None:
        transport.gate = threading.Event()
        submit(engine, asynchronous=True, timeout_s=0.05).get_future().wait()

    future = first.get_future().then(waits)
    transport.gate.set()
    with pytest.raises(CollectiveTimeout, match="rank 12"):
        future.wait()


def test_finish_runs_before_work_is_done(engine: Engine) -> None:
    seen: list[str] = []
    tensor = torch.ones(2)
    work = engine.submit(Operation(Kind.BARRIER), True, None, lambda: seen.append("finish"), [tensor])
    work.when_done(lambda _: seen.append("done"))
    assert work.wait(LIMIT_S)
    assert seen == ["finish", "done"]
    assert work.result() == [tensor]


@pytest.mark.parametrize(
    ("error", "expected", "texts"),
    [
        (TransportMismatch({0: "barrier #1", 2: "all_reduce #1 (SUM)"}), CollectiveMismatch,
         ["rank 10 called barrier #1", "rank 12 called all_reduce #1 (SUM)"]),
        (TransportPeerLost(2, "end of stream"), RankLost, ["rank 11", "rank 12", "end of stream"]),
        (TransportTimeout(frozenset({0, 2})), CollectiveTimeout, ["ranks 10, 12"]),
    ],
)  # fmt: skip
def test_what_a_transport_finds_ends_the_group_and_is_reported(
    engine: Engine,
    transport: ScriptedTransport,
    reports: NotedReports,
    error: Exception,
    expected: type[CollectiveError],
    texts: list[str],
) -> None:
    transport.error = error
    with pytest.raises(expected) as first:
        submit(engine)
    assert "barrier #1 of group 'g'" in str(first.value)
    for text in texts:
        assert text in str(first.value)
    transport.error = None
    with pytest.raises(expected, match="barrier #2 of group 'g'"):
        submit(engine)
    assert len(reports.failures) == 1
    assert len(transport.seen) == 1


def test_a_mismatch_names_the_shapes_of_this_rank(engine: Engine, transport: ScriptedTransport) -> None:
    transport.error = TransportMismatch(
        {1: "all_reduce #1 (SUM, 12 elements of float32)", 2: "all_reduce #1 (SUM, 8 elements of float32)"}
    )
    tensor = torch.ones(3, 4)
    work = engine.submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM), True, None, None, None)
    with pytest.raises(CollectiveMismatch, match=r"12 elements of float32.*; the shapes on this rank: \(3, 4\)$"):
        work.wait(LIMIT_S)
    with pytest.raises(CollectiveMismatch) as later:
        submit(engine)
    assert "shapes" not in str(later.value), "those were of another operation"


def test_an_error_of_this_rank_is_raised_as_it_is_and_reported(
    engine: Engine, transport: ScriptedTransport, reports: NotedReports
) -> None:
    transport.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        submit(engine)
    assert "rank 11 raised KeyboardInterrupt" in reports.failures[0].reason


def test_a_failure_told_by_others_frees_whoever_waits(
    engine: Engine, transport: ScriptedTransport, reports: NotedReports, told: list[GroupFailure]
) -> None:
    transport.gate = threading.Event()
    works = [submit(engine, asynchronous=True) for _ in range(3)]
    assert transport.entered.wait(LIMIT_S)
    lost = GroupFailure(RankLost, "rank 12 was lost: its process ended", (2,))
    engine.fail(lost)
    for number, work in enumerate(works, 1):
        with pytest.raises(RankLost, match=f"barrier #{number} .*rank 12 was lost") as raised:
            work.wait(LIMIT_S)
        assert raised.value.ranks == (2,)
    assert reports.failures == []  # everybody knows already
    engine.fail(GroupFailure(GroupAborted, "too late"))
    assert engine.state.failure is lost and len(told) == 1


@pytest.mark.parametrize("opens_first", [True, False])
def test_a_departure_is_noted_before_the_failure_that_follows(
    transport: ScriptedTransport, recorder: FlightRecorder, opens_first: bool
) -> None:
    """Messages from a rank that left fail with that reason, also if both came while the group was made."""
    log: list[str] = []
    readable: list[bool] = []

    class Noted(NotedReports):
        def report(self, failure: GroupFailure) -> None:
            log.append("report")

    def note_departure(rank: int, reason: str) -> None:
        log.append(f"departure of {rank}")
        readable.append(bool(select.select([made.wakeup_fd], [], [], 0)[0]))

    made = Engine(
        transport,
        GroupState("g", 1, (10, 11, 12)),
        timeout_s=LIMIT_S,
        recorder=recorder,
        reporter=Noted(),
        on_failure=lambda failure: log.append("failure"),
        on_departure=note_departure,
    )
    made.abort_hooks[0] = lambda: log.append("abort hook")
    lost = GroupFailure(RankLost, "rank 12 was lost: its process ended", (2,))
    try:
        if opens_first:
            made.opened()
            running: Any = SimpleNamespace(sequence=1)
            made.state.current = running
        made.rank_left(2, 0)
        made.state.current = None
        if opens_first:
            made.fail_everywhere(lost)
        else:
            made.fail(lost)
            assert not log
            made.opened()
    finally:
        made.close(LIMIT_S)
        made.free()
    assert log == ["departure of 2", "abort hook", "failure", *(["report"] if opens_first else [])]
    assert readable == [opens_first]  # an operation ran that needs the rank


def test_a_failure_makes_the_descriptor_readable(engine: Engine) -> None:
    assert select.select([engine.wakeup_fd], [], [], 0)[0] == []
    engine.fail(GroupFailure(GroupAborted, "why"))
    assert select.select([engine.wakeup_fd], [], [], 0)[0] == [engine.wakeup_fd]


def test_the_deadline_counts_from_the_call(engine: Engine, transport: ScriptedTransport, reports: NotedReports) -> None:
    transport.gate = threading.Event()
    with pytest.raises(CollectiveTimeout, match="rank 12"):
        submit(engine, timeout_s=0.05)
    assert reports.timeouts == [1]


def test_a_wait_that_times_out_leaves_the_operation_running(engine: Engine, transport: ScriptedTransport) -> None:
    transport.gate = threading.Event()
    work = submit(engine, asynchronous=True)
    with pytest.raises(CollectiveTimeout, match="the operation continues"):
        work.wait(0.02)
    transport.gate.set()
    assert work.wait(LIMIT_S)


def test_a_rank_that_left_fails_only_what_comes_after(engine: Engine, transport: ScriptedTransport) -> None:
    transport.gate = threading.Event()
    first, second = (submit(engine, asynchronous=True) for _ in range(2))
    assert transport.entered.wait(LIMIT_S)
    engine.rank_left(2, 1)
    assert select.select([engine.wakeup_fd], [], [], 0)[0] == []
    transport.gate.set()
    assert first.wait(LIMIT_S)
    with pytest.raises(RankLost, match=r"rank 12 left the group .* after collective #1"):
        second.wait(LIMIT_S)


def test_a_connection_that_ends_because_its_rank_left_says_so(engine: Engine, transport: ScriptedTransport) -> None:
    engine.rank_left(2, 5)
    transport.error = TransportPeerLost(2, "end of stream")
    with pytest.raises(RankLost, match="left the group"):
        submit(engine)


def test_whoever_left_first_is_the_reason_of_a_broken_connection(engine: Engine, transport: ScriptedTransport) -> None:
    class LeavesMeanwhile(ScriptedTransport):
        def run(self, operation: Operation, control: Control) -> None:
            engine.rank_left(0, 0)
            raise TransportPeerLost(2, "end of stream")  # rank 2 gave up because of that

    engine._transport = LeavesMeanwhile()
    with pytest.raises(RankLost, match="rank 10 left the group"):
        submit(engine)


def test_closing_waits_for_what_was_submitted(engine: Engine, transport: ScriptedTransport) -> None:
    transport.gate = threading.Event()
    work = submit(engine, asynchronous=True)
    assert transport.entered.wait(LIMIT_S)
    threading.Timer(0.05, transport.gate.set).start()
    assert engine.close(LIMIT_S)
    assert work.is_success()
    with pytest.raises(GroupAborted, match="destroyed"):
        submit(engine)


def test_closing_is_bounded(engine: Engine, transport: ScriptedTransport) -> None:
    transport.gate = threading.Event()
    work = submit(engine, asynchronous=True)
    assert transport.entered.wait(LIMIT_S)
    assert not engine.close(0.05)
    with pytest.raises(GroupAborted, match="destroyed while"):
        work.wait(LIMIT_S)


def test_where_names_the_operation(engine: Engine, transport: ScriptedTransport) -> None:
    submit(engine)
    sequence, text = engine.where()
    assert (sequence, text[:30]) == (1, "finished barrier #1 of group '")
    transport.gate = threading.Event()
    transport.entered.clear()
    submit(engine, asynchronous=True)
    assert transport.entered.wait(LIMIT_S)
    assert engine.where() == (2, "is in barrier #2 of group 'g'")


def test_the_flight_recorder_keeps_operations_and_is_written_on_failure(
    engine: Engine, transport: ScriptedTransport, dump_folder: Path
) -> None:
    tensor = torch.zeros(6)
    engine.submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.MAX), False, None, None, None)
    transport.error = TransportPeerLost(0, "end of stream")
    with pytest.raises(RankLost):
        submit(engine)
    [name] = os.listdir(dump_folder)
    assert re.fullmatch(rf"rank11-\d{{8}}T\d{{6}}-{os.getpid()}\.json", name)
    dumped = json.loads((dump_folder / name).read_text())
    assert dumped["pid"] == os.getpid()
    good, bad = dumped["entries"][-2:]
    assert (good["operation"], good["sequence"], good["state"]) == ("all_reduce", 1, "done")
    assert (good["dtype"], good["input_sizes"], good["detail"], good["group"]) == ("float32", [6], "MAX", "g")
    assert good["queued_ns"] <= good["started_ns"] <= good["ended_ns"]
    assert bad["state"] == "failed"
    assert "end of stream" in bad["error"]
    assert dump_folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("error", "is_written"), [(TransportPeerLost(2, "end of stream"), False), (ValueError("of the program"), True)]
)
def test_a_group_that_outlives_its_ranks_writes_no_record_of_a_loss(
    engine: Engine, transport: ScriptedTransport, dump_folder: Path, error: Exception, is_written: bool
) -> None:
    engine._outlives_ranks = True
    transport.error = error
    with pytest.raises((RankLost, ValueError)):
        submit(engine)
    assert dump_folder.exists() is is_written


def test_dumps_of_other_jobs_stay_and_the_oldest_go(dump_folder: Path, recorder: FlightRecorder) -> None:
    dump_folder.mkdir()
    others = [f"rank3-20010101T0000{second:02}-7.json" for second in range(25)] + ["rank30-20010101T000000-7.json"]
    for name in others:
        (dump_folder / name).write_text("{}")
    written = recorder.write_dump(3)
    assert written is not None and written == recorder.write_dump(3)
    kept = [*others[-20:], written.name]
    assert sorted(os.listdir(dump_folder)) == sorted(kept)
