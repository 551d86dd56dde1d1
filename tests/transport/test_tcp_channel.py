"""Sessions over TCP: when they are taken, and what happens where they cannot be."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from transport_nodes import (
    LIMIT_S,
    UNIT_S,
    Memory,
    Nodes,
    Recorder,
    kind_of,
    open_link,
    socket_of,
    tcp_port,
)

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ConnectFailed
from rpcdist.testing import eventually
from rpcdist.transport import Link, Node, connector
from rpcdist.transport._channels import socket_pipe, stream_sockets
from rpcdist.transport._channels.stream_sockets import (
    FAR_ROUND_TRIP,
    SHORTEST_AT,
    accepted_ends,
    connect_tcp,
    connected_ends,
    listen_tcp,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="there are no abstract sockets")


@pytest.fixture(autouse=True)
def channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "tcp")


def serve(nodes: Nodes, host: str = "127.0.0.1") -> Node:
    server = nodes.make("server")
    server.serve(host, 0)
    server.handle_role("echo", Recorder(echo=True))
    return server


def works(link: Link, answers: Recorder) -> str:
    """Sends something there and back; says over which channel."""
    already = len(answers.messages)
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1)), [Memory(b"x" * 3_000_000)])
    answers.wait(already + 1)
    assert answers.buffers[-1] == [b"x" * 3_000_000]
    return kind_of(link)


# ---------------------------------------------------------------- which channel


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_sessions_take_tcp_and_unary_calls_go_beside_them(nodes: Nodes, host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    server, answers = serve(nodes, host), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers, expected=server.identity)
    assert works(link, answers) == "tcp" and link.peer == server.identity
    assert len(server.sessions) == 1  # the handshake on gRPC left none behind
    eventually(lambda: server.strangers.unproven == 0)


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("choice", ["grpc", "local"])
def test_either_side_may_do_without_tcp(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, side: str, choice: str) -> None:
    with monkeypatch.context() as patch:
        if side == "server":
            patch.setenv("RPCDIST_CHANNELS", choice)
        server, answers = serve(nodes), Recorder()
    if side == "client":
        monkeypatch.setenv("RPCDIST_CHANNELS", choice)
    link = open_link(nodes.make("client"), server, handler=answers)
    assert works(link, answers) == "grpc"


@LINUX
def test_of_all_channels_the_local_one_comes_first(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "auto")
    server, answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    assert works(link, answers) == "local"


@LINUX
def test_where_the_local_channel_does_not_work_tcp_does(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As between containers that share a network and a user, and hide their processes from each other."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("RPCDIST_CHANNELS", "auto")
    server, answers = serve(nodes), Recorder()

    def as_seen_from_elsewhere(connection: socket.socket) -> str:
        ends = connected_ends(connection)
        return ends.replace(f"process {os.getpid()}", "process 0") if connection.family == socket.AF_UNIX else ends

    monkeypatch.setattr(socket_pipe, "connected_ends", as_seen_from_elsewhere)
    link = open_link(nodes.make("client"), server, handler=answers)
    assert works(link, answers) == "tcp"
    assert "no local channel" in caplog.text and "relays it or translates addresses" in caplog.text


# ---------------------------------------------------------------- where it cannot be


@contextmanager
def instead_of_the_tcp_port(server: Node, monkeypatch: pytest.MonkeyPatch, port: int) -> Iterator[None]:
    """The client gets there when it wants the server's TCP port."""

    async def connect(host: str, wanted: int) -> socket.socket:
        assert wanted == tcp_port(server)
        return await connect_tcp(host, port)

    with monkeypatch.context() as patch:
        patch.setattr(connector, "connect_tcp", connect)
        yield


def test_a_port_that_is_closed_leaves_grpc(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server, answers = serve(nodes), Recorder()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with instead_of_the_tcp_port(server, monkeypatch, bound.getsockname()[1]):
            link = open_link(nodes.make("client"), server, handler=answers)
    assert works(link, answers) == "grpc" and len(server.sessions) == 1
    assert f"no TCP channel to {server.address}, so gRPC is used" in caplog.text


def test_a_port_that_swallows_everything_leaves_grpc(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "SIDE_ATTEMPT_LIMIT_S", UNIT_S)
    server, answers = serve(nodes), Recorder()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        instead_of_the_tcp_port(server, monkeypatch, silent.getsockname()[1]),
    ):
        link = open_link(nodes.make("client"), server, handler=answers)
        assert works(link, answers) == "grpc"


