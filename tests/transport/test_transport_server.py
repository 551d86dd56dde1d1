"""The one server of a process, and links to it: two nodes in this process talk over loopback."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from own_shortages import no_free_descriptor
from transport_nodes import LIMIT_S, UNIT_S, Memory, Nodes, Recorder, kind_of, open_link, unary_call

from rpcdist._proto import membership_pb2, rpc_pb2, value_pb2
from rpcdist.errors import (
    AuthenticationFailed,
    BlockingInLoop,
    CallRefused,
    ConnectFailed,
    DeadlineExceeded,
    ProtocolViolation,
    RpcdistError,
    TransportError,
)
from rpcdist.ids import Identity
from rpcdist.testing import eventually
from rpcdist.transport import Link, Node, Session
from rpcdist.transport._channels import grpc_channel
from rpcdist.transport._channels.grpc_channel import tls_failure
from rpcdist.transport._channels.stream_sockets import listen_tcp
from rpcdist.transport._server import unary_services
from rpcdist.transport.connector import Connector
from rpcdist.transport.unix_sockets import has_abstract_sockets
from rpcdist.transport.wire_messages import CallMessage

SERVICE = membership_pb2.DESCRIPTOR.services_by_name["Membership"]


@pytest.fixture(params=["auto", "tcp", "grpc"])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """On each channel, where a session has a taker; a peer that only makes unary calls always uses gRPC."""
    monkeypatch.setenv("RPCDIST_CHANNELS", request.param)
    nodes = Nodes()
    yield nodes
    nodes.close()


def kind_wanted() -> str:
    wanted = os.environ["RPCDIST_CHANNELS"]
    return wanted if wanted != "auto" else "local" if has_abstract_sockets() else "tcp"


# ---------------------------------------------------------------- serving


def test_a_port_is_picked_bound_and_given_back(nodes: Nodes) -> None:
    node = nodes.make("server", serve=True)
    assert node.address is not None
    host, port = node.address.split(":")
    assert host == "127.0.0.1" and int(port) > 0
    assert node.serve("127.0.0.1", 0) == node.serve("127.0.0.1", int(port)) == node.address  # it serves already
    with pytest.raises(TransportError, match=rf"cannot listen on 127\.0\.0\.1 port {port}.*in use.*MASTER_PORT"):
        nodes.make("other").serve("127.0.0.1", int(port))
    nodes.stop(node)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", int(port)))
    with pytest.raises(RpcdistError, match="is closed"):
        node.serve("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (
            "192.0.2.1",
            r"Cannot assign requested address\. This machine has no such address: start rank 0",
        ),
        (
            "unknown.invalid",
            r"this host cannot resolve the name 'unknown\.invalid' \(.+\)\. Check MASTER_ADDR",
        ),
        ("a..b", r"this host cannot resolve the name 'a\.\.b' \(.+\)\. Check MASTER_ADDR"),
    ],
)
def test_an_address_that_is_not_this_machines_is_no_port_in_use(nodes: Nodes, host: str, says: str) -> None:
    """gRPC says only that it could not bind."""
    with pytest.raises(TransportError, match=rf"^cannot listen on {host} port 29999: {says}"):
        nodes.make("server").serve(host, 29999)


def test_a_name_with_an_address_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "localhost" often means 127.0.0.1 and ::1, of which a network with IPv6 alone has only the second."""

    def two_addresses(host: bytes, port: int, **_: object) -> list[Any]:
        assert host == b"localhost"
        here = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(socket.AF_INET, *here, ("192.0.2.1", port)), (socket.AF_INET, *here, ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    with listen_tcp("localhost") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen_tcp("localhost", listener.getsockname()[1])


def test_a_process_without_a_free_descriptor_says_so(nodes: Nodes) -> None:
    """Where it serves and where it connects: gRPC speaks of a port in use, and its text has unset memory in it."""
    server = nodes.make("server", serve=True)
    client = nodes.make("client")
    says = r"this process has no free file descriptor \(ulimit -n is \d+\): close files, or raise the limit"
    with no_free_descriptor():
        with pytest.raises(TransportError, match=rf"^cannot listen on 127\.0\.0\.1:0: {says}$"):
            client.serve("127.0.0.1", 0)
        with pytest.raises(ConnectFailed, match=rf"^could not connect to {server.address} after 0\.4 s: {says}$"):
            open_link(client, server, timeout_s=UNIT_S)
    open_link(client, server)


def test_nobody_answers(nodes: Nodes) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"  # bound, but it does not listen
        node = nodes.make("client")
        started = time.monotonic()
        with pytest.raises(ConnectFailed, match=rf"could not connect to {address} after 0\.4 s"):
            node.run(node.connect(address, "echo", UNIT_S), LIMIT_S)
        assert time.monotonic() - started < LIMIT_S / 2
        with pytest.raises(ConnectFailed, match=r": connection refused: no process listens there$"):
            node.run(node.connect(address, "echo", LIMIT_S, retry=False), LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectFailed, match=rf"{address} after 0\.4 s: (no process answered|no answer in time)"):
            node.run(node.connect(address, "echo", UNIT_S), LIMIT_S)
    assert not node.links


def test_an_attempt_that_the_deadline_cuts_short_does_not_hide_why_earlier_ones_failed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    async def refused_then_silent(*_: object) -> None:
        attempts.append(time.monotonic())
        if len(attempts) == 1:
            raise ConnectFailed("there", "connection refused: no process listens there")
        raise TimeoutError

    monkeypatch.setattr(Connector, "_connect_by_grpc", refused_then_silent)
    node = nodes.make("client")
    with pytest.raises(ConnectFailed, match=r": connection refused: no process listens there$"):
        node.run(node.connect("127.0.0.1:9", "echo", LIMIT_S), LIMIT_S)
    assert len(attempts) == 2


def test_a_server_that_comes_later_is_found(nodes: Nodes) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client, server = nodes.make("client"), nodes.make("server")
    connecting = asyncio.run_coroutine_threadsafe(client.connect(f"127.0.0.1:{port}", "echo", LIMIT_S), client.io.loop)
    server.handle_role("echo", Recorder())
    server.serve("127.0.0.1", port)
    assert connecting.result(LIMIT_S).peer == server.identity


# ---------------------------------------------------------------- who is who


def test_both_sides_know_each_other(nodes: Nodes) -> None:
    client, server = nodes.make("client"), nodes.make("server", serve=True)
    recorder = Recorder(echo=True)
    server.handle_role("echo", recorder)
    answers = Recorder()
    link = open_link(client, server, handler=answers)
    assert link.peer == server.identity and kind_of(link) == kind_wanted()
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=5)))
    assert [message.id for message in answers.wait()] == [5]
    assert [(session.peer, session.role) for session in recorder.sessions] == [(client.identity, "echo")]
    assert repr(link).startswith("<Link to server at 127.0.0.1:")
    client.run(link.close(), LIMIT_S)
    assert answers.wait_closed() == "closed at this end"
    recorder.wait_closed()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"token": "another token, just as long"}, "did not prove the job token.*RPCDIST_TOKEN.*given as an option"),
        ({"job": "another"}, "job 'default'.*job 'another'"),
    ],
)
def test_who_does_not_belong_here_is_refused(
    nodes: Nodes, options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client", **options)
    for _ in range(3):
        with pytest.raises(AuthenticationFailed, match=says):
            open_link(client, server)
    assert not server.sessions and not client.links

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    # The client learns of the token in TLS, of which the server hears nothing. It tells a server of its own host, which
    # may log that after the client's call has failed.
    num_told = int("job" in options or kind_wanted() == "local")
    eventually(lambda: len(warnings()) >= num_told)
    assert len(warnings()) == num_told
    assert all("refused a connection from " in warning for warning in warnings())


def test_without_tls_the_token_is_proven_all_the_same(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    server = nodes.make("server", serve=True, tls=False)
    client = nodes.make("client", tls=False, token="another token, just as long")
    for _ in range(3):
        with pytest.raises(AuthenticationFailed, match=r"did not prove the job token.*RPCDIST_TOKEN"):
            open_link(client, server)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "refused a connection from 127.0.0.1" in warning
    assert open_link(nodes.make("friend", tls=False), server).peer == server.identity


def test_tls_on_one_side_only_is_told(nodes: Nodes) -> None:
    plain, encrypted = nodes.make("plain", serve=True, tls=False), nodes.make("encrypted", serve=True)
    with pytest.raises(AuthenticationFailed, match=r"does not speak TLS.*RPCDIST_TLS"):
        open_link(encrypted, plain)
    with pytest.raises(ConnectFailed, match="RPCDIST_TLS is off in this process"):
        open_link(plain, encrypted, retry=False)


def test_a_server_of_tls_that_is_no_grpc_is_told() -> None:
    """gRPC's text, where the address is the port of a worker's channel `tcp`."""
    assert "not the address of a worker" in str(tls_failure("Cannot check peer: missing selected ALPN property."))


def test_another_process_than_the_one_expected(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    expected = server.identity._replace(incarnation=server.identity.incarnation ^ 2)
    with pytest.raises(AuthenticationFailed, match="answers at the address of"):
        open_link(client, server, expected=expected)
    assert open_link(client, server, expected=server.identity).peer == server.identity


def test_a_policy_refuses_by_name(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    server.handle_role("echo", Recorder(), lambda identity: f"{identity.name} is not welcome")
    with pytest.raises(AuthenticationFailed, match="client is not welcome"):
        open_link(client, server)
    server.handle_role("echo", Recorder(), lambda identity: None)
    open_link(client, server)


def test_peers_wait_for_a_role_that_is_announced(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    server.expect_role("echo")
    answers, recorder = Recorder(), Recorder(echo=True)
    link = open_link(client, server, handler=answers)
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1)))
    server.handle_role("echo", recorder)
    assert [message.id for message in answers.wait()] == [1]


@pytest.mark.parametrize("num_bytes", [0, 1 << 20], ids=["a short call", "a call with a large buffer"])
def test_a_role_that_has_ended_says_so_to_who_comes_late(nodes: Nodes, num_bytes: int) -> None:
    """Peers that called a worker after its shutdown were told of an "unexpected message", or to raise its limit."""
    server, client = nodes.make("server", serve=True), nodes.make("client")
    call = rpc_pb2.Message(call=rpc_pb2.Call(id=1))
    server.handle_role("echo", Recorder(echo=True))
    server.handle_role("echo", None)
    answers = Recorder()
    late, buffers = rpc_pb2.Message(call=rpc_pb2.Call(id=1)), [Memory(bytes(num_bytes))] if num_bytes else []
    open_link(client, server, handler=answers).session.send(late, buffers)
    reason, lost = answers.wait_closed(), "it ended while this process sent, and gRPC lost the reason"
    assert "no longer serves 'echo'" in reason or (num_bytes and kind_wanted() == "grpc" and lost in reason)
    server.handle_role("echo", Recorder(echo=True))  # it may begin again
    answers = Recorder()
    open_link(client, server, handler=answers).session.send(call)
    assert [message.id for message in answers.wait()] == [1]


# ---------------------------------------------------------------- sessions


def test_messages_keep_their_order_and_large_ones_do_not_stop_the_others(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    server.handle_role("echo", Recorder(echo=True))
    answers = Recorder()
    link = open_link(client, server, handler=answers)
    data = bytes(range(256)) * (5 << 12)  # 5 MiB
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1)), [Memory(data), Memory(b""), Memory(b"x")])
    for id in range(2, 200):
        link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=id)))
    ids = [message.id for message in answers.wait(199)]
    assert [id for id in ids if id != 1] == list(range(2, 200))
    assert answers.buffers[ids.index(1)] == [data, b"", b"x"]


