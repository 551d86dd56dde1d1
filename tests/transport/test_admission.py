"""The cost of strangers before they prove anything: handshakes over pipes in memory, and crowds at a live server."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from transport_nodes import (
    LIMIT_S,
    TOKEN,
    UNIT_S,
    Memory,
    Nodes,
    Recorder,
    kind_of,
    open_link,
    server_of,
    tcp_port,
)

from rpcdist._proto import handshake_pb2 as pb
from rpcdist._proto import rpc_pb2
from rpcdist.errors import AuthenticationFailed, TransportError
from rpcdist.ids import Identity
from rpcdist.testing import eventually
from rpcdist.transport import Node
from rpcdist.transport._channels.grpc_channel import connect_grpc
from rpcdist.transport._channels.proving import prove_client
from rpcdist.transport._server import admission
from rpcdist.transport._server.admission import Admission, Origin
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake, ServerHandshake
from rpcdist.transport.handshake_side import refusal
from rpcdist.transport.keys import SESSION_PATH
from rpcdist.transport.unix_sockets import local_name

SECRET = TOKEN.encode()
ALICE, BOB = Identity("alice", 1, 11), Identity("bob", 0, 22)
HERE, THERE = Origin("10.0.0.1", "1"), Origin("10.0.0.2", "1")


class Pipe:
    """One end of a connection in memory."""

    def __init__(self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]) -> None:
        self.inbox = inbox
        self.outbox = outbox

    async def read(self) -> bytes | None:
        return await self.inbox.get()

    async def write(self, data: bytes) -> None:
        self.write_nowait(data)

    def write_nowait(self, data: bytes) -> None:
        self.outbox.put_nowait(data)

    @property
    def num_unread(self) -> int:
        return self.outbox.qsize()


class Visit:
    """A connection that a server admits, or not.

    Attributes:
        client: the other end of its pipe.
        told: why it was turned away.
        task: whether it was admitted.
    """

    def __init__(self, door: Admission, origin: Origin) -> None:
        there: asyncio.Queue[bytes | None] = asyncio.Queue()
        back: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.client = Pipe(back, there)
        self.told: list[pb.Refusal] = []
        handshake = ServerHandshake(Credentials(SECRET, "default", BOB))

        async def turn_away(reason: pb.Refusal) -> None:
            self.told.append(reason)

        self.task = asyncio.ensure_future(door.admit(Pipe(there, back), origin, handshake, turn_away))

    @property
    def codes(self) -> list[int]:
        return [reason.code for reason in self.told]

    async def prove(self) -> bool:
        await prove_client(self.client, ClientHandshake(SECRET, "default", "rpc", ALICE))
        return await self.task

    async def end(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def settle(visits: list[Visit]) -> None:
    """Lets the tasks run until all that were displaced have noticed."""
    done, _ = await asyncio.wait([visit.task for visit in visits], timeout=0)
    while len(done) < sum(bool(visit.told) for visit in visits) or not done:
        await asyncio.sleep(0)
        done, _ = await asyncio.wait([visit.task for visit in visits], timeout=0)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 8)


def run(scene: Callable[[Admission], Awaitable[None]]) -> Admission:
    door = Admission()

    async def play() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scene(door)

    asyncio.run(play())
    return door


def test_who_knows_the_token_is_admitted_and_leaves_its_place() -> None:
    async def scene(door: Admission) -> None:
        assert await Visit(door, HERE).prove()

    assert run(scene).num_unproven == 0


@pytest.mark.usefixtures("limits")
def test_a_host_has_half_of_the_places_and_its_oldest_makes_room() -> None:
    async def scene(door: Admission) -> None:
        crowd = [Visit(door, Origin(HERE.host, str(port))) for port in range(7)]
        await settle(crowd)
        assert [visit.codes for visit in crowd] == [[pb.Refusal.BUSY]] * 3 + [[]] * 4
        assert "try again" in crowd[0].told[0].reason
        assert door.num_unproven == 4
        assert await Visit(door, Origin(HERE.host, "8")).prove()  # a neighbour of theirs, among them
        assert await Visit(door, THERE).prove()
        for visit in crowd:
            await visit.end()

    assert run(scene).num_unproven == 0


@pytest.mark.usefixtures("limits")
def test_a_connection_of_many_streams_has_few_places_and_the_others_are_not_read() -> None:
    async def scene(door: Admission) -> None:
        streams = [Visit(door, HERE) for _ in range(admission.MAX_UNPROVEN_PER_CONNECTION + 1)]
        streams[-1].client.write_nowait(b"something large")
        await settle(streams)
        assert [visit.codes for visit in streams] == [[]] * admission.MAX_UNPROVEN_PER_CONNECTION + [[pb.Refusal.BUSY]]
        assert streams[-1].client.num_unread == 1
        for visit in streams:
            await visit.end()

    assert run(scene).num_unproven == 0


@pytest.mark.usefixtures("limits")
def test_of_many_hosts_the_one_with_the_most_makes_room() -> None:
    async def scene(door: Admission) -> None:
        visits = [Visit(door, Origin(host)) for host in ("a", "b", "c", "b", "b", "d", "e", "f")]
        await asyncio.sleep(0)
        newcomer = Visit(door, Origin("g"))
        await settle([*visits, newcomer])
        assert [visit.codes for visit in visits] == [[], [pb.Refusal.BUSY], [], [], [], [], [], []]
        assert door.num_unproven == 8 and await newcomer.prove()
        for visit in visits:
            await visit.end()

    assert run(scene).num_unproven == 0


def test_time_is_limited_even_for_those_who_keep_talking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_LIMIT_S", 0.05)

    async def scene(door: Admission) -> None:
        silent, half = Visit(door, HERE), Visit(door, THERE)
        await half.client.write(ClientHandshake(SECRET, "default", "rpc", ALICE).start().SerializeToString())
        assert not await silent.task and not await half.task
        assert silent.codes == half.codes == [pb.Refusal.UNSPECIFIED]
        assert "took longer than 0.05 s" in half.told[0].reason

    run(scene)


def test_a_stranger_who_does_not_listen_costs_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "QUICK_ANSWER_LIMIT_S", 0.05)

    async def scene(door: Admission) -> None:
        there: asyncio.Queue[bytes | None] = asyncio.Queue()
        there.put_nowait(b"\xff" * 10)
        handshake = ServerHandshake(Credentials(SECRET, "default", BOB))

        async def turn_away(reason: pb.Refusal) -> None:
            await asyncio.Event().wait()

        assert not await door.admit(Pipe(there, asyncio.Queue()), HERE, handshake, turn_away)

    assert run(scene).num_unproven == 0


def test_who_goes_away_is_forgotten_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(door: Admission) -> None:
        visit = Visit(door, HERE)
        visit.client.outbox.put_nowait(None)
        assert not await visit.task and not visit.told
        with pytest.raises(TransportError):
            visit.client.inbox.put_nowait(None)
            await prove_client(visit.client, ClientHandshake(SECRET, "default", "rpc", ALICE))

    run(scene)
    assert not caplog.records


async def test_who_is_displaced_before_it_speaks_reads_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries again only if it knows why; its first message found the connection closed, and it gave up."""
    pipe = Pipe(asyncio.Queue(), asyncio.Queue())
    pipe.inbox.put_nowait(refusal(pb.Refusal.BUSY, "too many handshakes").SerializeToString())

    async def broken(data: bytes) -> None:
        raise TransportError("the connection broke: Broken pipe")

    monkeypatch.setattr(pipe, "write", broken)
    handshake = ClientHandshake(SECRET, "default", "rpc", ALICE)
    with pytest.raises(AuthenticationFailed, match="too many handshakes"):
        await prove_client(pipe, handshake)
    assert handshake.refusal_code == pb.Refusal.BUSY


