"""Queries of workers from inside a job and from outside: their admission, their cost, and their answers."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from docs_programs import run_page
from inside_agents import current_agent
from rpc_cluster import Cluster

from rpcdist import rpc
from rpcdist._inspect.asking import Asker
from rpcdist._inspect.flight_report import text_of
from rpcdist._proto import inspection_pb2
from rpcdist.errors import AuthenticationFailed, BlockingInLoop, ConnectFailed, ProtocolViolation, RpcdistError
from rpcdist.inspection import MAX_FACTS_BYTES, MemberFacts, WorkerFacts, facts_to_json
from rpcdist.rpc import RpcOptions
from rpcdist.rpc._inspection import inspector as inspector_module
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.testing.limits import LIMIT_S
from rpcdist.time_limits import TICK_S
from rpcdist.transport import NodeOptions
from rpcdist.transport.node import Node
from rpcdist.transport.unix_sockets import local_addresses, process_at

released = threading.Event()


def wait_released() -> None:
    assert released.wait(LIMIT_S)


@pytest.fixture(autouse=True)
def _renew() -> None:
    released.clear()


@pytest.mark.multiproc
def test_the_page_is_right(cluster: Cluster) -> None:
    run_page("docs/inspection.md")


@pytest.mark.multiproc
@pytest.mark.parametrize("to", [1, 2, 3])
def test_a_worker_tells_on_every_channel(cluster: Cluster, to: int) -> None:
    name = cluster.names[to]
    payload = torch.ones(1 << 18)
    rpc.rpc_sync(name, torch.add, (payload, 1))
    kept = rpc.remote(name, torch.zeros, (3,))
    kept.to_here()
    eventually(  # an answer is given again for a while
        lambda: any(one.owner == name and one.value == "Tensor" for one in rpc.inspect_worker(name).references),
        "a look after the call",
    )
    facts = rpc.inspect_worker(name)
    assert (facts.worker, facts.id, facts.pid) == (name, to, cluster.pids()[name])
    [channel] = [one for one in facts.channels if one.peer == cluster.me and not one.opened_here]
    assert channel.kind == {1: "local", 2: "grpc", 3: "tcp"}[to]
    if channel.kind != "grpc":
        assert channel.bytes_sent and channel.bytes_received
    assert (channel.round_trip_s is not None) == (channel.kind == "tcp")
    [owned] = [one for one in facts.references if one.owner == name and one.value == "Tensor"]
    [holder] = owned.holders
    assert holder.worker == cluster.me and holder.for_s is not None and -1.0 < holder.for_s < LIMIT_S
    mine = rpc.inspect_worker()
    assert mine.job == facts.job
    assert {channel.session for channel in mine.channels} >= {channel.session}, "the two ends have one number"
    assert [member.name for member in facts.members] == list(cluster.names)
    assert facts.memory_bytes is not None and facts.memory_bytes > 20 << 20
    if channel.kind == "local":
        rpc.rpc_sync(name, torch.ones, ((4 << 20) + 1,))
        eventually(
            lambda: any(one.shared_sent > 16 << 20 for one in rpc.inspect_worker(name).channels),
            "the tensor counts as sent through shared memory",
        )


@pytest.mark.multiproc
def test_only_holders_of_the_token_may_ask(cluster: Cluster) -> None:
    address = cluster.agent.network.address
    stranger = Node(NodeOptions(token="another token of a stranger")).start_loop()
    try:
        with pytest.raises(AuthenticationFailed):
            stranger.run(stranger.connect(address, "inspection", 10.0, retry=False), 20.0)
    finally:
        stranger.release()


@pytest.mark.multiproc
def test_a_worker_that_is_asked_without_a_pause_takes_few_looks(cluster: Cluster) -> None:
    """An asker cannot have a worker collect facts of one kind more often than every `TICK_S`; there are three kinds."""
    taken = 0
    inspector = cluster.agent.inspector
    collect = inspector.facts

    def counted(**kind: bool) -> object:
        nonlocal taken
        taken += 1
        return collect(**kind)

    inspector.facts = counted
    asker = Node(NodeOptions()).start_loop()
    try:

        async def ask(count: int) -> None:
            link = await asker.connect(cluster.agent.network.address, "inspection", LIMIT_S, retry=False)
            for number in range(count):
                request = inspection_pb2.LookRequest(is_brief=number % 2 == 0, has_members=number % 4 < 2)
                await link.unary("Inspection", "Look", request, inspection_pb2.LookReply, LIMIT_S)
            await link.close()

        began = time.monotonic()
        asker.run(ask(200), LIMIT_S)
        assert taken <= 3 * (2 + (time.monotonic() - began) / TICK_S)
    finally:
        del inspector.facts
        asker.release()


@pytest.mark.multiproc
def test_only_workers_of_the_job_are_looked_at_from_outside(cluster: Cluster) -> None:
    async def look_at(address: str) -> inspection_pb2.NeighbourReply:
        request = inspection_pb2.NeighbourRequest(address=address)
        reply: inspection_pb2.NeighbourReply = await cluster.agent.inspector._on_neighbour(
            cluster.agent.identity, request
        )
        return reply

    io = cluster.agent.network.io
    for address in ("127.0.0.1:1", "", "\0", "x" * 1000):
        assert io.run(look_at(address), LIMIT_S).state == "unknown"


@pytest.mark.multiproc
@pytest.mark.parametrize("address", ["", "nonsense", "[::1:5", "127.0.0.1:99999999", "\0:1", "x" * 1000, "\ud800:1"])
def test_an_address_that_a_worker_made_up_hides_no_other_worker(cluster: Cluster, address: str) -> None:
    """The worker that is asked first names a member that has none, and a job that clears the screen."""
    inspector = cluster.agent.inspector
    honest = inspector.facts()
    made_up = MemberFacts(name="nobody", id=99, address=address)
    asker = Asker()
    try:
        inspector.facts = lambda: replace(honest, job="default/\x1b[2J", members=(*honest.members, made_up))
        inspector._answers.clear()  # an answer is given again for a while
        job = asker.job_at(cluster.agent.network.address)
    finally:
        del inspector.facts
        inspector._answers.clear()
        asker.close()
    assert {facts.worker for facts in job.workers} == set(cluster.names)
    [silent] = job.silent
    assert silent.worker == "nobody" and silent.state == "unknown"
    text = text_of(job, 1.0)
    assert "no answer from nobody" in text and "\x1b" not in text


@pytest.mark.multiproc
def test_the_process_behind_an_address_is_known_to_the_kernel(cluster: Cluster) -> None:
    addresses = {member.address: member.name for member in rpc.inspect_worker().members}
    assert process_at(cluster.agent.network.address) == os.getpid()
    found = {addresses[address]: process_at(address) for address in local_addresses() if address in addresses}
    assert found["worker1"] == cluster.pids()["worker1"]
    assert process_at("127.0.0.1:1") is None


@pytest.mark.multiproc
def test_another_worker_is_not_asked_on_an_event_loop(cluster: Cluster) -> None:
    async def ask() -> str:
        with pytest.raises(BlockingInLoop):
            rpc.inspect_worker("worker1")
        return (await asyncio.to_thread(rpc.inspect_worker, "worker1")).worker

    assert asyncio.run(ask()) == "worker1"


def test_nobody_serves_at_an_address() -> None:
    with Asker() as asker, pytest.raises(ConnectFailed):
        asker.job_at("127.0.0.1:1")


def test_answers_are_bounded() -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a") as agent:
        futures = [rpc.rpc_async("b", wait_released, timeout=0) for _ in range(700)]
        references = [rpc.remote("a", torch.zeros, (1,)) for _ in range(1500)]
        eventually(lambda: rpc.inspect_worker().num_made >= 2200, "all are made")
        facts = rpc.inspect_worker()
        assert len(facts.calls_made) == 500 and facts.omitted["calls_made"] >= 200
        assert len(facts.references) <= 1000 and facts.omitted["references"] > 0
        answer = agent.inspector._json()
        assert len(answer) <= 1 << 20 < MAX_FACTS_BYTES
        assert len(facts_to_json(facts)) > 10_000
        released.set()
        for future in futures:
            future.wait()
        del references


def test_an_old_call_is_logged_once_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rpcdist")
    with InProcessCluster("a", "b", log_calls_after=0.2) as cluster, cluster.use("a"):

        def logged() -> list[str]:
            return [record.getMessage() for record in caplog.records if "have not ended" in record.getMessage()]

        future = rpc.rpc_async("b", wait_released, timeout=0)
        eventually(lambda: len(logged()) == 2, "both workers have logged it")
        by_worker = {text.split(" on ")[1].split(" ")[0]: text for text in logged()}
        assert "rpc to 'b' of" in by_worker["a"] and "wait_released" in by_worker["a"]
        assert "in wait_released" in by_worker["b"]
        eventually(lambda: rpc.inspect_worker().calls_made[0].age_s > 2.5, "two more looks")
        assert len(logged()) == 2
        released.set()
        future.wait()


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_the_age_of_calls_that_are_logged_is_checked(limit: float) -> None:
    if limit == float("inf"):
        assert RpcOptions(log_calls_after=0).log_calls_after == 0
    else:
        with pytest.raises(ValueError, match="log_calls_after"):
            RpcOptions(log_calls_after=limit)


class Counting:
    def add(self) -> int:
        return 1


def test_a_method_that_waits_for_a_thread_is_named_as_one(no_agent: None) -> None:
    """Its name is among the arguments, which are not decoded yet: the name of our own function would tell nothing."""
    with InProcessCluster("a", "b", max_worker_threads=2) as cluster, cluster.use("a"):
        counting = rpc.remote("b", Counting)
        counting.to_here()
        running = [rpc.rpc_async("b", wait_released) for _ in range(2)]
        eventually(lambda: (pool := rpc.inspect_worker("b").pool) is not None and pool.running == 2)
        method = counting.rpc_async().add()
        eventually(lambda: len(rpc.inspect_worker("b").calls_served) == 3)
        facts = rpc.inspect_worker("b")
        assert [call.function for call in facts.calls_served if call.phase == "queued"] == [
            "a method (name not read yet)"
        ]
        released.set()
        assert method.wait() == 1
        for future in running:
            future.wait()
        agent: Any = cluster.run("b", current_agent)
        eventually(lambda: "Counting.add" in [call.function for call in agent.recorder], "it is noted after its answer")
        assert not any("_local_invoke" in call.function for call in agent.recorder)


def test_brief_facts_have_the_stack_of_the_main_thread_alone_where_nothing_takes_long(
    no_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InProcessCluster("a", "b") as cluster, cluster.use("a") as agent, ThreadPoolExecutor(1) as other:

        def brief() -> WorkerFacts:  # on another thread, as its own stack is left out
            facts: WorkerFacts = other.submit(agent.inspector._brief_facts, False).result(LIMIT_S)
            return facts

        monkeypatch.setattr(inspector_module, "LONG_WAIT_S", float("inf"))
        facts = brief()
        assert [thread.id for thread in facts.threads] == [threading.main_thread().ident] and not facts.members
        monkeypatch.setattr(inspector_module, "LONG_WAIT_S", 0.0)
        assert len(brief().threads) > 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ConnectFailed("host:1", "connection refused", 1.0), "(and no worker on its host can inspect the process)"),
        (ProtocolViolation("host:1 still joins its job"), "host:1 still joins its job"),
        (
            WorkerFacts("w2", 2, "1", "default/1", "", "host", 1, "host:2", 0, 9.0, "working"),
            "it answers as 'w2', and no worker speaks for another",
        ),
    ],
    ids=["silent", "joins", "under-another-name"],
)
def test_only_a_silent_worker_is_said_to_be_unseen(
    monkeypatch: pytest.MonkeyPatch, answer: RpcdistError | WorkerFacts, says: str
) -> None:
    async def ask(asker: Asker, address: str, answered: object) -> RpcdistError | WorkerFacts:
        return answer

    monkeypatch.setattr(Asker, "_ask", ask)
    with Asker() as asker:
        seen = asyncio.run(asker._ask_member(MemberFacts("w1", 1, "host:1"), []))
    assert seen is not None and seen.state == "unknown" and seen.detail.endswith(says)
