"""Where a process listens: ports within a range, and how many connections it takes there."""

from __future__ import annotations

import errno
import resource
import secrets
import socket
from contextlib import ExitStack

import pytest
from transport_nodes import (
    LIMIT_S,
    Nodes,
    Recorder,
    kind_of,
    open_link,
    tcp_port,
)

from rpcdist.errors import ConfigError, TransportError
from rpcdist.testing import eventually
from rpcdist.transport.addresses import ANY_PORT, PORTS_VARIABLE, PortRange, split_address


def free_ports(num: int) -> list[int]:
    """Neighbours that nobody listens at, of those that systems do not give to connections."""
    start = 12000 + secrets.randbelow(15000)
    for first in (*range(start, 30000, num), *range(12000, start, num)):
        with ExitStack() as held:
            try:
                for port in range(first, first + num):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return list(range(first, first + num))
    raise AssertionError("no free ports")


@pytest.mark.parametrize("text", ["", "x", "0", "5-4", "1-65536", "70000", "-1", "1-2-3", "29600..29700"])
def test_what_is_no_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"RPCDIST_PORTS must be a port or a range of ports such as '29600-29700'"):
        PortRange.of_text(text, PORTS_VARIABLE)


def test_the_option_counts_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORTS_VARIABLE, raising=False)
    assert PortRange.of_environment() == ANY_PORT
    monkeypatch.setenv(PORTS_VARIABLE, " 29600 - 29700 ")
    assert PortRange.of_environment() == PortRange(29600, 29700)
    assert PortRange.of_environment("29500") == PortRange(29500, 29500)


def test_errors_other_than_a_taken_port_are_not_tried_again() -> None:
    tried: list[int] = []

    def bind(port: int) -> int:
        tried.append(port)
        raise OSError(errno.EACCES, "not allowed")

    with pytest.raises(PermissionError):
        PortRange(80, 90).bind(bind)
    assert tried == [80]


def test_the_error_names_what_gives_a_longer_range_and_that_of_any_port_is_the_systems() -> None:
    def bind(port: int) -> int:
        raise OSError(errno.EADDRINUSE, "not this machine's address")

    with pytest.raises(OSError, match=r"all ports of 80-81 are in use. Set RPCDIST_HEALTH_PORT"):
        PortRange(80, 81).bind(bind, "RPCDIST_HEALTH_PORT")
    with pytest.raises(OSError, match="not this machine's address"):
        ANY_PORT.bind(bind)


def test_processes_of_a_host_share_a_range(nodes: Nodes) -> None:
    ports = free_ports(5)  # two for each node, and one that somebody else has
    with socket.create_server(("127.0.0.1", ports[1])):
        allowed = f"{ports[0]}-{ports[-1]}"
        servers = [nodes.make(f"server {i}", serve=True, ports=allowed) for i in range(2)]
        for server in servers:
            server.handle_role("echo", Recorder(echo=True))
        taken = {split_address(server.address or "")[1] for server in servers}
        taken |= {tcp_port(server) for server in servers}
        assert taken == set(ports) - {ports[1]}
        for server in servers:
            assert open_link(nodes.make("client"), server).peer == server.identity
        with pytest.raises(TransportError, match=f"all ports of {allowed} are in use"):
            nodes.make("late", serve=True, ports=allowed)


def test_the_raw_port_is_where_it_was_wanted(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "tcp")
    [port] = free_ports(1)
    server = nodes.make("server", ports=str(port))
    server.serve("127.0.0.1", free_ports(2)[1])
    server.handle_role("echo", Recorder(echo=True))
    assert tcp_port(server) == port
    assert kind_of(open_link(nodes.make("client"), server, handler=Recorder())) == "tcp"


def test_connections_beyond_the_bound_are_closed_and_leave_room(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger does not get all descriptors of the process; when his time is over, others come in."""
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))  # gRPC's part then is 256
    server = nodes.make("server", serve=True)
    server.handle_role("echo", Recorder(echo=True))
    assert server.address is not None
    with ExitStack() as held:
        strangers = [
            held.enter_context(socket.create_connection(split_address(server.address), LIMIT_S)) for _ in range(300)
        ]
        for stranger in strangers:
            stranger.setblocking(False)

        def num_closed() -> int:
            return sum(is_closed(stranger) for stranger in strangers)

        eventually(lambda: num_closed() >= 44, "those beyond the bound are closed")
    assert open_link(nodes.make("client"), server).peer == server.identity


def is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
