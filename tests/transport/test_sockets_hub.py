"""Raw sockets: each process that proves the token gets one, whichever side comes first; strangers harm nobody."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import resource
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any, TypeVar

import pytest
from socket_hubs import LIMIT_S, expect, hubs, open_hub, read_exactly, read_some, running_node, write_all
from transport_nodes import tcp_port

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import (
    AuthenticationFailed,
    BlockingInLoop,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    ProtocolViolation,
    TransportError,
)
from rpcdist.ids import Identity
from rpcdist.testing import eventually, wait_until_asleep
from rpcdist.transport import Node, sockets, unix_sockets
from rpcdist.transport._channels import stream_sockets
from rpcdist.transport._channels.stream_sockets import listen_unix
from rpcdist.transport._server import admission, stream_listeners
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.hub_connector import HubAddress
from rpcdist.transport.sockets import SocketHub
from rpcdist.transport.token import job_token
from rpcdist.transport.unix_sockets import local_name

T = TypeVar("T")

UNIX = [pytest.param(False, id="tcp")]
if unix_sockets.has_abstract_sockets():
    UNIX.append(pytest.param(True, id="unix"))


@pytest.fixture
def pair() -> Iterator[tuple[SocketHub, SocketHub]]:
    with hubs(2) as (a, b):
        yield a, b


def talk(a: StreamSocket, b: StreamSocket) -> None:
    """Nothing but the handshake happened on both, and each reads what the other writes."""
    for one, other in ((a, b), (b, a)):
        assert isinstance(one, socket.socket) and not one.getblocking()
        with pytest.raises(BlockingIOError):
            one.recv(1)
        write_all(one, b"hello")
        assert read_exactly(other, 5) == b"hello"


@pytest.mark.parametrize("unix", UNIX)
def test_the_side_that_expects_may_come_last(pair: tuple[SocketHub, SocketHub], unix: bool) -> None:
    a, b = pair
    with a.connect(b.address, "data 0", LIMIT_S, unix=unix) as here, expect(b, "data 0") as there:
        assert here.family == (socket.AF_UNIX if unix else socket.AF_INET)
        talk(here, there)


@pytest.mark.parametrize("unix", UNIX)
def test_the_side_that_expects_may_come_first(pair: tuple[SocketHub, SocketHub], unix: bool) -> None:
    a, b = pair
    found: list[StreamSocket] = []
    waiter = threading.Thread(target=lambda: found.append(expect(b, "data")))
    waiter.start()
    with a.connect(b.address, "data", LIMIT_S, unix=unix) as here:
        waiter.join(LIMIT_S)
        with found[0] as there:
            talk(here, there)


def test_tcp_does_not_wait_for_more_to_send(pair: tuple[SocketHub, SocketHub]) -> None:
    a, b = pair
    with a.connect(b.address, "x", LIMIT_S, unix=False) as here, expect(b, "x") as there:
        for end in (here, there):
            assert isinstance(end, socket.socket) and end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_purposes_are_kept_apart_and_the_first_of_equal_ones_counts(pair: tuple[SocketHub, SocketHub]) -> None:
    a, b = pair
    with ExitStack() as stack:
        for number, purpose in enumerate(["x", "y", "x"]):
            connection = stack.enter_context(closing(a.connect(b.address, purpose, LIMIT_S)))
            if number < 2:
                connection.send(b"%d" % number)
        eventually(lambda: num_waiting(b) == 3)
        order = [stack.enter_context(closing(expect(b, purpose))) for purpose in ("y", "x")]
        assert [read_exactly(end, 1) for end in order] == [b"1", b"0"]
        assert read_some(connection, 1) == b""
    assert num_waiting(b) == 0


def test_without_a_unix_socket_tcp_is_taken(pair: tuple[SocketHub, SocketHub]) -> None:
    a, b = pair
    parsed = HubAddress.parse(b.address)
    for unix_name in ("", "rpcdist-nobody"):
        address = str(dataclasses.replace(parsed, unix_name=unix_name))
        with a.connect(address, "x", LIMIT_S) as here, expect(b, "x"):
            assert here.family == socket.AF_INET
        with pytest.raises(ConnectFailed):
            a.connect(address, "x", LIMIT_S, unix=True)


@pytest.mark.parametrize("text", ["127.0.0.1:80/hub", "[::1]:80/hub,@name"])
def test_addresses_survive_being_text(text: str) -> None:
    assert str(HubAddress.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:1", "host:1/a,name", "host:1/a,@", "host:99999/a", f"host:1/a,@{'x' * 200}", "host:1/a,@\ud800"],
)
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        HubAddress.parse(text)


@pytest.mark.parametrize("purpose", ["", "a\nb", "x" * 513])
def test_malformed_purposes_are_refused(pair: tuple[SocketHub, SocketHub], purpose: str) -> None:
    a, b = pair
    with pytest.raises(ConfigError):
        a.connect(b.address, purpose, LIMIT_S)


def test_waits_have_limits_and_checks_end_them(pair: tuple[SocketHub, SocketHub]) -> None:
    a, _ = pair

    def aborted() -> None:
        raise InterruptedError("aborted")

    with pytest.raises(DeadlineExceeded, match="'never/' and 1, 2 in time"):
        a.collect("never/", ["2", "1"], {}, 0.05)
    with pytest.raises(InterruptedError):
        a.collect("never/", ["1"], {}, LIMIT_S, aborted)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}/hub"
        with pytest.raises(ConnectFailed, match="no answer"):
            a.connect(address, "x", 0.1)
        with pytest.raises(InterruptedError):
            a.connect(address, "x", LIMIT_S, check=aborted)
    with pytest.raises(ConnectFailed):
        a.connect(address, "x", LIMIT_S)


def test_a_wait_may_be_endless(pair: tuple[SocketHub, SocketHub]) -> None:
    a, b = pair
    with a.connect(b.address, "x", math.inf) as here, expect(b, "x", math.inf) as there:
        talk(here, there)


def test_a_loop_is_not_blocked(pair: tuple[SocketHub, SocketHub]) -> None:
    a, b = pair

    async def connect() -> None:
        with pytest.raises(BlockingInLoop):
            a.connect(b.address, "x", LIMIT_S)

    asyncio.run(connect())


def test_closing_closes_what_waits() -> None:
    with hubs(2) as (a, b):
        left = a.connect(b.address, "nobody", LIMIT_S)
        b.close()
        b.close()
        with left:
            assert read_some(left, 1) == b""
        with pytest.raises(TransportError):
            b.connect(a.address, "x", LIMIT_S)
        with pytest.raises(ProtocolViolation, match="their hub is closed"):
            a.connect(b.address, "x", LIMIT_S, unix=False)


def test_closing_ends_the_wait_for_connections() -> None:
    """The thread waited until its own limit, which is the timeout of the group that it makes."""
    with hubs(1) as (hub,), ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.current_thread).result(LIMIT_S)
        waiting = pool.submit(hub.collect, "x", [""], {}, 3 * LIMIT_S)
        wait_until_asleep(thread)
        hub.close()
        with pytest.raises(TransportError, match="the socket hub is closed"):
            waiting.result(LIMIT_S)


def test_a_hub_opens_once_and_needs_a_good_host() -> None:
    with running_node() as node:
        hub = SocketHub(node)
        with pytest.raises(ConfigError, match="open"):
            hub.address  # noqa: B018
        with pytest.raises(TransportError):
            hub.open("256.0.0.1")
        try:
            assert hub.open("127.0.0.1") == hub.open("127.0.0.1") == hub.address
        finally:
            hub.close()
        with pytest.raises(TransportError):
            SocketHub.open(hub, "127.0.0.1")


def test_the_hubs_and_the_sessions_of_a_node_share_its_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "auto")
    with running_node() as node:
        address = node.serve("127.0.0.1", 0)
        one, other = SocketHub(node), SocketHub(node)
        places = [HubAddress.parse(hub.open("127.0.0.1")) for hub in (one, other)]
        assert places[0] == dataclasses.replace(places[1], taker=places[0].taker) and places[0] != places[1]
        assert places[0].port == tcp_port(node)
        if unix_sockets.has_abstract_sockets():
            node.stop_serving(address)  # which frees its name, and not that of the hubs
            listen_unix(local_name(address)).close()
        for unix in [unix.values[0] for unix in UNIX]:  # the same purpose, and each gets its own
            for hub in (one, other):
                with one.connect(hub.address, "x", LIMIT_S, unix=bool(unix)) as here, expect(hub, "x") as there:
                    talk(here, there)
        one.close()
        with other.connect(other.address, "x", LIMIT_S) as here, expect(other, "x") as there:
            talk(here, there)
        other.close()


# ------------------------------------------------------------ strangers


def endpoint(hub: SocketHub, unix: bool) -> socket.socket:
    """A stranger's bare connection."""
    address = HubAddress.parse(hub.address)
    if unix:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + address.unix_name)
    else:
        connection = socket.create_connection((address.host, address.port))
    connection.settimeout(LIMIT_S)
    return connection


