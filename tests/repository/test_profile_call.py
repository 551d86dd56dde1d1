"""`tools/profile_call.py`: what marks say about a call, the points that it marks, and its output."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator

import profile_call
import pytest
from profile_call import (
    KINDS,
    POINTS,
    CallTimes,
    Mark,
    Measured,
    Point,
    Recorder,
    Settings,
    find_function,
    measure,
    profile_calls,
    table,
)

from rpcdist.testing import WorkerPool, free_port


def marks(*rows: tuple[int, str, str, str]) -> list[Mark]:
    return [Mark(*row) for row in rows]


# ---- stages


def test_each_stage_takes_until_the_next_one_begins() -> None:
    calls = [CallTimes(0, 10_000), CallTimes(20_000, 32_000)]
    found = profile_calls(
        calls,
        marks(
            (1_000, "caller", "MainThread", "sends"),
            (4_000, "callee", "worker-1", "runs"),
            (15_000, "callee", "worker-1", "between two calls"),
            (23_000, "caller", "MainThread", "sends"),
            (25_000, "callee", "worker-12", "runs"),
        ),
    )
    assert found.total_us == 11
    assert [tuple(stage) for stage in found.stages] == [
        ("caller", "MainThread", "sends", 2, 2.5),
        ("callee", "worker", "runs", 4.5, 6.5),
    ]
    assert found.rare == {}


def test_the_order_of_marks_may_differ_from_call_to_call() -> None:
    calls = [CallTimes(100 * number, 100 * number + 50) for number in range(3)]
    rows = [
        (100 * number + at, process, "thread", event)
        for number, written, received in ((0, 10, 20), (1, 30, 20), (2, 12, 20))
        for at, process, event in ((written, "caller", "written"), (received, "callee", "received"))
    ]
    found = profile_calls(calls, marks(*rows))
    assert [(stage.event, stage.at_us) for stage in found.stages] == [("written", 0.012), ("received", 0.02)]


def test_an_event_that_happens_twice_in_a_call_is_two_stages() -> None:
    rows = marks((1_000, "caller", "t", "write"), (3_000, "caller", "t", "write"))
    assert [stage.at_us for stage in profile_calls([CallTimes(0, 4_000)], rows).stages] == [1, 3]


def test_an_event_may_happen_on_different_threads() -> None:
    """The thread that waits for a call reads, or else the I/O thread does."""
    calls = [CallTimes(100 * number, 100 * number + 50) for number in range(20)]
    readers = ["rpcdist-io"] * 6 + ["rpcdist-worker-1"] * 13 + ["MainThread"]
    rows = [(100 * number + 30, "callee", thread, "received") for number, thread in enumerate(readers)]
    found = profile_calls(calls, marks(*rows))
    assert [(stage.thread, stage.event) for stage in found.stages] == [("rpcdist-worker or rpcdist-io", "received")]
    assert found.rare == {}


def test_what_happens_now_and_then_is_no_stage() -> None:
    calls = [CallTimes(1_000 * number, 1_000 * number + 900) for number in range(20)]
    rows = [(1_000 * number + 100, "caller", "io", "always") for number in range(20)]
    rows += [(5_500, "caller", "io", "heartbeat")]
    found = profile_calls(calls, marks(*rows))
    assert [stage.event for stage in found.stages] == ["always"]
    assert found.rare == {"heartbeat (caller, io)": 1}


def test_the_table_adds_up() -> None:
    rows = marks((2_000, "caller", "MainThread", "sends"), (5_000, "callee", "worker", "runs"))
    first, _, *lines = table(profile_calls([CallTimes(0, 8_000)], rows))
    assert [cell.strip() for cell in first.strip("|").split("|")][:2] == ["at us", "takes us"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(line[0], line[1]) for line in cells] == [("0.0", "2.0"), ("2.0", "3.0"), ("5.0", "3.0"), ("8.0", "")]


# ---- marks


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module with a function and a class, and a second one that imported the function."""

    class Thing:
        def method(self, number: int) -> int:
            return number + 1

    def function() -> None:
        raise KeyError("on purpose")

    made = types.ModuleType("rpcdist_profiled")
    other = types.ModuleType("rpcdist_other")
    vars(made).update(Thing=Thing, function=function)
    vars(other).update(function=function)
    sys.modules |= {made.__name__: made, other.__name__: other}
    yield made
    del sys.modules[made.__name__], sys.modules[other.__name__]