def test_a_message_that_is_larger_than_an_envelope(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    recorder = Recorder()
    server.handle_role("echo", recorder)
    link = open_link(client, server)
    arguments = value_pb2.Value(body=b"x" * (9 << 20))
    link.session.send(CallMessage(1, "", value=arguments), [Memory(b"beside it")])
    assert recorder.wait()[0].value == arguments and recorder.buffers == [[b"beside it"]]


def test_the_end_of_the_server_ends_sessions_and_says_why(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    server.handle_role("echo", Recorder())
    answers = Recorder()
    link = open_link(client, server, handler=answers)
    nodes.stop(server)
    assert "the peer shut down" in answers.wait_closed()
    with pytest.raises(ConnectFailed, match="the peer shut down"):
        client.run(unary(link, "Members"), LIMIT_S)


def test_closing_one_session_names_the_reason_and_leaves_the_others(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    recorder = Recorder(echo=True)
    server.handle_role("echo", recorder)
    first, second = Recorder(), Recorder()
    open_link(client, server, handler=first)
    link = open_link(client, server, handler=second)
    recorder.sessions[0].close("because of a test")
    assert "because of a test" in first.wait_closed()
    assert recorder.wait_closed() == "because of a test"
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=3)))
    assert second.wait()[0].id == 3 and not second.closed


