"""The watch: what one rank sees, all of them hear."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from rpcdist.collectives._group.state import GroupActions, GroupFailure, GroupState
from rpcdist.collectives._group.watch import (
    MAX_UNSENT_BYTES,
    MAX_VALUE_CHARS,
    Message,
    StateKeeper,
    Watch,
    WatchConnection,
    encoded,
)
from rpcdist.errors import CollectiveMismatch, CollectiveTimeout, RankLost
from rpcdist.transport import Node, acquire_node
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.shared_memory import Segment, SegmentError

LIMIT_S = 10.0
SIZE = 4
WORLD = (20, 21, 22, 23)


class Listener(StateKeeper):
    """An engine, as the watch sees it."""

    def __init__(self) -> None:
        super().__init__(GroupState("g", 0, WORLD))
        self.failures: queue.Queue[GroupFailure] = queue.Queue()
        self.departures: queue.Queue[tuple[int, int]] = queue.Queue()
        self.errors: list[str] = []
        self.place = (5, "is in all_reduce #5")

    def fail(self, failure: GroupFailure) -> None:
        self.failures.put(failure)

    def _handle(self, event: Callable[[], GroupActions]) -> None:
        raise AssertionError("its events go to the queues")

    def rank_left(self, rank: int, last_sequence: int, error: str = "") -> None:
        self.departures.put((rank, last_sequence))
        self.errors.append(error)

    def where(self) -> tuple[int, str]:
        return self.place


class Star:
    """Four ranks in one process, joined by socket pairs."""

    def __init__(self, node: Node) -> None:
        self.listeners = [Listener() for _ in range(SIZE)]
        self.watches = [Watch(node, rank, WORLD, "g", self.listeners[rank]) for rank in range(SIZE)]
        pairs = {rank: socket.socketpair() for rank in range(1, SIZE)}
        self.inner: dict[int, StreamSocket] = {rank: pair[0] for rank, pair in pairs.items()}
        self.outer = {rank: pair[1] for rank, pair in pairs.items()}
        self.watches[0].take_connections(self.inner)
        for rank, sock in self.outer.items():
            self.watches[rank].take_connections({0: sock})

    def failure(self, rank: int) -> GroupFailure:
        return self.listeners[rank].failures.get(timeout=LIMIT_S)

    async def leave(self, rank: int) -> None:
        """The end of its watch, on the loop."""
        await self.watches[rank]._close(9)

    def close(self) -> None:
        for watch in reversed(self.watches):
            watch.close(9)


@pytest.fixture
def node() -> Iterator[Node]:
    node = acquire_node()
    yield node
    node.release()


@pytest.fixture
def star(node: Node) -> Iterator[Star]:
    star = Star(node)
    yield star
    star.close()


@pytest.mark.parametrize("reporter", [0, 2])
def test_a_failure_reaches_every_other_rank(star: Star, reporter: int) -> None:
    failure = GroupFailure(CollectiveMismatch, "rank 20 called x, rank 22 called y", (0, 2))
    star.watches[reporter].report(failure)
    for rank in set(range(SIZE)) - {reporter}:
        assert star.failure(rank) == failure


def test_the_death_of_a_rank_reaches_the_others(star: Star) -> None:
    star.outer[2].shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that was killed
    for rank in (0, 1, 3):
        failure = star.failure(rank)
        assert (failure.kind, failure.ranks) == (RankLost, (2,))
        assert "rank 22 was lost" in failure.reason


def test_the_death_of_rank_0_reaches_all(star: Star, node: Node) -> None:
    async def die() -> None:
        for sock in star.inner.values():
            sock.shutdown(socket.SHUT_RDWR)

    node.run(die(), LIMIT_S)
    for rank in range(1, SIZE):
        failure = star.failure(rank)
        assert failure.ranks == (0,)
        assert "rank 20 was lost" in failure.reason


def test_rank_0_tells_of_a_death_also_when_it_leaves_at_once(star: Star, node: Node) -> None:
    """A message had told it, and its program ended: before the loop came to look at the watch's own connection."""

    async def die_and_leave() -> None:
        star.outer[1].shutdown(socket.SHUT_RDWR)
        await star.leave(0)

    node.run(die_and_leave(), LIMIT_S)
    for rank in (2, 3):
        failure = star.failure(rank)
        assert (failure.kind, failure.ranks) == (RankLost, (1,))
        assert failure.reason == "rank 21 was lost: its process ended"