def unproven_at(hub: SocketHub) -> int:
    node = hub._node
    assert isinstance(node, Node)
    return node.strangers.unproven


def num_waiting(hub: SocketHub) -> int:
    """The connections that nobody has expected yet."""
    return hub._num_waiting()


def run_on_loop(hub: SocketHub, coroutine: Coroutine[Any, Any, T]) -> T:
    return hub._io.run(coroutine, LIMIT_S)


def message(step: pb.Handshake) -> bytes:
    data = step.SerializeToString()
    return len(data).to_bytes(4, "little") + data


def hello(role: str = "socket") -> bytes:
    side = ClientHandshake(job_token(), "default", role, Identity("stranger", -1, 1))
    return message(side.start())


def wrong_proof() -> bytes:
    return hello() + message(pb.Handshake(proof=pb.Proof(proof=b"x" * 32)))


STRANGERS: dict[str, Callable[[], bytes]] = {
    "random bytes": lambda: b"\x20\x00\x00\x00" + os.urandom(64),
    "a huge length": lambda: b"\xff\xff\xff\xff" + b"x" * 1000,
    "an http request": lambda: b"GET / HTTP/1.1\r\n\r\n",
    "an empty message": lambda: b"\x00\x00\x00\x00",
    "a wrong proof": wrong_proof,
    "half a handshake, then the end": hello,
    "half a message, then the end": lambda: hello()[:20],
    "a purpose without a proof": lambda: hello() + message(pb.Handshake(hello=pb.Hello(purpose="victim"))),
}


