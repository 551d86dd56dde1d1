"""Addresses, and which one to listen on."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_shortages import no_free_descriptor

from rpcdist.errors import ConfigError, TransportError
from rpcdist.transport.addresses import (
    host_from_environment,
    is_loopback,
    join_address,
    pick_bind_host,
    split_address,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("localhost:80", ("localhost", 80)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
        ("node-7.cluster:29500", ("node-7.cluster", 29500)),
    ],
)
def test_addresses_split_and_join(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts
    assert join_address(*parts) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":80", "host:x", "host:-1", "host:65536", "::1:80", "[::1]", "host:\u0663", "[host]:1"],
)
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"address|port"):
        split_address(text)


@given(st.text())
def test_any_text_is_an_address_or_a_configuration_error(text: str) -> None:
    try:
        host, port = split_address(text)
    except ConfigError:
        return
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True), ("LOCALHOST", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True),
        ("[::1]", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("::", False), ("0.0.0.0", False),
        ("fe80::1", False), ("localhost.example.org", False),
    ],
)  # fmt: skip
def test_what_stays_on_the_machine(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(("coordinator", "host"), [("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "127.0.1.1")])
def test_with_a_coordinator_on_loopback_it_is_loopback(coordinator: str, host: str) -> None:
    assert pick_bind_host(coordinator) == host


def test_the_name_localhost_gives_a_loopback_address() -> None:
    assert is_loopback(pick_bind_host("localhost"))


def test_ipv6_where_the_machine_has_it() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        with pytest.raises(ConfigError, match="no network interface"):
            pick_bind_host("::1")
    else:
        assert pick_bind_host("[::1]") == "::1"


def test_what_the_user_says_is_taken() -> None:
    assert pick_bind_host("no such name", explicit="0.0.0.0") == "0.0.0.0"
    assert pick_bind_host("no such name", explicit="[::]") == "::"


class FakeProbe:
    """A datagram socket on a machine with one route."""

    source = "10.0.0.7"
    unreachable: frozenset[str] = frozenset()

    def __init__(self, family: int, kind: int) -> None:
        assert kind == socket.SOCK_DGRAM

    def __enter__(self) -> FakeProbe:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def connect(self, address: tuple[str, int]) -> None:
        if address[0] in self.unreachable:
            raise OSError(101, "Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return (self.source, 40000)


def _machine(monkeypatch: pytest.MonkeyPatch, source: str, resolved: list[str], unreachable: set[str]) -> None:
    found = [
        (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM, 17, "", (host, 9)) for host in resolved
    ]
    monkeypatch.setattr(FakeProbe, "source", source)
    monkeypatch.setattr(FakeProbe, "unreachable", frozenset(unreachable))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    real = socket.socket

    def make(family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> FakeProbe | socket.socket:
        return FakeProbe(family, kind) if kind == socket.SOCK_DGRAM else real(family, kind)

    monkeypatch.setattr(socket, "socket", make)


@pytest.mark.parametrize(
    ("source", "resolved", "unreachable", "host"),
    [
        ("10.0.0.7", ["10.0.0.1"], set(), "10.0.0.7"),
        ("10.0.0.7", ["fd00::1", "10.0.0.1"], set(), "10.0.0.7"),
        ("fd00::7", ["fd00::1", "10.0.0.1"], {"10.0.0.1"}, "fd00::7"),
        ("fe80::7%eth0", ["fe80::1"], set(), "fe80::7%eth0"),
        ("127.0.0.1", ["127.0.1.1"], set(), "127.0.1.1"),
    ],
)
def test_the_interface_that_leads_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, source: str, resolved: list[str], unreachable: set[str], host: str
) -> None:
    _machine(monkeypatch, source, resolved, unreachable)
    assert pick_bind_host("coordinator") == host


@pytest.mark.parametrize(("source", "unreachable"), [("10.0.0.7", {"10.0.0.1"}), ("0.0.0.0", set())])
def test_no_way_to_the_coordinator_is_an_error_never_all_interfaces(
    monkeypatch: pytest.MonkeyPatch, source: str, unreachable: set[str]
) -> None:
    _machine(monkeypatch, source, ["10.0.0.1"], unreachable)
    with pytest.raises(ConfigError, match=r"leads to the coordinator 'coordinator'.*MASTER_ADDR"):
        pick_bind_host("coordinator")


def test_who_has_no_descriptor_to_find_out_says_so() -> None:
    with (
        no_free_descriptor(),
        pytest.raises(TransportError, match=r"listen on: this process has no free file descriptor"),
    ):
        pick_bind_host("127.0.0.1")


@pytest.mark.parametrize("name", ["no such name", "x" * 300, ".."])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be resolved on this machine.*MASTER_ADDR"):
        pick_bind_host(name)


def test_the_environment_names_the_address_or_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RPCDIST_HOST", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert host_from_environment("TP_SOCKET_IFNAME") is None
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    assert host_from_environment("TP_SOCKET_IFNAME") == "127.0.0.1"
    assert host_from_environment("GLOO_SOCKET_IFNAME") is None
    monkeypatch.setenv("TP_SOCKET_IFNAME", "no such one")
    with pytest.raises(ConfigError, match=r"TP_SOCKET_IFNAME='no such one': no IPv4 address .*interfaces are .*lo"):
        host_from_environment("TP_SOCKET_IFNAME")
    monkeypatch.setenv("RPCDIST_HOST", "no such one")
    with pytest.raises(ConfigError, match=r"RPCDIST_HOST='no such one' is neither .*interfaces are .*lo"):
        host_from_environment("TP_SOCKET_IFNAME")
    monkeypatch.setenv("RPCDIST_HOST", "lo")
    assert host_from_environment("TP_SOCKET_IFNAME") == "127.0.0.1"
    monkeypatch.setenv("RPCDIST_HOST", "10.1.2.3")
    assert host_from_environment("TP_SOCKET_IFNAME") == "10.1.2.3"