class Speechless(RuntimeError):
    def __str__(self) -> str:
        raise SystemExit


def test_a_rank_that_leaves_with_an_error_tells_the_others(star: Star) -> None:
    for rank, error in ((2, ValueError("no \udcff" + 500 * "x")), (3, Speechless())):
        try:
            raise error
        except Exception:
            star.watches[rank].close(9)
        assert star.listeners[1].departures.get(timeout=LIMIT_S) == (rank, 9)
    told, consequence = star.listeners[1].errors
    assert told.startswith("ValueError: no \\udcffxxx") and len(told) < 400
    assert consequence == ""
    assert star.listeners[0].errors[1] == "Speechless: <str() of the exception failed: <class 'SystemExit'>>"


def test_a_rank_that_leaves_beside_rank_0_is_not_lost(star: Star, node: Node) -> None:
    """The end of its connection lies behind its farewell, which nobody has read yet."""

    async def leave() -> None:
        await star.leave(1)
        await star.leave(0)

    node.run(leave(), LIMIT_S)
    for rank in (2, 3):
        departures = {star.listeners[rank].departures.get(timeout=LIMIT_S) for _ in range(2)}
        assert departures == {(0, 9), (1, 9)}
        assert star.listeners[rank].failures.empty()


@pytest.mark.parametrize("leaver", [0, 3])
def test_a_rank_that_leaves_is_not_lost(star: Star, leaver: int) -> None:
    star.watches[leaver].close(7)
    for rank in set(range(SIZE)) - {leaver}:
        assert star.listeners[rank].departures.get(timeout=LIMIT_S) == (leaver, 7)
    assert all(listener.failures.empty() for listener in star.listeners)


@pytest.mark.parametrize("reporter", [0, 1])
def test_a_timeout_names_who_did_not_arrive(star: Star, reporter: int) -> None:
    star.listeners[3].place = (4, "finished all_reduce #4 2.0 s ago and has called nothing since")
    assert star.watches[reporter].report_timeout("all_reduce #5 of group 'g'", 5)
    for rank in range(SIZE):
        failure = star.failure(rank)
        assert (failure.kind, failure.ranks) == (CollectiveTimeout, (3,))
        assert "rank 23 did not arrive: rank 23 finished all_reduce #4 2.0 s ago" in failure.reason


def test_several_ranks_that_time_out_ask_once(star: Star) -> None:
    star.listeners[2].place = (0, "has called nothing")
    for rank in (0, 1, 3):
        star.watches[rank].report_timeout("barrier #1 of group 'g'", 1)
    for rank in range(SIZE):
        assert star.failure(rank).ranks == (2,)
        assert star.listeners[rank].failures.empty()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\x02[]",
        b"\0\0\0\x01{",
        b'\0\0\0\x0f{"say": "what"}',
        b'\0\0\0\x12{"say": "failure"}',
    ],
)
def test_garbage_ends_the_connection_and_is_named(star: Star, garbage: bytes) -> None:
    star.outer[1].send(garbage)
    failure = star.failure(2)
    assert failure.ranks == (1,)
    assert "rank 21 was lost" in failure.reason