@pytest.mark.parametrize("unix", UNIX)
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_turned_away_with_a_log_line(
    pair: tuple[SocketHub, SocketHub], kind: str, unix: bool, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    with endpoint(b, unix) as stranger:
        with suppress(OSError):  # it may be closed at any moment
            stranger.sendall(STRANGERS[kind]())
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    eventually(lambda: unproven_at(b) == 0)
    assert num_waiting(b) == 0
    with a.connect(b.address, "victim", LIMIT_S) as here, expect(b, "victim") as there:
        talk(here, there)


@pytest.mark.parametrize("unix", UNIX)
def test_another_token_is_refused_with_advice_on_both_sides(unix: bool, caplog: pytest.LogCaptureFixture) -> None:
    with open_hub(token="another token, of another job") as a, open_hub() as b:
        with pytest.raises(AuthenticationFailed, match="RPCDIST_TOKEN"):
            a.connect(b.address, "x", LIMIT_S, unix=unix)
        eventually(lambda: "refused a connection" in caplog.text)
        assert "RPCDIST_TOKEN" in caplog.text and num_waiting(b) == 0


def test_another_job_or_role_is_refused(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_hub(job="other") as a, open_hub() as b:
        with pytest.raises(AuthenticationFailed, match="job"):
            a.connect(b.address, "x", LIMIT_S)
    with hubs(2) as (a, b):
        for name in (a, b):  # a session is opened for another role, and there is no hub of another name
            address = str(
                dataclasses.replace(HubAddress.parse(b.address), taker=f"{HubAddress.parse(name.address).taker}x")
            )
            with pytest.raises(ProtocolViolation, match="does not accept such sockets"):
                a.connect(address, "x", LIMIT_S, unix=False)


@pytest.mark.parametrize("is_short", [False, True], ids=["enough descriptors", "few descriptors"])
def test_connections_that_nobody_expects_are_bounded_in_number_and_time(
    pair: tuple[SocketHub, SocketHub],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_short: bool,
) -> None:
    a, b = pair
    if is_short:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    else:
        monkeypatch.setattr(sockets, "MAX_WAITING", 2)
    monkeypatch.setattr(sockets, "ROLE_LIMIT_S", 2.0)  # the first waits still when the second has come
    taken: list[StreamSocket] = []
    b.announce("group/", lambda _, connection: taken.append(connection))
    with a.connect(b.address, "unknown", LIMIT_S) as unknown, a.connect(b.address, "other", LIMIT_S):
        eventually(lambda: num_waiting(b) == 2)
        with pytest.raises(ProtocolViolation, match="2 connections already wait"):
            a.connect(b.address, "one too many", LIMIT_S)
        with a.connect(b.address, "group/1", LIMIT_S) as here:
            eventually(lambda: len(taken) == 1)
            with taken[0] as there:
                talk(here, there)
        assert read_some(unknown, 1) == b""
        assert "no thread expected it" in caplog.text
        b.withdraw("group/")
        with a.connect(b.address, "group/2", LIMIT_S) as late:
            assert read_some(late, 1) == b"" and len(taken) == 1


def test_connections_may_be_handed_to_a_callback(pair: tuple[SocketHub, SocketHub]) -> None:
    a, b = pair
    taken: dict[str, StreamSocket] = {}
    arrived = threading.Semaphore(0)

    def take(purpose: str, connection: StreamSocket) -> None:
        taken[purpose] = connection
        arrived.release()

    with a.connect(b.address, "p2p/early", LIMIT_S) as early:
        b.announce("p2p/", take)
        with a.connect(b.address, "p2p/late", LIMIT_S) as late:
            for _ in range(2):
                assert arrived.acquire(timeout=LIMIT_S)
            talk(early, taken["p2p/early"])
            talk(late, taken["p2p/late"])
    for connection in taken.values():
        connection.close()


def test_a_unix_peer_of_another_user_is_refused(
    pair: tuple[SocketHub, SocketHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not unix_sockets.has_abstract_sockets():
        pytest.skip("there are no abstract Unix sockets here")
    a, b = pair
    for side in (stream_sockets, stream_listeners):
        monkeypatch.setattr(side, "same_user", lambda connection: False)
    with pytest.raises(AuthenticationFailed, match="another user"):
        a.connect(b.address, "x", LIMIT_S, unix=True)
    with endpoint(b, True) as stranger:
        assert stranger.recv(1) == b""


async def connect_all(a: SocketHub, b: SocketHub, number: int, unix: bool | None) -> list[StreamSocket]:
    return await asyncio.gather(*(a.open_connection(b.address, f"x{i}", LIMIT_S, unix=unix) for i in range(number)))


def number_all(b: SocketHub, ends: list[StreamSocket]) -> None:
    """Bytes that go into the ends come out at the purposes."""
    with ExitStack() as stack:
        for each in ends:
            stack.enter_context(each)
        found: dict[str, StreamSocket] = {}
        b.collect("x", map(str, range(len(ends))), found, LIMIT_S)
        others = [stack.enter_context(closing(found[str(i)])) for i in range(len(ends))]
        for i, end in enumerate(ends):
            write_all(end, b"%4d" % i)
        assert [int(read_exactly(other, 4)) for other in others] == list(range(len(ends)))


def test_many_connect_at_once(pair: tuple[SocketHub, SocketHub], caplog: pytest.LogCaptureFixture) -> None:
    a, b = pair
    with caplog.at_level(logging.WARNING):
        number_all(b, run_on_loop(a, connect_all(a, b, admission.MAX_UNPROVEN // 2, None)))
    assert "refused" not in caplog.text


@pytest.mark.parametrize("unix", UNIX)
def test_who_is_displaced_by_others_tries_again(
    pair: tuple[SocketHub, SocketHub], unix: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 20)
    with caplog.at_level(logging.WARNING):
        number_all(b, run_on_loop(a, connect_all(a, b, 150, unix)))
    assert "too many handshakes at once; try again" in caplog.text


def test_who_is_displaced_within_its_tls_handshake_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal was sent there without TLS, and the client took it for another token."""
    monkeypatch.setenv("RPCDIST_TLS", "always")
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 20)
    with hubs(2) as (a, b), caplog.at_level(logging.WARNING):
        number_all(b, run_on_loop(a, connect_all(a, b, 150, False)))
    assert "too many handshakes at once; try again" in caplog.text


FORKING = """
    import os, socket, sys
    from rpcdist.transport import acquire_node
    from rpcdist.transport.sockets import SocketHub

    node = acquire_node()
    hub = SocketHub(node)
    hub.open("127.0.0.1")
    ends = []
    for unix in (False, True):
        found = {}
        ends.append(hub.connect(hub.address, "x", 10, unix=unix))
        hub.collect("x", [""], found, 10)
        ends.append(found[""])
    waiting = hub.connect(hub.address, "waits", 10, unix=True)
    mine, theirs = socket.socketpair()      # not ours: stays open in the child
    child = os.fork()
    if child == 0:
        links = [os.readlink(f"/proc/self/fd/{end.fileno()}") for end in [*ends, waiting]]
        kept = os.readlink(f"/proc/self/fd/{mine.fileno()}").startswith("socket:")
        hub.close()                         # does not wait for the parent's loop
        os._exit(0 if kept and set(links) == {"/dev/null"} else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for one, other in (ends[:2], ends[2:]):
        one.send(b"x")
        other.settimeout(10)
        assert other.recv(1) == b"x"
    for end in (*ends, waiting):
        end.close()
    hub.close()
    node.release()
    sys.exit(status)
"""


@pytest.mark.multiproc
@pytest.mark.skipif(sys.platform != "linux", reason="the test reads /proc")
def test_forked_children_have_none_of_the_sockets() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKING)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