def test_a_message_that_the_handler_chokes_on_ends_its_session(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")

    class Choking(Recorder):
        def on_messages(self, session: Session, messages: Any) -> None:
            raise KeyError("on purpose")

    server.handle_role("echo", Choking())
    answers = Recorder()
    open_link(client, server, handler=answers).session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1)))
    assert "could not be handled: KeyError: 'on purpose'" in answers.wait_closed()
    assert "a message from client could not be handled" in caplog.text


def test_silence_ends_a_session_and_idleness_does_not(nodes: Nodes) -> None:
    server = nodes.make("server", serve=True, peer_timeout_s=UNIT_S)
    client = nodes.make("client", peer_timeout_s=UNIT_S)
    server.handle_role("echo", Recorder())
    answers = Recorder()
    link = open_link(client, server, handler=answers)
    time.sleep(4 * UNIT_S)  # idle: only heartbeats
    assert not answers.closed and link.session.closed_reason is None
    release = threading.Event()
    server.io.call_soon(release.wait, LIMIT_S)  # the server's loop hangs
    try:
        assert "no sign of life for 0." in answers.wait_closed()
    finally:
        release.set()


# ---------------------------------------------------------------- unary calls


async def unary(link: Link, method: str, timeout_s: float | None = LIMIT_S) -> Any:
    request = membership_pb2.MembersRequest()
    return await link.unary("Membership", method, request, membership_pb2.JoinReply, timeout_s)


