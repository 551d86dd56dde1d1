"""The plain port for health probes: it answers while the process serves, and gives strangers nothing else."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
from transport_nodes import (
    LIMIT_S,
    Nodes,
    server_of,
)

from rpcdist.errors import ConfigError, TransportError
from rpcdist.transport import Node
from rpcdist.transport._server import health_port

PROBE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def server(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("RPCDIST_HEALTH_PORT", "15000-29000")
    return nodes.make("server", serve=True)


def port_of(server: Node) -> tuple[str, int]:
    return "127.0.0.1", server_of(server).health.port


def asked(place: tuple[str, int], request: bytes) -> bytes:
    """All of the answer; the server closes the connection."""
    with socket.create_connection(place, LIMIT_S) as probe:
        probe.sendall(request)
        return received(probe)


def received(probe: socket.socket) -> bytes:
    got = b""
    try:
        while more := probe.recv(4096):
            got += more
    except ConnectionResetError:  # closed with bytes of ours unread
        pass
    return got


def test_probes_are_answered_while_the_process_serves(nodes: Nodes, server: Node) -> None:
    place = port_of(server)
    assert asked(place, PROBE).startswith(b"HTTP/1.1 200 OK\r\n") and asked(place, PROBE).endswith(b"\r\n\r\nserving\n")
    assert asked(place, PROBE.replace(b"GET", b"HEAD")).endswith(b"Content-Length: 8\r\nConnection: close\r\n\r\n")
    nodes.stop(server)
    with pytest.raises(ConnectionRefusedError):
        asked(place, PROBE)


def test_it_is_closed_unless_it_is_wanted(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RPCDIST_HEALTH_PORT", raising=False)
    assert server_of(nodes.make("server", serve=True)).health.port == 0


@pytest.mark.parametrize(
    ("request_", "start"),
    [
        (b"POST /rpcdist.Rpc/Session HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 "),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.1 400 "),
        (b"\r\n\r\n", b"HTTP/1.1 400 "),
        (bytes(1 << 20), b""),
        (b"GET / HTTP/1.1\r\n" + b"x" * 100_000 + b"\r\n\r\n", b""),
    ],
)
def test_other_requests_get_nothing(server: Node, request_: bytes, start: bytes) -> None:
    place = port_of(server)
    with socket.create_connection(place, LIMIT_S) as stranger:
        try:
            stranger.sendall(request_)
        except ConnectionError:
            pass  # closed before all of it was taken
        assert received(stranger).startswith(start) if start else received(stranger) == b""
    assert asked(place, PROBE).endswith(b"serving\n")


def test_silent_connections_are_few_and_end(server: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: the node stops while some are open, which the fixture does."""
    place = port_of(server)
    with ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(place, LIMIT_S)) for _ in range(20)]
        assert all(received(stranger) == b"" for stranger in silent[16:])  # turned away at once
    with monkeypatch.context() as patch:
        patch.setattr(health_port, "ATTEMPT_LIMIT_S", 0.1)
        with socket.create_connection(place, LIMIT_S) as stranger:
            assert received(stranger) == b""
    held_open = socket.create_connection(place, LIMIT_S)
    with held_open:
        assert asked(place, PROBE).endswith(b"serving\n")


def test_a_process_stops_while_a_probe_is_open(nodes: Nodes, server: Node) -> None:
    with socket.create_connection(port_of(server), LIMIT_S) as silent:
        assert asked(port_of(server), PROBE)
        nodes.stop(server)
        assert received(silent) == b""


def test_a_taken_port_and_a_wrong_one_are_refused_by_name(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("RPCDIST_HEALTH_PORT", str(other.getsockname()[1]))
        with pytest.raises(TransportError, match=r"for health probes.*RPCDIST_HEALTH_PORT to a range"):
            nodes.make("server", serve=True)
    monkeypatch.setenv("RPCDIST_HEALTH_PORT", "http")
    with pytest.raises(ConfigError, match="RPCDIST_HEALTH_PORT must be a port or a range"):
        nodes.make("server", serve=True)
