"""The TCP channel with TLS: sessions over it, what decides on it, and who tries to go around it."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress

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

from rpcdist._proto import handshake_pb2, rpc_pb2
from rpcdist.testing import eventually
from rpcdist.transport import Link, Node
from rpcdist.transport._server import admission
from rpcdist.transport._tls.tls_socket import TlsSocket
from rpcdist.transport.handshake import ClientHandshake


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RPCDIST_CHANNELS", "tcp")
    monkeypatch.setenv("RPCDIST_TLS", "always")
    made = Nodes()
    yield made
    made.close()


def serve(nodes: Nodes) -> Node:
    server = nodes.make("server", serve=True)
    server.handle_role("echo", Recorder(echo=True))
    return server


def is_encrypted(link: Link) -> bool:
    return kind_of(link) != "grpc" and isinstance(socket_of(link.session), TlsSocket)


def echo(link: Link, answers: Recorder, sizes: list[int]) -> None:
    already = len(answers.messages)
    sent = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    for number, data in enumerate(sent):
        link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=number)), [Memory(data)])
    answers.wait(already + len(sizes))
    got = dict(zip([message.id for message in answers.messages], answers.buffers, strict=True))
    assert [got[number] == [data] for number, data in enumerate(sent)] == [True] * len(sizes)


def test_sessions_are_encrypted(nodes: Nodes) -> None:
    server, answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers, expected=server.identity)
    assert is_encrypted(link) and link.peer == server.identity
    echo(link, answers, [0, 1, 1000, 16_384, 70_000, 1 << 20, 9 << 20, 3, 2 << 20, 7])
    link.session.close("that was all")
    eventually(lambda: not server.sessions)


def test_the_end_of_a_peer_is_seen(nodes: Nodes) -> None:
    server, answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    (session,) = eventually(lambda: server.sessions)  # the client is done first
    server.io.call_soon(socket_of(session).shutdown, socket.SHUT_RDWR)
    assert "broke" in answers.wait_closed() and is_encrypted(link)
    eventually(lambda: not server.sessions)


@pytest.mark.parametrize(("client_mode", "server_mode"), [("always", "auto"), ("auto", "always")])
def test_who_wants_tls_gets_it_or_goes_to_grpc(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, client_mode: str, server_mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On loopback "auto" needs none. Nobody can talk a side that wants TLS out of it."""
    monkeypatch.setenv("RPCDIST_TLS", server_mode)
    server, answers = serve(nodes), Recorder()
    monkeypatch.setenv("RPCDIST_TLS", client_mode)
    link = open_link(nodes.make("client"), server, handler=answers)
    assert kind_of(link) == ("tcp" if client_mode == "always" else "grpc")
    assert is_encrypted(link) == (client_mode == "always")
    told = [record.getMessage() for record in caplog.records if "connected without TLS" in record.getMessage()]
    assert len(told) == (client_mode == "auto")


# ---------------------------------------------------------------- strangers


def stranger(server: Node) -> socket.socket:
    return socket.create_connection(("127.0.0.1", tcp_port(server)), LIMIT_S)


def until_closed(connection: socket.socket) -> None:
    with suppress(ConnectionError):  # a reset, where the server left something unread
        while connection.recv(4096):
            pass


def test_a_plain_peer_with_the_token_is_refused(nodes: Nodes) -> None:
    server = serve(nodes)
    hello = (
        ClientHandshake(server.credentials.token, server.credentials.job, "echo", server.credentials.identity)
        .start()
        .SerializeToString()
    )
    with stranger(server) as plain:
        plain.sendall(len(hello).to_bytes(4, "little") + hello)
        size = int.from_bytes(plain.recv(4, socket.MSG_WAITALL), "little")
        reply = handshake_pb2.Handshake.FromString(plain.recv(size, socket.MSG_WAITALL))
        assert "connected without TLS" in reply.refusal.reason
        assert plain.recv(1) == b""
    assert not server.sessions


@pytest.mark.parametrize("greeting", [b"\x16", b"\x16\x03", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00", b""])
def test_a_silent_stranger_has_limited_time(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, greeting: bytes) -> None:
    server = serve(nodes)
    with monkeypatch.context() as patch:
        patch.setattr(admission, "HANDSHAKE_LIMIT_S", UNIT_S)
        with stranger(server) as silent:
            silent.sendall(greeting)
            until_closed(silent)
    eventually(lambda: server.strangers.unproven == 0)
    answers = Recorder()
    assert is_encrypted(open_link(nodes.make("client"), server, handler=answers))


@pytest.mark.parametrize(
    "greeting", [b"\x16", b"\x16\x03\x01\x00\x05hello" * 10, b"\x16\x03\x03\xff\xff" + bytes(70_000)]
)
def test_bytes_that_are_no_tls_end_the_connection(
    nodes: Nodes, greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(nodes)
    with stranger(server) as odd:
        with suppress(OSError):  # it is closed before all was sent
            odd.sendall(greeting)
            odd.shutdown(socket.SHUT_WR)
        until_closed(odd)
    eventually(lambda: server.strangers.unproven == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_stranger_without_a_certificate_is_told_so(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(nodes)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    with bare.wrap_socket(stranger(server)) as connection, pytest.raises(ssl.SSLError, match=r"(?i)alert"):
        connection.recv(1)
    eventually(lambda: server.strangers.unproven == 0)
    assert [record for record in caplog.records if "did not prove the job token" in record.getMessage()]