class Answers:
    """A service; `Leave` never ends by itself, and tells when it was cancelled."""

    def __init__(self) -> None:
        self.peers: list[Identity] = []
        self.called = threading.Event()
        self.cancelled = threading.Event()
        self.error: Exception = CallRefused("not for you")

    async def members(self, peer: Identity, request: Any) -> membership_pb2.JoinReply:
        self.peers.append(peer)
        return membership_pb2.JoinReply(version=7)

    async def leave(self, peer: Identity, request: Any) -> membership_pb2.LeaveReply:
        self.called.set()
        try:
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return membership_pb2.LeaveReply()

    async def join(self, peer: Identity, request: Any) -> membership_pb2.JoinReply:
        raise self.error


@pytest.fixture
def served(nodes: Nodes) -> tuple[Node, Node, Answers]:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    answers = Answers()
    methods = {"Members": answers.members, "Leave": answers.leave, "Join": answers.join}
    server.add_service(SERVICE, methods)
    return server, client, answers


def test_the_unary_calls_of_a_peer_that_are_under_way_have_a_bound(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unary_services, "MAX_BYTES_UNDER_WAY", 3 * unary_services.CALL_BYTES + 100)
    server, clients = nodes.make("server", serve=True), [nodes.make(name) for name in ("many", "one")]
    waiting: list[str] = []
    is_over = asyncio.Event()

    async def members(peer: Identity, request: Any) -> membership_pb2.JoinReply:
        waiting.append(peer.name)
        await is_over.wait()
        return membership_pb2.JoinReply(version=7)

    server.add_service(SERVICE, {"Members": members})
    many, one = (open_link(client, server) for client in clients)

    async def begin() -> list[asyncio.Task[Any]]:
        return [asyncio.ensure_future(unary(many, "Members")) for _ in range(8)]

    async def outcomes(calls: list[asyncio.Task[Any]]) -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    calls = clients[0].run(begin(), LIMIT_S)
    eventually(lambda: waiting.count("many") == 3)
    eventually(lambda: sum(call.done() for call in calls) == 5)
    server.io.call_soon(is_over.set)
    found = clients[0].run(outcomes(calls), LIMIT_S)
    refused = [outcome for outcome in found if isinstance(outcome, Exception)]
    assert len(refused) == 5 and all("the limit is" in str(error) for error in refused)
    assert clients[1].run(unary(one, "Members"), LIMIT_S).version == 7
    assert clients[0].run(unary(many, "Members"), LIMIT_S).version == 7  # nothing stays counted