@pytest.mark.parametrize(
    ("rank", "messages"),
    [
        (1, [{"say": "value", "number": 1, "value": "of a later exchange"}]),
        (1, [{"say": "value", "number": 0, "value": 7}]),
        (1, [{"say": "value", "number": 0, "value": "twice"}] * 2),
        (1, [{"say": "value", "number": 0, "value": "\xe9" * (MAX_VALUE_CHARS + 1)}]),  # then rank 0 would look guilty
        (1, [{"say": "where", "question": 1}]),  # to whose answer the other ranks would object
        (0, [{"say": "values", "number": 0, "values": ["too", "few"]}]),
        (0, [{"say": "values", "number": 0, "values": ["no", "text", 3, "?"]}]),
        (0, [{"say": "values", "number": 0, "values": ["a", "b", "c", "d"]}] * 2),
        (0, [{"say": "value", "number": 0, "value": "not for this rank"}]),
    ],
)
def test_a_wrong_part_of_an_exchange_ends_the_connection(node: Node, rank: int, messages: list[Message]) -> None:
    """A rank that may speak in this group cannot bring more than one text, or answer what nobody asked."""
    listener, (inner, outer) = Listener(), socket.socketpair()
    own = Watch(node, 1 - rank, WORLD, "g", listener)
    own.take_connections({rank: inner})
    try:
        for message in messages:
            outer.sendall(encoded(message))
        failure = listener.failures.get(timeout=LIMIT_S)
        assert (failure.kind, failure.ranks) == (RankLost, (rank,)), failure
    finally:
        own.close(0)
        outer.close()


def test_rank_0_passes_its_memory_to_some_ranks(star: Star) -> None:
    with Segment.create(1 << 16) as segment:
        segment.map()[:5] = b"hello"
        star.watches[0].pass_memory(segment, [1, 3])
        for rank in (1, 3):
            received = star.watches[rank].memory.result(LIMIT_S)
            assert received is not None
            with received:
                assert received.map()[:5] == b"hello"
    star.watches[0].pass_memory(None, [2])
    assert star.watches[2].memory.result(LIMIT_S) is None
    assert all(listener.failures.empty() for listener in star.listeners)


