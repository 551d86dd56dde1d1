"""Log lines and timelines that the page shows, made of the notes of workers: tables of queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from dashboard_facts import facts

from rpcdist._dashboard import job_notes
from rpcdist._dashboard.job_notes import JobNotes
from rpcdist.inspection import LiveNotes, LogLine, SpanFacts, WorkerFacts

Bar = tuple[str, str, float, float]


def line(number: int, time_s: float = 0.0, text: str = "") -> LogLine:
    return LogLine(number, time_s, "INFO", "program", text or f"line {number}")


def worker(name: str, lines: Iterable[LogLine] = (), spans: Iterable[SpanFacts] = (), **more: Any) -> WorkerFacts:
    return facts(name, notes=LiveNotes(tuple(lines), tuple(spans)), **more)


def spans_of(lane: str, *named: tuple[str, float, float], first: int = 1) -> list[SpanFacts]:
    return [SpanFacts(number, lane, *one) for number, one in enumerate(named, first)]


def view_of(*queries: list[WorkerFacts]) -> dict[str, Any]:
    notes = JobNotes()
    for workers in queries:
        notes.add(workers, {one.worker for one in workers})
    return notes.view()


def timeline_of(name: str, *queries: list[WorkerFacts]) -> Any:
    return view_of(*queries)["timelines"][name]


def test_lines_of_all_workers_are_in_the_order_of_their_time() -> None:
    view = view_of([worker("worker0", [line(1, 1.0), line(2, 3.0)]), worker("worker1", [line(1, 2.0)])])
    assert [(one["id"], one["worker"], one["time_s"]) for one in view["lines"]] == [
        (1, "worker0", 1.0), (2, "worker1", 2.0), (3, "worker0", 3.0)
    ]  # fmt: skip
    assert view["timelines"] == {"pipeline": None, "backward": None, "ddp": None}


def test_a_line_that_comes_twice_is_shown_once_and_a_new_process_begins_again() -> None:
    view = view_of(
        [worker("worker0", [line(1), line(2)])],
        [worker("worker0", [line(1), line(2), line(3)])],
        [worker("worker0", [line(1, text="of another process")], incarnation="b")],
    )
    assert [one["text"] for one in view["lines"]] == ["line 1", "line 2", "line 3", "of another process"]


def test_only_so_much_is_kept() -> None:
    many = [line(number) for number in range(1, 2000)]
    spans = spans_of("pipeline", *[("0F0 of step 1", float(number), number + 0.5) for number in range(9000)])
    notes = JobNotes()
    notes.add([worker("worker0", many, spans)], {"worker0"})
    assert len(notes.view()["lines"]) == job_notes.KEPT_LINES
    assert len(notes.view()["timelines"]["pipeline"]["bars"]) == job_notes.KEPT_SPANS
    notes.add([], {"worker1"})
    assert notes.view()["timelines"]["pipeline"] is None, "nothing is kept of a worker that has left"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_worker_that_is_silent_for_a_query_repeats_nothing(is_there: bool) -> None:
    notes = JobNotes()
    notes.add([worker("worker0", [line(1)])], {"worker0"})
    notes.add([], {"worker0"} if is_there else {"another"})
    notes.add([worker("worker0", [line(1)])], {"worker0"})
    assert len(notes.view()["lines"]) == (1 if is_there else 2)


def test_the_last_pipeline_step_of_which_all_is_known() -> None:
    """Step 8 has begun only."""
    first = spans_of(
        "pipeline", ("0F0 of step 7", 10.0, 11.0), ("0B0 of step 7", 14.0, 16.0), ("0F0 of step 8", 17.0, 18.0)
    )
    second = spans_of("pipeline", ("1F0 of step 7", 11.5, 12.5), ("1B0 of step 7", 12.5, 13.5))
    assert timeline_of("pipeline", [worker("worker0", spans=first), worker("worker1", spans=second)]) == {
        "title": "step 7",
        "time_s": 10.0,
        "bars": [
            ["worker0", "0F0", 0.0, 1.0], ["worker1", "1F0", 1.5, 1.0], ["worker1", "1B0", 2.5, 1.0],
            ["worker0", "0B0", 4.0, 2.0],
        ],
    }  # fmt: skip


def test_the_last_backward_pass_of_as_many_workers_as_any() -> None:
    """Pass 6 has ended on one worker so far."""
    first = spans_of("backward", ("run of pass 5", 1.0, 2.0), ("run of pass 6", 3.0, 4.0), ("wait of pass 6", 4.0, 5.0))
    found = timeline_of(
        "backward",
        [worker("worker0", spans=first), worker("worker1", spans=spans_of("backward", ("run of pass 5", 1.5, 3.0)))],
    )
    assert found["title"] == "pass 5" and found["bars"] == [["worker0", "run", 0.0, 1.0], ["worker1", "run", 0.5, 1.5]]


def test_an_iteration_of_ddp_and_how_much_of_its_reductions_ran_beside_the_backward_pass() -> None:
    buckets = [("bucket 0, 8 B", 9.0, 9.5), ("bucket 0, 8 B", 10.2, 11.4), ("bucket 1, 8 B", 11.0, 11.5)]
    operations = [("all_reduce", 10.2, 10.6), ("all_reduce", 10.9, 11.5), ("broadcast", 20.0, 21.0)]
    spans = [
        *spans_of("DDP buckets", *buckets),
        *spans_of("group 0", *operations, first=4),
        *spans_of("DDP", ("gradients 3", 10.0, 11.0), ("iteration 3", 10.0, 11.6), first=7),
    ]
    found = timeline_of("ddp", [worker("worker0", spans=spans), worker("worker1")])
    assert found["title"] == "iteration 3" and found["buckets"] == 2
    assert found["overlap"] == 0.5, "0.4 s and 0.1 s of 1.0 s"
    assert [bar[1] for bar in found["bars"]] == [
        "gradients",
        "bucket 0, 8 B",
        "all_reduce",
        "all_reduce",
        "bucket 1, 8 B",
    ]


@pytest.mark.parametrize(
    ("lane", "name"),
    [
        ("pipeline", "0F0"),
        ("pipeline", "x of step y"),
        ("backward", "run"),
        ("DDP", "iteration"),
        ("DDP", "gradients 1"),
    ],
)
def test_spans_that_another_version_names_in_its_way_make_no_timeline(lane: str, name: str) -> None:
    view = view_of([worker("worker0", spans=spans_of(lane, (name, 1.0, 2.0)))])
    assert view["timelines"] == {"pipeline": None, "backward": None, "ddp": None}