def test_functions_are_marked_where_they_begin_and_end(module: types.ModuleType) -> None:
    recorder = Recorder("caller")
    points = (
        Point("rpcdist_profiled:Thing.method", "begins", "ends"),
        Point("rpcdist_profiled:function", "", "raised"),
    )
    assert recorder.install(points) == []
    thread = threading.Thread(target=lambda: module.Thing().method(1), name="worker-3")
    thread.start()
    thread.join(10)
    with pytest.raises(KeyError):
        sys.modules["rpcdist_other"].function()
    found = recorder.marks()
    assert [(mark.process, mark.thread, mark.event) for mark in found] == [
        ("caller", "worker-3", "begins"),
        ("caller", "worker-3", "ends"),
        ("caller", threading.current_thread().name, "raised"),
    ]
    assert [mark.time_ns for mark in found] == sorted(mark.time_ns for mark in found)


def test_points_that_there_are_not_are_named(module: types.ModuleType) -> None:
    points = [
        Point(name, "begins") for name in ("rpcdist_profiled:gone", "rpcdist_profiled:Thing.gone", "rpcdist_no:x")
    ]
    assert Recorder("caller").install(points) == [point.name for point in points]


@pytest.mark.parametrize("name", [point.name for point in POINTS])
def test_every_point_is_a_function_of_the_call_path(name: str) -> None:
    """If this fails, the call path has changed: name the function that does the same now, or drop the point."""
    assert find_function(name) is not None


# ---- the command


def measured(pool: WorkerPool, settings: Settings) -> list[Measured]:
    """The results of `launch`, from workers that are quicker to start."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = [pool.start(f"rank{rank}", {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    running = [worker.begin(measure, rank, settings) for rank, worker in enumerate(workers)]
    return [each.result() for each in running]


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_are_marked(kind: str, worker_pool: WorkerPool) -> None:
    caller, callee = measured(worker_pool, Settings(kind, 1024, num_calls=30, pause_s=0, with_marks=True))
    assert (len(caller.calls), callee.calls) == (30, [])
    assert caller.missing == callee.missing == []
    # Which marks most calls have, and in which order, depends on the machine's other work.
    assert {"write begins", "written", "bytes received"} <= {mark.event for mark in caller.marks}
    assert {"bytes received", "the function begins", "write begins"} <= {mark.event for mark in callee.marks}
    assert sum(mark.event == "the function begins" for mark in callee.marks) >= 30
    assert profile_calls(caller.calls, [*caller.marks, *callee.marks]).total_us > 0


def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[Settings] = []

    def start(function: object, args: tuple[Settings], **_: object) -> list[Measured]:
        started.extend(args)
        own = [Mark(2_000, "caller", "MainThread", "sends")] if args[0].with_marks else []
        peers = [Mark(5_000, "callee", "worker", "runs"), Mark(6_000, "callee", "io", "heartbeat")]
        calls = [CallTimes(0, 8_000), CallTimes(10_000, 17_000)]
        return [
            Measured(calls, [*own, Mark(12_000, "caller", "MainThread", "sends")], ["a:gone"]),
            Measured([], peers, []),
        ]

    monkeypatch.setattr(profile_call, "launch", start)
    assert profile_call.main(["echo", "--size", "1 MiB", "--calls", "2", "--pause-ms", "1.5"]) == 0
    assert started == [Settings("echo", 1 << 20, 2, 0.0015, marks) for marks in (False, True)]
    output = capsys.readouterr().out
    assert output.startswith("echo of 1048576 bytes: 7.5 us without marks, 7.5 us with them; medians of 2 calls")
    assert "| 2.0   | 5.5      | 73%   | caller  | MainThread | sends" in output
    assert "Not in every call: heartbeat (callee, io): 1, runs (callee, worker): 1." in output
    assert "Not found, so without a mark: a:gone." in output