@pytest.mark.parametrize("wanted", ["memory", "memory that cannot be made", "none"])
def test_memory_comes_with_the_texts_of_an_exchange(star: Star, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Segment:
        raise SegmentError("no memory today")

    if wanted == "memory that cannot be made":
        monkeypatch.setattr(Segment, "create", refuse)
    texts = [f"text {rank}" for rank in range(SIZE)]
    seen: list[list[str]] = []

    def memory_for(found: list[str]) -> int:
        seen.append(found)
        return 0 if wanted == "none" else 1 << 16

    answers = [star.watches[rank].exchange(texts[rank], memory_for) for rank in range(SIZE)]
    assert [answer.result(LIMIT_S) for answer in answers] == [texts] * SIZE
    assert seen == [texts]  # only rank 0 decides
    done = [watch.memory.done() for watch in star.watches]
    assert done == [wanted != "none"] * SIZE  # it never comes after the texts
    if wanted == "none":
        return
    found = [watch.memory.result() for watch in star.watches]
    if wanted == "memory that cannot be made":
        assert found == [None] * SIZE
        return
    maps = [segment.map() for segment in found if segment is not None]
    maps[0][:5] = b"hello"
    assert [each[:5] for each in maps] == [b"hello"] * SIZE
    for segment in found:
        if segment is not None:
            segment.close()


@pytest.mark.parametrize("event", ["failure", "departure"])
def test_an_exchange_that_cannot_end_is_interrupted(star: Star, event: str) -> None:
    waiting = [star.watches[rank].exchange("here") for rank in (0, 2)]
    if event == "failure":
        star.watches[1].report(GroupFailure(RankLost, "lost", (3,)))
    else:
        star.watches[1].close(0)
    for answer in waiting:
        with pytest.raises(CancelledError):
            answer.result(LIMIT_S)


def test_the_end_of_a_connection_that_takes_no_more_is_the_loss_of_a_rank(node: Node) -> None:
    """uvloop ended the process: the socket was closed while the loop waited until it could be written to."""
    listener, (inner, outer) = Listener(), socket.socketpair()
    inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    own = Watch(node, 1, WORLD, "g", listener)
    own.take_connections({0: inner})
    try:
        for _ in range(1000):
            own.report(GroupFailure(CollectiveMismatch, "rank 20 called x", (0,)))
        node.run(asyncio.sleep(0), LIMIT_S)  # after them
        outer.shutdown(socket.SHUT_WR)
        failure = listener.failures.get(timeout=LIMIT_S)
        assert (failure.kind, failure.ranks) == (RankLost, (0,))
    finally:
        own.close(0)
        outer.close()


@pytest.mark.parametrize("given", ["nothing", "a pipe", "twice"])
def test_memory_that_is_none(node: Node, given: str) -> None:
    listener, (inner, outer) = Listener(), socket.socketpair()
    own = Watch(node, 1, WORLD, "g", listener)
    own.take_connections({0: inner})
    reading, writing = os.pipe()
    try:
        message = encoded({"say": "memory", "size": 4096})
        if given == "nothing":
            outer.sendall(message)
        for _ in range({"nothing": 0, "a pipe": 1, "twice": 2}[given]):
            socket.send_fds(outer, [message], [reading])
        if given == "nothing":
            assert "no descriptor" in listener.failures.get(timeout=LIMIT_S).reason
            return
        with pytest.raises(SegmentError, match=r"not the offered one|not shared memory"):
            own.memory.result(LIMIT_S)
        if given == "twice":
            assert "does not know: 'memory'" in listener.failures.get(timeout=LIMIT_S).reason
    finally:
        own.close(0)
        outer.close()
        os.close(reading)
        os.close(writing)


def test_messages_that_wait_for_a_slow_reader_arrive_in_order(node: Node) -> None:
    inner, outer = socket.socketpair()
    texts = [str(number) * 3000 for number in range(60)]

    async def send_and_read() -> list[object]:
        writer, reader = WatchConnection(1, inner), WatchConnection(0, outer)
        inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for text in texts:
            writer.post(encoded({"say": text}))
        found = [(await reader.receive() or {}).get("say") for _ in texts]
        await writer.flush()
        writer.close()
        assert await reader.receive() is None
        reader.close()
        return found

    assert node.run(send_and_read(), LIMIT_S) == texts


def test_a_peer_that_does_not_read_is_cut_off(node: Node) -> None:
    """Rank 0 asked and read no answer: the answers filled the memory of the rank."""
    listener, (inner, outer) = Listener(), socket.socketpair()
    own = Watch(node, 1, WORLD, "g", listener)
    own.take_connections({0: inner})
    question = encoded({"say": "where", "question": "?" * 60_000})
    try:
        outer.settimeout(LIMIT_S)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(MAX_UNSENT_BYTES // len(question) + 100):
                outer.sendall(question)
        failure = listener.failures.get(timeout=LIMIT_S)
        assert failure.kind is RankLost and "rank 20 was lost: it has left 1" in failure.reason
        assert "bytes of the group's watch unread" in failure.reason
    finally:
        own.close(0)
        outer.close()


async def test_a_flood_on_a_watch_lets_others_have_turns() -> None:
    """The loop read nothing but this connection for as long as more came, so heartbeats of others were unread."""
    inner, outer = socket.socketpair()
    message, num_messages = encoded({"say": "x" * 1000}), 60
    outer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    outer.sendall(message * num_messages)
    connection = WatchConnection(0, inner)
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    try:
        for _ in range(num_messages):
            assert await connection.receive() is not None
        assert num_turns >= 5  # of 8 KiB, which are read at once
    finally:
        other.cancel()
        connection.close()
        outer.close()


def test_a_rank_leaves_once(star: Star) -> None:
    star.outer[2].sendmsg([encoded({"say": "left", "rank": 2, "sequence": number}) for number in range(7, 60)])
    star.outer[2].shutdown(socket.SHUT_WR)
    star.watches[3].report(GroupFailure(CollectiveMismatch, "the end", ()))
    assert star.listeners[0].departures.get(timeout=LIMIT_S) == (2, 7)
    for rank in (0, 1):
        assert star.failure(rank).reason == "the end"
    assert star.listeners[1].departures.get(timeout=LIMIT_S) == (2, 7)
    star.watches[0].close(9)  # what it has passed on comes before that
    assert star.listeners[1].departures.get(timeout=LIMIT_S) == (0, 9)


def test_the_reason_of_a_failure_can_be_printed(star: Star) -> None:
    star.watches[2].report(GroupFailure(CollectiveMismatch, "no file 'b\udce4r'", ()))
    for rank in (0, 1, 3):
        assert star.failure(rank).reason.encode() == b"no file 'b\\udce4r'"