def test_replies_that_a_peer_does_not_read_count_until_it_does(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC kept each of them twice: 200 calls for 2 MB each made a process grow by 770 MiB."""
    reply = membership_pb2.JoinReply(version=7, detail="x" * (2 << 20))
    monkeypatch.setattr(unary_services, "MAX_BYTES_UNDER_WAY", 5 * reply.ByteSize())
    # Otherwise gRPC's client takes in megabytes that nobody has read.
    monkeypatch.setattr(grpc_channel, "CHANNEL_OPTIONS", [*grpc_channel.CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0)])
    server, client = nodes.make("server", serve=True), nodes.make("client")

    asked: list[Identity] = []

    async def members(peer: Identity, request: Any) -> membership_pb2.JoinReply:
        asked.append(peer)
        return reply

    server.add_service(SERVICE, {"Members": members})
    link = open_link(client, server)

    async def ask(num_calls: int) -> list[Any]:
        path = "/rpcdist.Membership/Members"
        calls = []
        for _ in range(num_calls):
            with unary_call(link, path) as begin:
                call = begin()
                await call.write(b"")
                await call.done_writing()
                calls.append(call)
        return calls

    async def read(calls: list[Any]) -> list[str | int]:
        async def outcome(call: Any) -> str | int:
            try:
                return len(await call.read())
            except grpc.aio.AioRpcError as exc:
                return str(exc.details())

        return await asyncio.gather(*map(outcome, calls))

    calls = client.run(ask(8), LIMIT_S)
    eventually(lambda: len(asked) == 8)
    outcomes = client.run(read(calls), LIMIT_S)
    refused = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert refused and all("the limit is" in text and "read the replies" in text for text in refused)
    assert outcomes.count(reply.ByteSize()) == 8 - len(refused) >= 2  # each counts twice
    for _ in range(8):
        assert client.run(unary(link, "Members"), LIMIT_S).version == 7  # nothing stays counted


def test_a_unary_call_knows_who_calls(served: tuple[Node, Node, Answers]) -> None:
    server, client, answers = served
    link = open_link(client, server, role="membership")

    async def many() -> list[Any]:
        return await asyncio.gather(*(unary(link, "Members") for _ in range(100)))

    assert {reply.version for reply in client.run(many(), LIMIT_S)} == {7}
    assert set(answers.peers) == {client.identity} and len(answers.peers) == 100


def test_a_service_of_one_address_is_not_at_the_others(nodes: Nodes) -> None:
    server, client = nodes.make("server", serve=True), nodes.make("client")
    addresses = [server.serve("127.0.0.1", 0, is_apart=True) for _ in range(2)]
    everywhere, *answers = (Answers() for _ in range(3))
    server.add_service(SERVICE, {"Members": everywhere.members})
    for address, answer in zip(addresses, answers, strict=True):
        server.add_service(SERVICE, {"Members": answer.members}, address=address)
    for address in (str(server.address), *addresses):
        link = client.run(client.connect(address, "membership", timeout_s=LIMIT_S), LIMIT_S)
        client.run(unary(link, "Members"), LIMIT_S)
    assert [len(answer.peers) for answer in (everywhere, *answers)] == [1, 1, 1]


def test_errors_of_unary_calls(served: tuple[Node, Node, Answers], caplog: pytest.LogCaptureFixture) -> None:
    server, client, answers = served
    link = open_link(client, server, role="membership")
    with pytest.raises(TransportError, match="not for you"):
        client.run(unary(link, "Join"), LIMIT_S)
    answers.error = KeyError("a bug")
    with pytest.raises(RpcdistError, match="INTERNAL: KeyError: 'a bug'"):
        client.run(unary(link, "Join"), LIMIT_S)
    assert "the handler of /rpcdist.Membership/Join failed" in caplog.text
    with pytest.raises(ProtocolViolation, match=r"still joins its job, or it is not a worker of this version"):
        client.run(unary(link, "NoSuchMethod"), LIMIT_S)
    assert client.run(unary(link, "Members"), LIMIT_S).version == 7


def test_deadline_and_cancellation_of_a_unary_call_reach_the_handler(served: tuple[Node, Node, Answers]) -> None:
    server, client, answers = served
    link = open_link(client, server, role="membership")
    with pytest.raises(DeadlineExceeded, match="in time"):
        client.run(unary(link, "Leave", UNIT_S), LIMIT_S)
    assert answers.cancelled.wait(LIMIT_S)
    answers.cancelled.clear()
    with pytest.raises(DeadlineExceeded):
        client.run(unary(link, "Leave"), UNIT_S)  # the wait is over, and cancels the call
    assert answers.cancelled.wait(LIMIT_S)


def test_a_unary_call_ends_with_its_link(served: tuple[Node, Node, Answers]) -> None:
    server, client, answers = served
    link = open_link(client, server, role="membership")
    calling = asyncio.run_coroutine_threadsafe(unary(link, "Leave", None), client.io.loop)
    assert answers.called.wait(LIMIT_S)
    server.io.call_soon(next(iter(server.sessions)).close, "because of a test")
    with pytest.raises(RpcdistError, match=r"because of a test|was closed"):
        calling.result(LIMIT_S)
    assert answers.cancelled.wait(LIMIT_S)


# ---------------------------------------------------------------- threads


async def test_blocking_calls_on_a_loop_are_refused(nodes: Nodes) -> None:
    node = nodes.make("node")
    with pytest.raises(BlockingInLoop, match="await"):
        node.run(asyncio.sleep(0), LIMIT_S)


def test_a_wait_for_the_loop_is_bounded(nodes: Nodes) -> None:
    node = nodes.make("node")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
        node.run(asyncio.sleep(LIMIT_S), 0.1)
    assert time.monotonic() - started < LIMIT_S / 2
