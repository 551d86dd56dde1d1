"""`rpcdist.trace`: a file of the calls of all workers."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from inside_agents import current_agent
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from torch import nn
from torch.nn.functional import mse_loss

import rpcdist
from rpcdist import autograd, collectives, rpc, tracing
from rpcdist.errors import ConfigError, NotInitialized
from rpcdist.parallel import DistributedDataParallel, Pipeline
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._serving.active_calls import ActiveCall
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.tracing import Notes, trace_events

CALL_LIMIT_S = 20.0


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def slices(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event.get("cat") == category]


def double(x: int) -> int:
    return 2 * x


def through_c(x: int) -> int:
    result: int = rpc.rpc_sync("c", double, (x,))
    return result


def fail() -> None:
    raise ArithmeticError("no result")


def test_calls_of_all_workers_with_arrows(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b", "c") as cluster, cluster.use("a"):
        rpc.rpc_sync("b", double, (1,))
        with rpcdist.trace(path):
            assert rpc.rpc_sync("b", through_c, (4,)) == 8
            with pytest.raises(ArithmeticError):
                rpc.rpc_sync("c", fail)
        rpc.rpc_sync("b", double, (1,))
    events = events_of(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.partition(",")[0] for _, name in sorted(names.items())] == ["a", "b", "c"]
    made = {(one["pid"], one["name"].rpartition(":")[2]): one for one in slices(events, "made")}
    served = {(one["pid"], one["name"].rpartition(":")[2]): one for one in slices(events, "served")}
    assert set(made) == {(0, "through_c"), (1, "double"), (0, "fail")}
    assert set(served) == {(1, "through_c"), (2, "double"), (2, "fail")}
    assert "ArithmeticError" in made[0, "fail"]["args"]["outcome"]
    outer, inner = made[0, "through_c"], served[2, "double"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1000.0
    for arrow, pairs in (("call", {(0, 1), (1, 2), (0, 2)}), ("reply", {(1, 0), (2, 1), (2, 0)})):
        begins = {event["id"]: event for event in events if event["ph"] == "s" and event["cat"] == arrow}
        ends = {event["id"]: event for event in events if event["ph"] == "f" and event["cat"] == arrow}
        assert len(begins) == 3 and begins.keys() == ends.keys()
        assert {(begins[id]["pid"], ends[id]["pid"]) for id in begins} == pairs


def test_a_call_that_was_answered_is_noted(no_agent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    goes_on = threading.Event()
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        calls = cluster.run("b", current_agent).dispatcher.calls
        remove = calls.remove

        def remove_late(active: ActiveCall, *outcome: str) -> None:
            if active.what.endswith("double"):
                assert goes_on.wait(CALL_LIMIT_S)
            remove(active, *outcome)

        monkeypatch.setattr(calls, "remove", remove_late)
        with rpcdist.trace(path):
            rpc.rpc_sync("b", double, (1,))
            threading.Timer(0.3, goes_on.set).start()  # when the trace ends at "b"
    assert {one["name"].rpartition(":")[2] for one in slices(events_of(path), "served")} == {"double"}


def wait_for(seconds: float) -> None:
    time.sleep(seconds)  # stands for work of a function


def test_a_call_that_waits_for_a_thread_has_a_slice_for_that(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b", num_worker_threads=1, max_worker_threads=1) as cluster, cluster.use("a"):
        with rpcdist.trace(path):
            rpc.wait_all([rpc.rpc_async("b", wait_for, (0.2,)) for _ in range(2)])
    events = events_of(path)
    waited, late = (max(slices(events, kind), key=lambda one: float(one["dur"])) for kind in ("queued", "served"))
    assert (late["pid"], late["tid"], late["ts"]) == (waited["pid"], waited["tid"], waited["ts"])
    assert 50_000 < waited["dur"] < late["dur"]


class Slow:
    def work(self) -> None:
        time.sleep(0.2)


def test_a_call_that_waits_for_its_turn_at_an_actor_has_a_slice_for_that(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        actor = rpc.remote("b", Slow, serial=True)
        actor._get_future().wait()  # else its creation may be in the trace
        with rpcdist.trace(path):
            rpc.wait_all([actor.rpc_async().work() for _ in range(2)])
    events = events_of(path)
    assert max(one["dur"] for one in slices(events, "queued")) > 50_000
    assert {one["name"] for one in slices(events, "served")} == {"Slow.work"}
    assert "the method work()" in {one["name"] for one in slices(events, "made")}


def test_the_actions_of_pipeline_stages_are_in_it(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], ["a", "b"], num_microbatches=2, loss_fn=mse_loss)
        with rpcdist.trace(path):
            pipeline.step(torch.ones(4, 2), torch.zeros(4, 2))
    found = {(one["pid"], one["name"].partition(" ")[0]) for one in slices(events_of(path), "pipeline")}
    assert found == {(stage, f"{stage}{kind}{number}") for stage in range(2) for kind in "FB" for number in range(2)}


def work_of(worker: str) -> None:
    time.sleep(0.5 if worker == "c" else 0.0)  # the work of the slow one


def test_a_slow_worker_among_four_is_named(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster(*"abcd") as cluster, cluster.use("a"), rpcdist.trace(path):
        for _ in range(3):
            for future in [rpc.rpc_async(name, work_of, (name,)) for name in "bcd"]:
                future.wait()
    events = events_of(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    took = dict.fromkeys(names, 0.0)
    for one in slices(events, "served"):
        took[one["pid"]] += one["dur"]
    slowest, next_to_it = sorted(took, key=lambda pid: -took[pid])[:2]
    assert names[slowest].partition(",")[0] == "c" and took[slowest] > 2 * took[next_to_it]


def weighted(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def test_backward_passes_are_in_it(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b") as cluster, cluster.use("a"), rpcdist.trace(path):
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("b", weighted, (torch.ones(2, requires_grad=True),)).sum()])
    events = events_of(path)
    found = slices(events, "backward")
    assert {"analysis", "run"} <= {one["name"] for one in found}
    sent = [one for one in found if one["name"] == "sends gradients"]
    assert {(one["pid"], one["args"]["receiver"]) for one in sent} == {(0, 1), (1, 0)}
    taken = [one for one in found if one["name"] == "takes gradients"]
    begins = {event["id"]: event for event in events if event["ph"] == "s" and event["cat"] == "hop"}
    ends = {event["id"]: event for event in events if event["ph"] == "f" and event["cat"] == "hop"}
    assert begins.keys() == ends.keys() and len(begins) == len(sent) == len(taken) >= 2
    assert all(begins[id]["pid"] != ends[id]["pid"] and begins[id]["ts"] <= ends[id]["ts"] for id in begins)
    for arrow in (*begins.values(), *ends.values()):  # Perfetto draws an arrow only between slices
        assert any(one["tid"] == arrow["tid"] and one["ts"] == arrow["ts"] for one in (*sent, *taken))


def count_slowly(items: int) -> Iterator[int]:
    for item in range(items):
        time.sleep(0.02)  # stands for the work of an item
        yield item


@pytest.mark.parametrize("is_read_to_its_end", [True, False])
def test_a_stream_has_a_slice_until_it_is_read(no_agent: None, tmp_path: Path, is_read_to_its_end: bool) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b") as cluster, cluster.use("a"), rpcdist.trace(path):
        before = time.monotonic()
        with rpc.rpc_sync("b", count_slowly, (3,)) as stream:
            assert next(stream) == 0
            first = last = time.monotonic()
            if is_read_to_its_end:
                for _ in stream:
                    last = time.monotonic()
        after = time.monotonic()
    [read] = slices(events_of(path), "streams")
    assert read["name"].endswith("count_slowly from b") and read["pid"] == 0
    assert (last - first) * 1e6 - 1 <= read["dur"] <= (after - before) * 1e6 + 1
    assert (last > first) is is_read_to_its_end


def test_a_call_is_queued_then_running_then_replying(no_agent: None) -> None:
    """By clocks that differ by 100 s: the end at the callee begins the reply's way at the caller."""
    made = tracing.Notes("a", 0, [(1, 1, "f", 10.0, 10.5, "ok", 0.0)], [], [])
    served = tracing.Notes("b", 1, [], [(1, 0, "f", 110.1, 110.4, "ok", 110.2)], [], offset_s=-100.0)
    events = list(tracing.trace_events([made, served]))
    parts = {one["name"]: (one["pid"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"}
    assert parts["queued"] == (1, 100_000.0, 100_000.0) and parts["running"] == (1, 200_000.0, 200_000.0)
    assert parts["replying"] == (0, 400_000.0, 100_000.0)


def test_the_buckets_of_data_parallel_training_are_in_it(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    collectives.init_process_group("tcp", store=collectives.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        with InProcessCluster("a", "b") as cluster, cluster.use("a"):
            with rpcdist.trace(path):
                model(torch.ones(1, 2)).sum().backward()
                with cluster.use("b"):
                    model(torch.ones(1, 2)).sum().backward()
            model(torch.ones(1, 2)).sum().backward()
    finally:
        collectives.destroy_process_group()
    found = {(one["pid"], one["name"]) for one in slices(events_of(path), "DDP buckets")}
    assert found == {(0, "bucket 0, 24 B"), (1, "bucket 0, 24 B")}


def test_the_oldest_calls_are_left_out_and_that_is_said(
    no_agent: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b") as cluster, cluster.use("a"), caplog.at_level(logging.WARNING):
        with rpcdist.trace(path, max_calls=10):
            for number in range(50):
                rpc.rpc_sync("b", double, (number,))
    assert len(slices(events_of(path), "made")) <= 10
    assert "lacks the" in caplog.text and "max_calls is 10" in caplog.text


def test_the_file_is_written_when_the_block_raises(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        with pytest.raises(ArithmeticError), rpcdist.trace(path):
            rpc.rpc_sync("b", double, (1,))
            raise ArithmeticError("in the block")
        assert len(slices(events_of(path), "made")) == 1
        with rpcdist.trace(path), rpcdist.trace(tmp_path / "second.json"):
            rpc.rpc_sync("b", double, (1,))
        assert len(slices(events_of(path), "made")) == len(slices(events_of(tmp_path / "second.json"), "made")) == 1


@pytest.mark.parametrize("max_calls", [0, -1, 1_000_001, True, 1.5, "all"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, max_calls: Any) -> None:
    with pytest.raises(ConfigError, match="1 to 1,000,000"), rpcdist.trace(tmp_path / "t.json", max_calls=max_calls):
        pass


def test_a_file_that_cannot_be_written_is_refused_at_once(no_agent: None, tmp_path: Path) -> None:
    with InProcessCluster("a") as cluster, cluster.use("a"):
        with pytest.raises(ConfigError, match="cannot be written"), rpcdist.trace(tmp_path / "none" / "trace.json"):
            pass


def test_a_full_disk_is_named_with_the_file(no_agent: None) -> None:
    with InProcessCluster("a") as cluster, cluster.use("a"):
        with pytest.raises(ConfigError, match=r"the trace /dev/full is not complete: .*No space left"):
            with rpcdist.trace("/dev/full"):
                pass


def test_a_file_that_is_there_stays_if_there_is_no_trace(no_agent: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of yesterday")
    with pytest.raises(NotInitialized), rpcdist.trace(path):
        pass
    assert path.read_text() == "of yesterday"


def test_passes_are_those_of_the_worker_itself(no_agent: None, tmp_path: Path) -> None:
    """Several workers may live in one process."""
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b", "c") as cluster, cluster.use("a"), rpcdist.trace(path):
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("b", weighted, (torch.ones(2, requires_grad=True),)).sum()])
    assert {one["pid"] for one in slices(events_of(path), "backward")} == {0, 1}


def test_slices_that_overlap_have_lanes_of_their_own() -> None:
    rows = [(1, 1, "f", 1.0, 3.0, "ok", 0.0), (2, 1, "f", 2.0, 4.0, "ok", 0.0), (3, 1, "f", 3.0, 5.0, "ok", 0.0)]
    events = list(trace_events([Notes("a", 0, rows, (), [("backward", "run", 1.5, 2.0)])]))
    lanes = {event["args"]["call"]: event["tid"] for event in slices(events, "made")}
    assert lanes[1] == lanes[3] != lanes[2]
    [span] = slices(events, "backward")
    assert (span["ts"], span["dur"]) == (0.5e6, 0.5e6) and span["tid"] not in lanes.values()


def test_clocks_are_set() -> None:
    """The callee's clock is 100 s behind."""
    made = Notes("a", 0, [(7, 1, "f", 200.0, 203.0, "ok", 0.0)], (), ())
    served = Notes("b", 1, (), [(7, 0, "f", 101.0, 102.0, "ok", 0.0)], (), offset_s=100.0, error_s=0.001)
    events = list(trace_events([made, served]))
    assert [(one["ts"], one["dur"]) for one in slices(events, "made")] == [(0.0, 3e6)]
    assert [(one["ts"], one["dur"]) for one in slices(events, "served")] == [(1e6, 1e6)]
    assert any(
        event["args"]["name"] == "b, clock known to 1.00 ms" for event in events if event["name"] == "process_name"
    )


def test_a_call_that_one_end_has_no_notes_of_gets_no_arrow() -> None:
    """The caller or the callee is lost, or has left out its oldest calls."""
    row = (7, 1, "f", 1.0, 2.0, "ok", 0.0)
    for notes in (Notes("a", 0, [row], (), ()), Notes("b", 1, (), [(7, 0, "f", 1.0, 2.0, "ok", 0.0)], ())):
        events = list(trace_events([notes]))
        assert [event["name"] for event in events if event["ph"] == "X"] == ["f"]
        assert not [event for event in events if event["ph"] in "sf"]


def test_ten_thousand_calls_at_once_take_no_time_each_for_each() -> None:
    """A new lane for each, and then all lanes again, the first one first."""
    number = 10_000
    rows = [(id, 1, "f", id * 1e-6, 1.0 + id * 1e-6, "ok", 0.0) for id in range(number)]
    rows += [(number + id, 1, "f", 2.0 + id * 1e-6, 3.0, "ok", 0.0) for id in range(number)]
    lanes = {
        event["args"]["call"]: event["tid"]
        for event in slices(list(trace_events([Notes("a", 0, rows, (), ())])), "made")
    }
    assert [lanes[id] for id in range(2 * number)] == 2 * list(range(1, number + 1))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        "text",
        None,
        b"[]",
        b"[" * 100_000,
        b'["b",1,[[1,0]],[],[],0,0,0,[]]',
        b'["b",1,[[1,0,"f",NaN,1.0,"ok"]],[],[],0,0,0,[]]',
        b'["b",1,[],[[1,0,"f",1.0,1e999,"ok"]],[],0,0,0,[]]',
        b'["b",1,[],[],[["lane","name","1",2.0]],0,0,0,[]]',
        b'["b",1e999,[],[],[],0,0,0,[]]',
        b'["b",1,[],[],[["lane","name",1' + b"0" * 400 + b",2.0]],0,0,0,[]]",
        b'["b",1,[],[],[],0,0,0,[[1,0,true,1,NaN,1.0]]]',
        b'["b",1,[],[],[],0,0,0,[[1,0,true]]]',
    ],
)
def test_notes_that_cannot_be_read_leave_their_worker_out(
    no_agent: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    honest = tracing._end
    monkeypatch.setattr(tracing, "_end", lying_end)
    lies.update(b=answer, others=honest)
    path = tmp_path / "trace.json"
    with InProcessCluster("a", "b") as cluster, cluster.use("a"), caplog.at_level(logging.WARNING):
        with rpcdist.trace(path):
            rpc.rpc_sync("b", double, (1,))
    assert {event["pid"] for event in events_of(path)} == {0}
    assert "worker 'b' is not in the trace: the trace of a worker cannot be read" in caplog.text


lies: dict[str, Any] = {}


def lying_end(owner: str) -> Any:
    told = lies["others"](owner)
    return lies["b"] if current_agent().worker_name == "b" else told


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.export_to_opentelemetry(provider)
    yield exporter
    call_records.export(None)


async def through_c_async(x: int) -> int:
    return await rpc.rpc_async("c", double, (x,))


@pytest.mark.parametrize("function", [through_c, through_c_async])
def test_opentelemetry_gets_spans_that_are_children_of_each_other(
    no_agent: None, spans: InMemorySpanExporter, function: Callable[[int], object]
) -> None:
    with InProcessCluster("a", "b", "c") as cluster, cluster.use("a"):
        for _ in range(2):  # the name of a coroutine function is known the second time
            spans.clear()
            assert rpc.rpc_sync("b", function, (4,)) == 8
            eventually(lambda: len(spans.get_finished_spans()) == 4)
    found = {(one.name.rpartition(":")[2], one.kind): one for one in spans.get_finished_spans()}
    chain = [found[name, kind] for name in (function.__name__, "double") for kind in (SpanKind.CLIENT, SpanKind.SERVER)]
    assert chain[0].parent is None
    for parent, child in pairwise(chain):
        assert child.parent is not None and parent.context is not None and child.context is not None
        assert child.parent.span_id == parent.context.span_id
        assert child.context.trace_id == parent.context.trace_id
        times = parent.start_time, child.start_time, child.end_time, parent.end_time
        assert all(first is not None and second is not None and first <= second for first, second in pairwise(times))
    assert [one.attributes["rpcdist.peer"] for one in chain if one.attributes] == ["b", "a", "c", "b"]


def test_a_span_of_a_call_that_fails_says_so(no_agent: None, spans: InMemorySpanExporter) -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a"), pytest.raises(ArithmeticError):
        rpc.rpc_sync("b", fail)
    for one in spans.get_finished_spans():
        assert one.status.status_code is StatusCode.ERROR and one.attributes is not None
        assert one.attributes["error.type"] == "ArithmeticError"
    assert len(spans.get_finished_spans()) == 2


def spans_by_name(spans: InMemorySpanExporter) -> dict[tuple[str, SpanKind], ReadableSpan]:
    return {(one.name.rpartition(":")[2], one.kind): one for one in spans.get_finished_spans()}


def is_child(child: ReadableSpan, parent: ReadableSpan) -> bool:
    assert parent.context is not None and child.context is not None
    return (
        child.parent is not None
        and child.parent.span_id == parent.context.span_id
        and child.context.trace_id == parent.context.trace_id
    )


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_fetched_value_has_spans(no_agent: None, spans: InMemorySpanExporter, is_asynchronous: bool) -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        reference = rpc.remote("b", double, (4,))
        assert (rpc.wait_all([reference._get_future()]) and reference.to_here()) == 8
        spans.clear()
        if is_asynchronous:
            assert asyncio.run(awaited(reference)) == 8
        else:
            assert reference.to_here() == 8
        eventually(lambda: len(spans.get_finished_spans()) == 2)
    found = spans_by_name(spans)
    made, served = found["to_here()", SpanKind.CLIENT], found["fetch", SpanKind.SERVER]
    assert is_child(served, made) and made.attributes is not None
    assert made.attributes["rpc.method"] == "to_here()" and made.attributes["rpcdist.peer"] == "b"


async def awaited(reference: rpc.RRef[int]) -> int:
    return await reference


def test_remote_calls_and_proxies_have_spans(no_agent: None, spans: InMemorySpanExporter) -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        reference = rpc.remote("b", double, (4,))
        assert reference.to_here() == 8 and reference.rpc_sync().bit_length() == 4
        eventually(lambda: len(spans.get_finished_spans()) >= 6)
    found = spans_by_name(spans)
    assert is_child(found["double", SpanKind.SERVER], found["double", SpanKind.CLIENT])
    assert is_child(found["fetch", SpanKind.SERVER], found["to_here()", SpanKind.CLIENT])
    methods = [one for (name, _), one in found.items() if "bit_length" in name]
    assert len(methods) == 2 and (is_child(*methods) or is_child(*reversed(methods)))


def test_the_span_of_a_stream_lasts_until_it_is_read(no_agent: None, spans: InMemorySpanExporter) -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        stream = rpc.rpc_sync("b", count_slowly, (3,))
        assert next(stream) == 0 and ("count_slowly", SpanKind.CLIENT) not in spans_by_name(spans)
        assert list(stream) == [1, 2]
        eventually(lambda: ("count_slowly", SpanKind.SERVER) in spans_by_name(spans))
    found = spans_by_name(spans)
    assert is_child(found["count_slowly", SpanKind.SERVER], found["count_slowly", SpanKind.CLIENT])


def test_a_backward_pass_is_one_tree_of_spans_over_its_workers(no_agent: None, spans: InMemorySpanExporter) -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a"), autograd.context() as context_id:
        loss = rpc.rpc_sync("b", weighted, (torch.ones(2, requires_grad=True),)).sum()
        spans.clear()
        autograd.backward(context_id, [loss])
        eventually(lambda: [one.name for one in spans.get_finished_spans()].count("backward run") >= 2)
    found = spans.get_finished_spans()
    [whole] = [one for one in found if one.name == "backward"]
    parts = [one for one in found if one.name.startswith("backward ")]
    assert all(is_child(one, whole) for one in parts)
    peers = {one.attributes["rpcdist.peer"] for one in parts if one.name == "backward to" and one.attributes}
    assert peers == {"a", "b"}, "both workers have sent"


def test_collectives_buckets_and_stages_have_spans(no_agent: None, spans: InMemorySpanExporter) -> None:
    collectives.init_process_group("tcp", store=collectives.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
    finally:
        collectives.destroy_process_group()
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], ["a", "b"], num_microbatches=2, loss_fn=mse_loss)
        pipeline.step(torch.ones(4, 2), torch.zeros(4, 2))
    found = spans.get_finished_spans()
    names = {one.name for one in found}
    assert {"all_reduce", "DDP buckets", "pipeline"} <= names
    stages = [one for one in found if one.name == "pipeline"]
    assert len(stages) == 8
    served = {one.context.span_id for one in found if one.kind is SpanKind.SERVER and one.context is not None}
    assert all(one.parent is not None and one.parent.span_id in served for one in stages), "children of their calls"


def test_a_method_by_reference_has_a_span_under_the_name_of_its_class(
    no_agent: None, spans: InMemorySpanExporter
) -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a"):
        rpc.remote("b", Slow, serial=True).rpc_sync().work()
    assert {"Slow.work", "the method work()"} <= {one.name for one in spans.get_finished_spans()}


@pytest.mark.parametrize("header", ["", "00-zz", "x" * 10_000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_header_that_is_malformed_counts_as_none(spans: InMemorySpanExporter, header: str) -> None:
    assert call_records.exporter is not None
    span = call_records.exporter.begin_served(header)
    assert span.parent is None
    call_records.exporter.end(span, "f", "a", "ok")