def test_a_neighbour_at_the_port_leaves_grpc(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the job, but is not the one who was asked for; the caller had not even said whom it expects."""
    server, neighbour, answers = serve(nodes), serve(nodes), Recorder()
    with instead_of_the_tcp_port(server, monkeypatch, tcp_port(neighbour)):
        link = open_link(nodes.make("client"), server, handler=answers)
    assert works(link, answers) == "grpc" and link.peer == server.identity
    assert not neighbour.sessions


def test_nobody_at_the_address_is_no_matter_of_tcp(nodes: Nodes) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        client = nodes.make("client")
        with pytest.raises(ConnectFailed, match="refused"):
            client.run(client.connect(address, "echo", LIMIT_S, handler=Recorder(), retry=False), LIMIT_S)


def test_cancelling_leaves_nothing_open(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = serve(nodes), nodes.make("client")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        instead_of_the_tcp_port(server, monkeypatch, silent.getsockname()[1]),
    ):
        connecting = client.connect(server.address or "", "echo", LIMIT_S, handler=Recorder())
        connected = asyncio.run_coroutine_threadsafe(connecting, client.io.loop)
        silent.settimeout(LIMIT_S)
        with silent.accept()[0] as arrived:
            connected.cancel()
            arrived.settimeout(LIMIT_S)
            while arrived.recv(1 << 16):  # the hello, and then the end
                pass
    eventually(lambda: server.strangers.unproven == 0)
    assert not client.links and not server.sessions


# ---------------------------------------------------------------- the end


def test_a_channel_that_breaks_ends_its_session_and_the_next_one_works(nodes: Nodes) -> None:
    server, client, answers = serve(nodes), nodes.make("client"), Recorder()
    link = open_link(client, server, handler=answers)
    assert works(link, answers) == "tcp"
    socket_of(link.session).shutdown(socket.SHUT_RDWR)
    assert "broke" in answers.wait_closed()
    again = Recorder()
    assert works(open_link(client, server, handler=again), again) == "tcp"


def test_the_last_word_arrives(nodes: Nodes) -> None:
    server, answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    assert works(link, answers) == "tcp"
    nodes.stop(server)
    assert "the peer shut down" in answers.wait_closed()


def test_both_sides_name_the_same_two_ends() -> None:
    pairs = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))
    if hasattr(socket, "AF_UNIX") and sys.platform == "linux":
        pairs.append(socket.socketpair())
    for client, server in pairs:
        with client, server:
            assert connected_ends(client) == accepted_ends(server)


# ---------------------------------------------------------------- BBR's pacing, which only far peers get

CUBIC, BBR = b"cubic", b"bbr"


class FakeConnection:
    """A TCP connection with a round trip and a congestion control, on a system with a default."""

    family = socket.AF_INET

    def __init__(self, control: bytes, trip_s: float | None) -> None:
        self.control = control
        self.trip_s = trip_s

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert level == socket.IPPROTO_TCP
        if option == socket.TCP_CONGESTION:
            return self.control.ljust(size, b"\0")
        assert option == socket.TCP_INFO and size == SHORTEST_AT + 4
        if self.trip_s is None:
            raise OSError("closed")
        return bytes(SHORTEST_AT) + struct.pack("=I", round(self.trip_s * 1e6))

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.control = value

    def __enter__(self) -> FakeConnection:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize(
    ("of_system", "control", "trip_s", "expected"),
    [
        (BBR, CUBIC, FAR_ROUND_TRIP, BBR),
        (BBR, CUBIC, FAR_ROUND_TRIP / 2, CUBIC),
        (BBR, CUBIC, None, CUBIC),
        (CUBIC, CUBIC, FAR_ROUND_TRIP, CUBIC),
        (b"dctcp", b"dctcp", FAR_ROUND_TRIP, b"dctcp"),
    ],
)
def test_only_a_far_peer_gets_bbr(
    monkeypatch: pytest.MonkeyPatch, of_system: bytes, control: bytes, trip_s: float | None, expected: bytes
) -> None:
    monkeypatch.setattr(socket, "socket", lambda *form: FakeConnection(of_system, None))
    connection = FakeConnection(control, trip_s)
    stream_sockets.pace_if_far(connection)  # type: ignore[arg-type]
    assert connection.control == expected


def control_of(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_near_ends_use_the_control_of_the_system_except_bbr() -> None:
    with socket.socket() as fresh:
        of_system = control_of(fresh)
    listener = listen_tcp("127.0.0.1")
    with listener:
        client = asyncio.run(connect_tcp("127.0.0.1", listener.getsockname()[1]))
        server, _ = listener.accept()
        with client, server:
            for end in (client, server):
                stream_sockets.pace_if_far(end)
                assert control_of(end) == (CUBIC if of_system == BBR and has_cubic() else of_system)


def has_cubic() -> bool:
    """Whether the system has cubic and lets this user choose it."""
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CUBIC)
        except OSError:
            return False
        return True
