"""Sends and receives between messengers of one process: orders, tags, sources, sizes, threads."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from point_pairs import BIG, LIMIT_S, Mesh, engine_of, in_threads, irecv, isend, mesh, number, recv, send, state_of

from rpcdist.collectives._operations.operation import DTYPES
from rpcdist.collectives._transports.p2p import progress_engine
from rpcdist.collectives.work import Work


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with mesh(2, tcp=request.param == "tcp") as made:
        yield made


@pytest.fixture
def trio() -> Iterator[Mesh]:
    with mesh(3) as made:
        yield made


@pytest.mark.parametrize("size", [0, 1, 1000, 16385, 100_000, BIG])
@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_message_arrives(pair: Mesh, size: int, first: str) -> None:
    a, b = pair.members
    sent, got = torch.rand(size), torch.zeros(size)
    if first == "send":
        works = [isend(a, sent, 1), irecv(b, got, 0)]
    else:
        works = [irecv(b, got, 0), isend(a, sent, 1)]
    assert all(work.wait() for work in works)
    assert torch.equal(sent, got)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    with mesh() as made:
        a, b = made.members
        sent = torch.arange(48, dtype=torch.uint8).view(dtype) if dtype != torch.bool else torch.tensor([True, False])
        got = torch.zeros_like(sent)
        send(a, sent, 1)
        assert recv(b, got, 0).source_rank() == 0
        assert torch.equal(sent.view(torch.uint8), got.view(torch.uint8))


def test_zero_dimensions(pair: Mesh) -> None:
    a, b = pair.members
    got = torch.tensor(0.0)
    send(a, torch.tensor(7.0), 1)
    recv(b, got, 0)
    assert got == 7


def test_one_pair_and_tag_keeps_the_order(pair: Mesh) -> None:
    a, b = pair.members
    count = 300
    sends = [isend(a, number(index), 1, index % 3) for index in range(count)]
    for tag in (2, 0, 1):
        for index in range(tag, count, 3):
            got = number(-1)
            recv(b, got, 0, tag)
            assert got == index
    assert all(work.wait() for work in sends)


def test_posted_receives_are_filled_in_their_order(pair: Mesh) -> None:
    a, b = pair.members
    tensors = [number(-1) for _ in range(20)]
    receives = [irecv(b, tensor, 0) for tensor in tensors]
    for index in range(20):
        send(a, number(index), 1)
    assert all(work.wait() for work in receives)
    assert [int(tensor) for tensor in tensors] == list(range(20))


def test_a_later_tag_is_found_behind_more_than_the_buffer_holds(pair: Mesh) -> None:
    a, b = pair.members
    early, late = torch.rand(BIG), torch.rand(BIG)
    first, second = isend(a, early, 1, 1), isend(a, late, 1, 2)
    got = torch.zeros(BIG)
    recv(b, got, 0, 2)
    assert torch.equal(got, late)
    recv(b, got, 0, 1)
    assert torch.equal(got, early)
    assert first.wait() and second.wait()


def exchange(pair: Mesh) -> None:
    """Both ranks send before they receive."""

    def on(me: int) -> bool:
        member, sent, got = pair.members[me], torch.full((BIG,), float(me)), torch.zeros(BIG)
        works = [isend(member, sent, 1 - me), irecv(member, got, 1 - me)]
        return all(work.wait() for work in works) and bool((got == 1 - me).all())

    assert in_threads(lambda: on(0), lambda: on(1)) == [True, True]


def test_both_send_before_they_receive(pair: Mesh) -> None:
    exchange(pair)


def test_blocking_sends_to_each_other_pass_below_the_limit() -> None:
    with mesh(2, buffer_limit_bytes=BIG * 4) as made:

        def exchange(me: int) -> bool:
            member, got = made.members[me], torch.zeros(BIG)
            send(member, torch.full((BIG,), float(me)), 1 - me)
            recv(member, got, 1 - me)
            return bool((got == 1 - me).all())

        assert in_threads(lambda: exchange(0), lambda: exchange(1)) == [True, True]


def test_nothing_is_read_ahead_unless_a_send_is_stuck() -> None:
    with mesh(2) as made:
        a, b = made.members
        stuck = isend(a, torch.rand(BIG), 1)
        send(b, number(1), 0, 9)
        recv(a, number(0), 1, 9)
        assert not stuck.is_completed()
        assert state_of(b).matcher.num_messages == 0, "nobody asked for it"
        recv(b, torch.zeros(BIG), 0)
        assert stuck.wait()


def test_what_is_read_ahead_is_limited() -> None:
    limit, size = 1 << 20, 1 << 18
    with mesh(2, buffer_limit_bytes=limit) as made:
        a, b = made.members
        outwards = [isend(a, torch.zeros(size, dtype=torch.uint8), 1, index) for index in range(40)]
        stuck = isend(b, torch.rand(BIG), 0, 100)  # makes b read ahead
        recv(b, torch.zeros(size, dtype=torch.uint8), 0, 0)
        irecv(a, number(0), 1, 101)  # makes a read, until b's message is through
        assert stuck.wait()
        assert 0 < state_of(b).matcher.buffered_bytes(0) <= limit + size
        for index in range(1, 40):
            recv(b, torch.zeros(size, dtype=torch.uint8), 0, index)
        assert all(work.wait() for work in outwards)
        assert state_of(b).matcher.buffered_bytes(0) == 0
        send(b, number(0), 0, 101)


def test_any_source(trio: Mesh) -> None:
    a, b, c = trio.members
    got = number(0)
    waiting = irecv(a, got, None, 4)
    send(c, number(5), 0, 4)
    assert waiting.wait() and waiting.source_rank() == 2 and got == 5
    send(b, number(6), 0, 4)
    assert recv(a, got, None, 4).source_rank() == 1
    assert got == 6


def test_any_source_waits_for_connections_to_come(trio: Mesh) -> None:
    a, b, _ = trio.members
    got = number(0)
    started = threading.Event()

    def receive() -> int:
        started.set()
        return recv(a, got, None).source_rank()

    def later() -> None:
        started.wait(LIMIT_S)
        send(b, number(3), 0)

    assert in_threads(receive, later) == [1, None]


def test_any_source_counts_everything_once(trio: Mesh) -> None:
    count = 100

    def gather() -> list[int]:
        sources: list[int] = []
        for _ in range(2 * count):
            got = number(-1)
            source = recv(trio.members[0], got, None).source_rank()
            assert got == sources.count(source), "the order of one source"
            sources.append(source)
        return sources

    def scatter(rank: int) -> None:
        for index in range(count):
            send(trio.members[rank], number(index), 0)

    sources, *_ = in_threads(gather, lambda: scatter(1), lambda: scatter(2))
    assert isinstance(sources, list) and sources.count(1) == sources.count(2) == count


def test_finish_runs_before_the_work_is_done(pair: Mesh) -> None:
    a, b = pair.members
    got = number(0)
    seen: list[float] = []
    work = irecv(b, got, 0, finish=lambda: seen.append(float(got)))
    work.when_done(lambda _: seen.append(-1.0))
    send(a, number(8), 1)
    assert work.wait()
    assert seen == [8.0, -1.0]
    assert work.result()[0] is got


def test_what_finish_raises_is_raised(pair: Mesh) -> None:
    a, b = pair.members

    def finish() -> None:
        raise ArithmeticError("by finish")

    work = irecv(b, number(0), 0, finish=finish)
    send(a, number(8), 1)
    with pytest.raises(ArithmeticError, match="by finish"):
        work.wait()


def test_callbacks_may_send(pair: Mesh) -> None:
    a, b = pair.members
    answers: queue.SimpleQueue[Work] = queue.SimpleQueue()
    work = irecv(b, number(0), 0)
    work.when_done(lambda _: answers.put(isend(b, number(2), 0, 1)))
    send(a, number(1), 1)
    got = number(0)
    recv(a, got, 1, 1)
    assert got == 2 and answers.get(timeout=LIMIT_S).wait()


async def test_work_can_be_awaited() -> None:
    with mesh() as made:
        a, b = made.members
        sent, got = torch.rand(BIG), torch.zeros(BIG)
        works = [irecv(b, got, 0), isend(a, sent, 1)]
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*works)
        assert torch.equal(sent, got)


def test_several_threads_may_wait_for_one_work(pair: Mesh) -> None:
    a, b = pair.members
    work = irecv(b, number(0), 0)
    in_threads(work.wait, work.wait, lambda: work.wait(LIMIT_S), lambda: send(a, number(1), 1))


def test_many_threads_share_the_sockets() -> None:
    """Every thread has a tag of its own, and plays ping-pong with sizes that do and do not fit into the buffers."""
    with mesh(2) as made:

        def play(me: int, tag: int) -> None:
            member = made.members[me]
            for turn, size in enumerate((1, 100_000, 0, 5000, 300_000, 2)):
                sent, got = torch.full((size,), float(turn + tag)), torch.zeros(size)
                for act in range(2):
                    if act == me:
                        send(member, sent, 1 - me, tag)
                    else:
                        recv(member, got, 1 - me, tag)
                assert torch.equal(sent, got)

        players: list[Callable[[], None]] = []
        for tag in range(6):
            players += [lambda tag=tag: play(0, tag), lambda tag=tag: play(1, tag)]  # type: ignore[misc]
        in_threads(*players)


def test_blocking_and_asynchronous_calls_mixed_at_random() -> None:
    rng = random.Random(5)
    with mesh(3) as made:
        sizes = [rng.choice([0, 1, 1000, 200_000]) for _ in range(60)]

        def run(me: int) -> None:
            member = made.members[me]
            works: list[Work] = []
            checks: list[tuple[torch.Tensor, float]] = []
            for tag, size in enumerate(sizes):
                for peer in range(3):
                    works.append(isend(member, torch.full((size,), float(tag + me)), peer, tag))
                    got = torch.zeros(size)
                    checks.append((got, float(tag + peer)))
                    if tag % 4 == 3:
                        recv(member, got, peer, tag)
                    else:
                        works.append(irecv(member, got, peer, tag))
            assert all(work.wait() for work in works)
            assert all(bool((got == value).all()) for got, value in checks)

        in_threads(lambda: run(0), lambda: run(1), lambda: run(2))


def test_the_own_thread_starts_when_it_is_needed_and_sleeps(pair: Mesh) -> None:
    a, b = pair.members
    send(a, number(1), 1)
    recv(b, number(0), 0)
    assert engine_of(b).thread is None
    work = irecv(b, number(0), 0)
    send(a, number(1), 1)
    assert work.wait(LIMIT_S)
    thread = engine_of(b).thread
    assert thread is not None and thread.is_alive()


@pytest.fixture
def endless_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups' own threads leave messages alone until they are told that no thread will wait."""
    monkeypatch.setattr(progress_engine, "BATCH_DELAY_S", 10 * LIMIT_S)


