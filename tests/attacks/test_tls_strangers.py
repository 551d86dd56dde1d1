"""gRPC's port against who has no certificate of the job, and against a relay that has one."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import grpc.aio
import pytest
from transport_nodes import LIMIT_S, TOKEN, Nodes, Recorder, open_link

from rpcdist.errors import AuthenticationFailed
from rpcdist.ids import Identity
from rpcdist.transport import Node
from rpcdist.transport._channels.grpc_channel import CHANNEL_OPTIONS, connect_grpc
from rpcdist.transport._server.unary_services import UnaryServices
from rpcdist.transport._tls.certificate import Certificate
from rpcdist.transport._tls.job_authority import LIFETIME, JobAuthority
from rpcdist.transport._tls.tls_identity import TlsIdentity, issued_certificates
from rpcdist.transport.addresses import split_address
from rpcdist.transport.keys import SESSION_PATH

STRANGER = Identity("stranger", -1, 99)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that came as far as this package's code."""
    seen: list[str] = []
    route = UnaryServices.service

    def service(self: UnaryServices, details: grpc.HandlerCallDetails) -> Any:
        seen.append(details.method)
        return route(self, details)

    monkeypatch.setattr(UnaryServices, "service", service)
    return seen


@pytest.fixture
def server(nodes: Nodes) -> Node:
    node = nodes.make("server", serve=True)
    node.handle_role("echo", Recorder(echo=True))
    return node


def issued(token: str = TOKEN, age: timedelta = timedelta(0)) -> Certificate:
    return JobAuthority(token.encode()).issue(STRANGER, "default", datetime.now(UTC) - age)


def with_authority_of_the_job(shown: Certificate) -> Certificate:
    """As a stranger's would be who does not care whom he talks to."""
    return shown._replace(authority=issued().authority)


def without_tls(address: str) -> Any:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def without_certificate(address: str) -> Any:
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "worker.rpcdist.internal")]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(issued().authority), options=options)


STRANGERS: dict[str, Callable[[str], Any]] = {
    "plain text": without_tls,
    "no certificate": without_certificate,
    "the certificate of another token": lambda address: connect_grpc(
        address, with_authority_of_the_job(issued("another token of another job"))
    ),
    "a certificate that has expired": lambda address: connect_grpc(address, issued(age=2 * LIFETIME)),
    "a certificate of the future": lambda address: connect_grpc(address, issued(age=-2 * LIFETIME)),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_ends_before_any_of_our_code(nodes: Nodes, server: Node, reached: list[str], kind: str) -> None:
    async def attempt(path: str) -> grpc.StatusCode:
        assert server.address is not None
        async with STRANGERS[kind](server.address) as channel, asyncio.timeout(LIMIT_S):
            call: Any = channel.stream_stream(path)()
            code: grpc.StatusCode = await call.code()
            return code

    for path in (SESSION_PATH, "/grpc.health.v1.Health/Check", "/rpcdist.Store/Get"):
        assert asyncio.run(attempt(path)) is grpc.StatusCode.UNAVAILABLE
    assert reached == [] and server.strangers.unproven == 0
    assert open_link(nodes.make("client"), server).peer == server.identity
    assert reached == [SESSION_PATH]


GREETINGS = {
    "http/1": b"GET / HTTP/1.1\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "zeros": bytes(4096),
    "a record without end": b"\x16\x03\x01\xff\xff",
}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_other_protocols_end_in_the_tls_handshake(
    nodes: Nodes, server: Node, reached: list[str], greeting: str
) -> None:
    assert server.address is not None
    with socket.create_connection(split_address(server.address), LIMIT_S) as stranger:
        stranger.sendall(GREETINGS[greeting])
        stranger.shutdown(socket.SHUT_WR)
        got = b""
        while more := stranger.recv(4096):
            got += more
    assert len(got) <= 64  # an alert at most
    assert reached == [] and open_link(nodes.make("client"), server).peer == server.identity


def test_a_server_without_the_token_is_not_told_anything(nodes: Nodes) -> None:
    """The client ends the handshake when it sees the certificate, before it shows its own."""
    stranger = issued("another token of another job")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        load(context, stranger)
        context.set_alpn_protocols(["h2"])
        client = nodes.make("client")
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        connecting = asyncio.run_coroutine_threadsafe(client.connect(address, "echo", LIMIT_S), client.io.loop)
        with listener.accept()[0] as connection:
            connection.settimeout(LIMIT_S)
            with pytest.raises(ssl.SSLError):  # an alert, or the end
                context.wrap_socket(connection, server_side=True).recv(1)
        with pytest.raises(AuthenticationFailed, match="did not prove the job token"):
            connecting.result(LIMIT_S)


def load(context: ssl.SSLContext, shown: Certificate) -> None:
    descriptors = [os.memfd_create("pem") for _ in range(2)]
    for descriptor, pem in zip(descriptors, (shown.chain, shown.key), strict=True):
        os.write(descriptor, pem)
    context.load_cert_chain(*(f"/proc/self/fd/{descriptor}" for descriptor in descriptors))
    for descriptor in descriptors:
        os.close(descriptor)


# ---------------------------------------------------------------- a relay with a certificate of the job


class Relay(grpc.GenericRpcHandler):
    """Passes the streams of sessions on, message by message, and notes what it could read."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.seen: list[bytes] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._pass_on)

    async def _pass_on(self, _requests: Any, context: Any) -> None:
        async with connect_grpc(self.target, issued()) as channel:
            onward: Any = channel.stream_stream(SESSION_PATH)()

            async def forth() -> None:
                while (data := await context.read()) is not grpc.aio.EOF:
                    self.seen.append(data)
                    await onward.write(data)

            forwarding = asyncio.ensure_future(forth())
            try:
                while (data := await onward.read()) is not grpc.aio.EOF:
                    await context.write(data)
                await context.abort(await onward.code(), await onward.details())
            finally:
                forwarding.cancel()


@asynccontextmanager
async def relayed(target: str) -> AsyncIterator[tuple[str, Relay]]:
    relay, listener = Relay(target), grpc.aio.server()
    listener.add_generic_rpc_handlers((relay,))
    tls = TlsIdentity(issued_certificates(TOKEN.encode(), "default", lambda: STRANGER))
    port = listener.add_secure_port("127.0.0.1:0", tls.grpc_server_credentials(lambda: None))
    await listener.start()
    try:
        yield f"127.0.0.1:{port}", relay
    finally:
        await listener.stop(0)


def test_a_relay_is_found_out_even_with_a_certificate_of_the_job(nodes: Nodes, server: Node) -> None:
    """The server is shown the relay's certificate, and the client has proven that it showed its own."""
    client, target = nodes.make("client"), server.address
    assert target is not None

    async def attempt() -> Relay:
        async with relayed(target) as (address, relay):
            linking: Awaitable[Any] = asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(client.connect(address, "echo", LIMIT_S), client.io.loop)
            )
            with pytest.raises(AuthenticationFailed, match="between them relays it"):
                await linking
            return relay

    relay = asyncio.run(attempt())
    assert len(relay.seen) == 2  # hello and proof
    assert not server.sessions and not client.links