# ---------------------------------------------------------------- crowds at a live server


@pytest.fixture
def server(nodes: Nodes) -> Node:
    server = nodes.make("server", serve=True)
    server.handle_role("echo", Recorder(echo=True))
    return server


def works(client: Node, server: Node) -> str:
    answers = Recorder()
    link = open_link(client, server, handler=answers)
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1)), [Memory(b"x" * 100_000)])
    assert answers.wait()[0].id == 1
    client.run(link.close(), LIMIT_S)
    return kind_of(link)


KINDS = ["tcp", pytest.param("local", marks=pytest.mark.skipif(sys.platform != "linux", reason="no abstract sockets"))]


def silent_socket(server: Node, kind: str) -> socket.socket:
    assert server.address is not None
    if kind == "tcp":
        port = tcp_port(server)
        return socket.create_connection(("127.0.0.1", port), LIMIT_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(LIMIT_S)
    connection.connect("\0" + local_name(server.address))
    return connection


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_crowd_stops_nobody_and_is_bounded(
    nodes: Nodes, server: Node, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("RPCDIST_CHANNELS", kind)
    monkeypatch.setattr(admission, "HANDSHAKE_LIMIT_S", 10 * LIMIT_S)  # too many come before one takes too long
    client = nodes.make("client")
    with ExitStack() as stack:
        crowd = [stack.enter_context(silent_socket(server, kind)) for _ in range(admission.MAX_UNPROVEN)]
        eventually(lambda: server.strangers.unproven == admission.MAX_UNPROVEN // 2)
        for _ in range(3):
            assert works(client, server) == kind
        assert b"too many handshakes at once" in crowd[0].recv(4096)
    eventually(lambda: server.strangers.unproven == 0)
    assert sum("too many handshakes" in record.getMessage() for record in caplog.records) == 1


def test_silent_streams_of_one_connection_stop_nobody(
    nodes: Nodes, server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 of them once were enough to keep everybody out."""
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    monkeypatch.setattr(admission, "HANDSHAKE_LIMIT_S", 10 * LIMIT_S)  # too many come before one takes too long
    client, address = nodes.make("client"), server.address
    assert address is not None

    async def crowd() -> None:
        async with connect_grpc(address, client.credentials.tls.certificate()) as channel:
            calls: list[Any] = [channel.stream_stream(SESSION_PATH)() for _ in range(600)]
            assert await calls[-1].code() is grpc.StatusCode.UNAVAILABLE
            link = await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(client.connect(address, "echo", LIMIT_S), client.io.loop)
            )
            assert link.peer == server.identity
            for call in calls:
                call.cancel()

    asyncio.run(crowd())
    eventually(lambda: server.strangers.unproven == 0)


def test_a_server_with_too_much_to_do_is_asked_again(
    nodes: Nodes, server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshakes that come first are displaced, as in a flood; then it goes on."""
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    door, displaced = server_of(server)._admission, [0]
    admit = door.admit

    async def flooded(*arguments: object) -> bool:
        task = asyncio.ensure_future(admit(*arguments))  # type: ignore[arg-type]
        if displaced[0] < 3:
            displaced[0] += 1
            await asyncio.sleep(0)
            door._keep_below(1, lambda origin: True)
        return await task

    monkeypatch.setattr(door, "admit", flooded)
    assert works(nodes.make("client"), server) == "grpc" and displaced == [3]


def test_a_stranger_on_tcp_has_limited_time(server: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_LIMIT_S", UNIT_S)
    with silent_socket(server, "tcp") as silent, silent_socket(server, "tcp") as slow:
        slow.sendall(b"\x20")
        assert b"the handshake took longer than 0.4 s" in silent.recv(4096)
        assert b"the handshake took longer than 0.4 s" in slow.recv(4096)
        assert silent.recv(1) == b""
