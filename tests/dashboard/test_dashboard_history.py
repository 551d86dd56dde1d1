"""The contents of a live view after successive queries."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dashboard_facts import channel, facts, served

from rpcdist._dashboard.job_history import (
    KEPT_CURVE_POINTS,
    KEPT_EVENTS,
    KEPT_POINTS,
    MAX_CURVES,
    MAX_KINDS,
    JobHistory,
)
from rpcdist.inspection import ActorFacts, CallMade, CurveFacts, FunctionTimes, MemberFacts, SilentWorker, ThreadState
from rpcdist.inspection.facts import JobFacts


def after(*queries: JobFacts, period_s: float = 2.0) -> dict[str, Any]:
    history = JobHistory()
    for number, answers in enumerate(queries):
        history.add(answers, 100.0 + number * period_s)
    view = history.view()
    json.dumps(view, allow_nan=False)
    return view


def job(*workers: Any, silent: tuple[SilentWorker, ...] = ()) -> JobFacts:
    return JobFacts("default/1", workers, silent)


def texts(view: dict[str, Any]) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in view["events"]]


def test_rates_are_differences_of_two_queries() -> None:
    first = facts(num_made=10, num_served=100, channels=(channel("s", 1000, 500),))
    second = replace(first, num_made=14, num_served=130, channels=(channel("s", 3000, 900), channel("t", 400)))
    view = after(job(first), job(second))
    [row] = view["workers"]
    assert (row["made_rate"], row["served_rate"]) == (2.0, 15.0)
    assert (row["sent_rate"], row["received_rate"]) == (1200.0, 200.0)  # a new connection counts from 0
    assert view["totals"]["calls"] == [0.0, 15.0]
    assert view["totals"]["bytes"] == {"tcp": [0.0, 1200.0]}


def test_what_goes_through_shared_memory_is_a_channel_of_its_own() -> None:
    first = facts(channels=(channel("s", 1000, 500, kind="local"),))
    second = facts(channels=(replace(channel("s", 1200, 500, kind="local"), shared_sent=4000, shared_received=600),))
    view = after(job(first), job(second), job(second))
    assert view["totals"]["bytes"] == {"local": [0.0, 100.0, 0.0], "shared memory": [0.0, 2000.0, 0.0]}
    view = after(job(first), job(second))
    assert (view["workers"][0]["sent_rate"], view["workers"][0]["received_rate"]) == (2100.0, 300.0)


def test_actors_and_their_restarts() -> None:
    calm = ActorFacts("0.1", kind="Counter")
    again = ActorFacts("0.2", "add", 1.5, 3, kind="Counter", num_restarts=1)
    view = after(job(facts(actors=(again,))))
    assert not [text for kind, text in texts(view) if kind == "restarted"], "it was so before the first query"
    replaced = facts(incarnation="b", actors=(calm, again))
    view = after(job(facts(actors=(calm,))), job(replaced), job(replaced))
    assert [text for kind, text in texts(view) if kind == "restarted"] == [
        "actor Counter of worker0 was restarted (1 so far)"
    ]
    assert [(one["reference"], one["num_waiting"], one["num_restarts"]) for one in view["actors"]] == [
        ("0.2", 3, 1), ("0.1", 0, 0),
    ]  # fmt: skip


def test_the_latency_of_a_worker_is_the_median_of_its_calls() -> None:
    def times(function: str, count: int, median_s: float, is_served: bool = True) -> FunctionTimes:
        return FunctionTimes(function, is_served, count, 0, median_s, median_s)

    rows = [
        (times("fast", 3, 0.001), times("slow", 2, 1.0)),
        (times("fast", 2, 0.001), times("slow", 3, 1.0)),
        (times("fast", 9, 0.001, False), times("rpcdist.rpc._membership.x:y", 9, 5.0)),
    ]
    view = after(job(*(facts(f"worker{number}", functions=row) for number, row in enumerate(rows))))
    assert [row["latency_s"] for row in view["workers"]] == [0.001, 1.0, None]


def test_a_process_that_took_a_place_has_no_rates_yet() -> None:
    view = after(job(facts(num_served=1000)), job(facts(incarnation="b", num_served=5, pid=7)))
    assert view["workers"][0]["served_rate"] == 0.0
    assert texts(view)[-1] == ("replaced", "worker0 was replaced by process 7 of host")


def test_events_of_a_job() -> None:
    silent = SilentWorker("worker1", "127.0.0.1:2001", "stopped", "it was stopped by a signal")
    lost = MemberFacts("worker1", 1, "127.0.0.1:2001", "", True)
    view = after(
        job(facts(), facts("worker1"), facts("worker2")),
        job(facts(), facts("worker2"), silent=(silent,)),
        job(facts(), facts("worker2"), silent=(silent,)),
        job(facts(), facts("worker1"), facts("worker2")),
        job(facts(members=(lost,))),
    )
    assert texts(view)[3:] == [
        ("silent", "worker1 does not answer: it was stopped by a signal"),
        ("back", "worker1 answers again"),
        ("lost", "worker1 is lost"),
        ("left", "worker2 has left"),
    ]


def test_the_last_answers_stay_when_nobody_answers() -> None:
    view = after(job(facts()), JobFacts(error="refused"), JobFacts(error="refused"), job(facts()))
    assert view["error"] == ""
    assert [kind for kind, _ in texts(view)] == ["joined", "lost", "back"]
    view = after(job(facts()), JobFacts(error="refused"))
    assert view["error"] == "refused" and [row["name"] for row in view["workers"]] == ["worker0"]


def test_calls_of_the_membership_are_no_work() -> None:
    own = served("rpcdist.rpc._membership.shutdown:depart", 1000.0)
    view = after(job(facts(calls_served=(own, served("work", 0.5), served("work", 0.1, "queued")))))
    [row] = view["workers"]
    assert row["serving"] == 2 and row["oldest_s"] == 0.5
    [function] = view["functions"]
    assert (function["function"], function["running"], function["waiting"]) == ("work", 1, 1)


def test_times_of_a_function_are_those_of_all_workers() -> None:
    view = after(
        job(
            facts(
                functions=(FunctionTimes("work", True, 1, 0, 1.0, 1.0), FunctionTimes("work", False, 9, 9, 9.0, 9.0))
            ),
            facts("worker1", functions=(FunctionTimes("work", True, 3, 1, 2.0, 5.0),)),
        )
    )
    [function] = view["functions"]
    assert (function["ended"], function["failed"], function["median_s"], function["longest_s"]) == (4, 1, 1.75, 5.0)


def test_curves_go_on_where_they_were() -> None:
    queries = [((1.0, 5.0), (2.0, 4.0)), ((2.0, 4.0), (3.0, 3.0))]
    view = after(*[job(facts(curves=(CurveFacts("loss", points),))) for points in queries])
    assert view["curves"] == {"worker0: loss": [(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)]}


def test_everything_is_bounded() -> None:
    history = JobHistory()
    for number in range(3 * KEPT_POINTS):
        start = 100.0 * number
        curves = tuple(
            CurveFacts(f"curve{index}", tuple((start + second, 0.0) for second in range(100)))
            for index in range(1 if number else MAX_CURVES + 5)
        )
        history.add(job(facts(incarnation=str(number), curves=curves)), float(number))
    view = history.view()
    assert len(view["events"]) == KEPT_EVENTS and view["events"][-1]["id"] == 3 * KEPT_POINTS
    assert len(view["totals"]["time_s"]) == len(view["totals"]["calls"]) == KEPT_POINTS
    assert len(view["curves"]) == MAX_CURVES
    points = view["curves"]["worker0: curve0"]
    assert len(points) <= KEPT_CURVE_POINTS and points[0][0] < 1000.0 and points[-1][0] == start + 99


def test_what_a_worker_makes_up_hides_no_other() -> None:
    """A function that nobody has called ended each query; kinds of channels were kept for ever."""
    times = [FunctionTimes("f", True, count, 0, 1.0, 1.0) for count in (0, -1, 1)]
    honest = facts(num_made=1)
    evil = [
        facts(
            "worker1",
            functions=tuple(times),
            channels=tuple(channel(f"{kind}", query, kind=f"{query}.{kind}") for kind in range(50)),
        )
        for query in range(20)
    ]
    view = after(*[job(honest, one) for one in evil])
    assert [row["name"] for row in view["workers"]] == ["worker0", "worker1"]
    assert [(one["ended"], one["median_s"]) for one in view["functions"]] == [(1, 1.0)]
    assert len(view["totals"]["bytes"]) <= MAX_KINDS


def test_workers_that_serve_until_a_shutdown_wait_for_nothing() -> None:
    made = CallMade(1, "s", "rpcdist.rpc._membership.shutdown:depart", "worker0", "waiting", 100.0)
    waits = ThreadState(1, "MainThread", waits_for=(1,))
    leaving = facts("worker1", phase="leaving", calls_made=(made,), threads=(waits,))
    assert after(job(facts(), leaving))["waits"] == {"deadlocks": [], "culprits": []}
    assert [row["phase"] for row in after(job(facts(), leaving))["workers"]] == ["working", "serving"]
    assert after(job(replace(facts(), phase="leaving"), leaving))["waits"]["culprits"] != []
