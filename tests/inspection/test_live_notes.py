"""Log lines and spans for a live view, noted only while it asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from inside_agents import Agent, current_agent
from rpc_cluster import Cluster
from torch import nn
from torch.nn.functional import mse_loss

from rpcdist import autograd, collectives, rpc
from rpcdist._inspect.asking import Asker
from rpcdist._proto import inspection_pb2
from rpcdist.collectives.flight_recorder import Record
from rpcdist.errors import ProtocolViolation
from rpcdist.inspection import LiveNotes, facts_to_json, notes_from_json
from rpcdist.parallel import DistributedDataParallel
from rpcdist.parallel.pipeline import Pipeline
from rpcdist.profile_ranges import span_taps
from rpcdist.rpc._inspection import live_notes
from rpcdist.rpc._inspection.live_notes import NoteTaker
from rpcdist.testing import InProcessCluster
from rpcdist.testing.limits import LIMIT_S
from rpcdist.time_limits import LIVE_NOTES_S

logger = logging.getLogger("a.program")


@pytest.fixture
def operations() -> list[Record]:
    return []


@pytest.fixture
def taps() -> list[Callable[[int, Sequence[Any], Sequence[Any]], object]]:
    return []


@pytest.fixture
def taker(
    taps: list[Callable[[int, Sequence[Any], Sequence[Any]], object]], operations: list[Record]
) -> Iterator[NoteTaker]:
    made = NoteTaker(lambda: True, taps, lambda: operations)
    yield made
    made.stop()
    assert logging.getLogRecordFactory() is logging.LogRecord and not span_taps and not taps


def texts(notes: LiveNotes) -> list[str]:
    return [line.text for line in notes.log_lines]


def test_nothing_is_noted_before_the_first_question_and_after_the_last(taker: NoteTaker) -> None:
    logger.warning("before")
    assert logging.getLogRecordFactory() is logging.LogRecord and not span_taps
    assert taker.since(0) == LiveNotes()
    logger.warning("while %s", "asked")
    assert texts(taker.since(0)) == ["while asked"]
    taker.stop_if_unused(time.monotonic())
    logger.warning("still")
    taker.stop_if_unused(time.monotonic() + LIVE_NOTES_S + 1)
    assert logging.getLogRecordFactory() is logging.LogRecord and not span_taps
    logger.warning("after")
    assert taker.since(0) == LiveNotes()


def test_notes_come_once_and_in_their_order(taker: NoteTaker, operations: list[Record]) -> None:
    taker.since(0)
    logger.warning("first")
    now = time.monotonic()
    span_taps[0]("pipeline", "0F1 of step 3", now - 1, now)
    done, runs = Record("default", 1, "all_reduce"), Record("default", 2, "broadcast")
    for record in (done, runs):
        record.mark_started()
    done.end()
    operations += [done, runs]
    notes = taker.since(0)
    assert [(span.lane, span.name) for span in notes.spans] == [
        ("group default", "all_reduce"), ("pipeline", "0F1 of step 3")
    ]  # fmt: skip
    pipeline = notes.spans[1]
    assert abs(pipeline.ended_s - time.time()) < LIMIT_S and 0.9 < pipeline.ended_s - pipeline.began_s < 1.1
    assert taker.since(notes.last_number) == LiveNotes()
    logger.warning("second")
    runs.end()
    later = taker.since(notes.last_number)
    assert texts(later) == ["second"] and [span.name for span in later.spans] == ["broadcast"]
    text = facts_to_json(later)
    assert facts_to_json(notes_from_json(text)) == text


def test_no_more_than_so_many_notes_are_kept(taker: NoteTaker) -> None:
    taker.since(0)
    for number in range(2 * live_notes.MAX_SPANS):
        logger.warning("%d%s", number, "x" * 10_000)
        span_taps[0]("DDP", "x" * 10_000, 0.0, 0.0)
    notes = taker.since(0)
    assert len(notes.log_lines) == live_notes.MAX_LINES and len(notes.spans) == live_notes.MAX_SPANS
    assert notes.log_lines[-1].text.startswith(f"{2 * live_notes.MAX_SPANS - 1}x")
    assert max(map(len, texts(notes))) == live_notes.MAX_TEXT and len(notes.spans[0].name) == live_notes.MAX_NAME


def test_a_message_that_cannot_be_formatted_is_told_and_does_not_fail(taker: NoteTaker) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ZeroDivisionError

    taker.since(0)
    logger.propagate = False
    logger.addHandler(handler := logging.NullHandler())
    try:
        logger.warning(Broken())
        logger.warning("%d", "no number")
        try:
            raise LookupError("of the program")
        except LookupError:
            logger.exception("it failed")
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    shown = texts(taker.since(0))
    assert [text.partition(",")[0] for text in shown[:2]] == [
        f"a message that cannot be formatted, from {__file__}".partition(",")[0]
    ] * 2
    assert __file__ in shown[0] and shown[2] == "it failed: LookupError: of the program"


def test_a_factory_of_the_program_stays(taker: NoteTaker) -> None:
    """Both one that was there before, and one that the program puts around ours while somebody looks."""
    seen: list[str] = []

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = ours(*args, **kwargs)
        seen.append(record.getMessage())
        return record

    taker.since(0)
    ours = logging.getLogRecordFactory()
    logging.setLogRecordFactory(factory)
    try:
        logger.warning("one")
        assert texts(taker.since(0)) == ["one"]
        taker.stop()
        assert logging.getLogRecordFactory() is factory
        logger.warning("two")
        taker.since(0)
        logger.warning("three")
        assert seen == ["one", "two", "three"] and texts(taker.since(0)) == ["three"]
    finally:
        logging.setLogRecordFactory(ours)


def test_notes_that_are_none_are_refused() -> None:
    with pytest.raises(ProtocolViolation):
        notes_from_json('{"log_lines": [{"number": 1, "time_s": "now", "level": "", "logger": "", "text": ""}]}')
    with pytest.raises(ProtocolViolation):
        notes_from_json('{"spans": 1}')


# ---------------------------------------------------------------- of living workers


def notes_of(agent: Agent) -> LiveNotes:
    request = inspection_pb2.LookRequest(is_live=True)
    reply = agent.network.run(agent.inspector.methods["Look"](agent.identity, request), LIMIT_S)
    return notes_from_json(reply.notes)


def weighted(x: torch.Tensor) -> torch.Tensor:
    logging.getLogger("of.handlers").warning("called at %s", current_agent().worker_name)
    return x * 3


def test_each_worker_of_a_process_notes_its_own(no_agent: None) -> None:
    with InProcessCluster("a", "b") as cluster:
        agents = {name: cluster.run(name, current_agent) for name in "ab"}
        assert all(notes_of(agent) == LiveNotes() for agent in agents.values())
        with cluster.use("a"):
            pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], ["a", "b"], num_microbatches=2, loss_fn=mse_loss)
            pipeline.step(torch.ones(4, 2), torch.zeros(4, 2))
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("b", weighted, (torch.ones(2, requires_grad=True),)).sum()
                autograd.backward(context_id, [loss])
        notes = {name: notes_of(agent) for name, agent in agents.items()}
    for stage, name in enumerate("ab"):
        actions = {span.name for span in notes[name].spans if span.lane == "pipeline"}
        assert actions == {f"{stage}{kind}{number} of step 1" for kind in "FB" for number in range(2)}
    passes = [{span.name for span in notes[name].spans if span.lane == "backward"} for name in "ab"]
    assert all(any(text.startswith("run of pass ") for text in one) for one in passes)
    assert {text.rpartition(" ")[2] for text in passes[0] & passes[1]}, "a pass has one number everywhere"
    assert texts(notes["b"]) == ["called at b"] and not notes["a"].log_lines


def test_buckets_of_ddp_and_their_operations(no_agent: None) -> None:
    collectives.init_process_group("tcp", store=collectives.HashStore(), rank=0, world_size=1)
    try:
        with InProcessCluster("a") as cluster, cluster.use("a") as agent:
            model = DistributedDataParallel(nn.Linear(2, 2))
            notes_of(agent)
            model(torch.ones(1, 2)).sum().backward()
            found = [(span.lane, span.name) for span in notes_of(agent).spans]
    finally:
        collectives.destroy_process_group()
    assert {("DDP", "gradients 1"), ("DDP", "iteration 1"), ("DDP buckets", "bucket 0, 24 B")} <= set(found)
    assert ("group 0", "all_reduce") in found


def log(text: str) -> None:
    logger.warning(text)


@pytest.mark.multiproc
def test_a_live_view_pulls_the_lines_of_all_workers(cluster: Cluster) -> None:
    address = str(cluster.agent.network.address)

    def lines(asker: Asker) -> dict[str, list[str]]:
        return {
            facts.worker: [line.text for line in facts.notes.log_lines if line.logger == logger.name]
            for facts in asker.job_at(address).workers
        }

    with Asker(is_live=True) as live, Asker() as other:
        lines(live)
        for name in cluster.names[1:]:
            rpc.rpc_sync(name, log, (f"of {name}",))
        assert lines(other) == {name: [] for name in cluster.names}
        assert lines(live) == {name: [f"of {name}"] if name != cluster.me else [] for name in cluster.names}
        assert lines(live) == {name: [] for name in cluster.names}, "each line comes once"
    with Asker(is_live=True) as brief:  # one list of members is enough
        first, *others = brief.job_at(address).workers
        assert [member.name for member in first.members] == list(cluster.names)
        assert not any(facts.members for facts in others)
        assert len(brief.facts_at(address).threads) > 1, "a view of one worker has all"
    with Asker(is_live=True) as second:
        assert lines(second)[cluster.names[1]] == [f"of {cluster.names[1]}"], "another view gets all that is kept"