@pytest.mark.usefixtures("endless_grace")
def test_the_own_thread_begins_at_once_for_futures_and_waits_with_a_limit(pair: Mesh) -> None:
    a, b = pair.members
    ways: list[Callable[[Work], object]] = [lambda work: work.wait(LIMIT_S), lambda work: work.get_future().wait()]
    for wait in ways:
        for _ in range(3):
            send(a, number(7), 1)  # threads that wait lead in between, so there is a new grace
            recv(b, number(0), 0)
            got = number(0)
            work = irecv(b, got, 0)
            in_threads(lambda: wait(work), lambda: send(a, number(8), 1))  # noqa: B023  # they end in this round
            assert got == 8


@pytest.mark.usefixtures("endless_grace")
async def test_the_own_thread_begins_at_once_for_an_event_loop() -> None:
    with mesh() as made:
        a, b = made.members
        sent, got = torch.rand(BIG), torch.zeros(BIG)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(irecv(b, got, 0), isend(a, sent, 1))
        assert torch.equal(sent, got)


@pytest.mark.usefixtures("endless_grace")
def test_threads_that_wait_need_no_other_thread(pair: Mesh) -> None:
    exchange(pair)


def test_tags_have_64_bits(pair: Mesh) -> None:
    a, b = pair.members
    for tag in (-(1 << 63), (1 << 63) - 1, -1):
        send(a, number(0), 1, tag)
        recv(b, number(0), 0, tag)


@pytest.mark.parametrize("through_futures", [False, True])
@pytest.mark.parametrize("size", [3, 200_000])
def test_callbacks_may_send_and_receive(pair: Mesh, size: int, through_futures: bool) -> None:
    """And wait, by the work itself or by its future: the thread that moves the messages goes on."""
    a, b = pair.members
    got = torch.zeros(size)
    first, second = irecv(b, torch.zeros(2), 0), irecv(b, torch.zeros(2), 0)

    def answers(_: object) -> float:
        if through_futures:
            torch.futures.collect_all([second.get_future()]).wait()
            isend(b, torch.ones(size), 0).get_future().wait()
            irecv(b, got, 0).get_future().then(lambda _: None).wait()
        else:
            second.wait()
            send(b, torch.ones(size), 0)
            recv(b, got, 0)
        return float(got.sum())

    future = first.get_future().then(answers)
    for _ in range(2):
        send(a, torch.zeros(2), 1)
    reply = torch.zeros(size)
    recv(a, reply, 1)
    send(a, reply * 2, 1)
    assert future.wait() == 2 * size
