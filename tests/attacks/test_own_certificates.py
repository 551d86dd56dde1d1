"""Certificates of one's own: strangers, workers under other names, relays, and files that are replaced meanwhile.

All processes here hold the job token, so only the certificates can turn one away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from inside_agents import current_agent
from own_certificates import DAY, OwnAuthority, OwnCertificate, rsa_key
from socket_hubs import expect, read_exactly, write_all
from transport_nodes import (
    LIMIT_S,
    Nodes,
    Recorder,
    kind_of,
    open_link,
    socket_of,
)

from rpcdist import rpc
from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import AuthenticationFailed, ConfigError, ConnectFailed
from rpcdist.ids import Identity, new_incarnation
from rpcdist.rpc._agent import ROLE
from rpcdist.testing import WorkerPool, eventually
from rpcdist.transport import Node, TlsOptions
from rpcdist.transport._channels.grpc_channel import connect_grpc
from rpcdist.transport._tls.certificate_files import CertificateFiles
from rpcdist.transport._tls.tls_identity import TlsIdentity
from rpcdist.transport._tls.tls_policy import TlsPolicy
from rpcdist.transport.keys import SESSION_PATH
from rpcdist.transport.sockets import SocketHub

AUTHORITY = OwnAuthority()
CHANNELS = ["grpc", "tcp", "local"]


@pytest.fixture(params=CHANNELS)
def channel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RPCDIST_CHANNELS", request.param)
    monkeypatch.setenv("RPCDIST_TLS", "always")
    return str(request.param)


@pytest.fixture
def worker(nodes: Nodes, tmp_path: Path) -> Any:
    """Makes a worker with a certificate, by default one in its name; `claimed` is the name that it uses."""
    ids = iter(range(100))

    def make(name: str, claimed: str = "", certificate: OwnCertificate | None = None, serve: bool = False) -> Node:
        shown = certificate or AUTHORITY.issue(name)
        node = nodes.make(name, tls=shown.write(tmp_path / name))
        node.credentials.identity = Identity(claimed or name, next(ids), new_incarnation())  # past its own check
        if serve:
            node.serve("127.0.0.1", 0)
            node.handle_role("echo", Recorder(echo=True))
        return node

    return make


def test_workers_reach_each_other(worker: Any, channel: str) -> None:
    server = worker("ps", serve=True)
    link = open_link(worker("trainer"), server, handler=Recorder(), expected=server.identity)
    assert kind_of(link) == channel and link.peer == server.identity


def test_a_worker_under_another_name_is_refused_by_name(worker: Any, channel: str) -> None:
    server = worker("ps", serve=True)
    with pytest.raises(AuthenticationFailed, match=r"is of .*'trainer'.*, but not of worker 'boss' in job 'default'"):
        open_link(worker("trainer", claimed="boss"), server, handler=Recorder())
    assert not server.sessions


def test_a_server_under_another_name_is_refused_by_name(worker: Any, channel: str) -> None:
    server = worker("trainer", claimed="ps", serve=True)
    with pytest.raises(AuthenticationFailed, match=r"is of .*'trainer'.*, but not of worker 'ps' in job 'default'"):
        open_link(worker("client"), server, handler=Recorder(), expected=server.identity)
    assert not server.sessions


def test_a_process_knows_that_its_certificate_is_for_another(worker: Any) -> None:
    node = worker("trainer")
    with pytest.raises(
        ConfigError, match=r"names .*trainer.* but not worker 'boss': give it the URI rpcdist://default/boss"
    ):
        node.identity = Identity("boss", 1, 7)
    assert node.identity.name == "trainer"


def test_the_token_alone_is_not_enough(nodes: Nodes, worker: Any, channel: str) -> None:
    server, client = worker("ps", serve=True), nodes.make("trainer")
    with pytest.raises(AuthenticationFailed, match=r"certificate of another authority|the peer sent no certificate"):
        open_link(client, server, handler=Recorder())
    assert not server.sessions


def test_a_certificate_alone_is_not_enough(nodes: Nodes, worker: Any, tmp_path: Path, channel: str) -> None:
    server = worker("ps", serve=True)
    files = AUTHORITY.issue("trainer").write(tmp_path / "trainer")
    with pytest.raises(AuthenticationFailed, match="The job tokens differ"):
        open_link(nodes.make("trainer", token="another token of this job", tls=files), server, handler=Recorder())


@pytest.mark.parametrize("kind", ["another authority", "expired"])
def test_strangers_end_in_the_tls_handshake(worker: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """They believe the server, so it is the server that turns them away."""
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    issuer = OwnAuthority() if kind == "another authority" else AUTHORITY
    bad = issuer.issue("trainer", period=(-2 * DAY, -DAY) if kind == "expired" else (-DAY, DAY)).shown()
    server, client = worker("ps", serve=True), worker("trainer")
    good = client.credentials.tls.certificate()
    monkeypatch.setattr(
        client.credentials.tls, "certificate", lambda: bad._replace(authority=good.authority, renew_at=good.renew_at)
    )
    pattern = r"does not trust the certificate .*, or they have expired by the peer.s clock"
    with pytest.raises(ConnectFailed, match=pattern):
        open_link(client, server, handler=Recorder(), retry=False)
    assert server.strangers.unproven == 0 and not server.sessions


@pytest.mark.parametrize("kind", ["another authority", "expired", "another server name"])
def test_a_server_is_refused_in_the_tls_handshake(worker: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    server, client = worker("ps"), worker("trainer")
    good, why = server.credentials.tls.certificate(), "certificate of another authority"
    bad = OwnAuthority().issue("ps").shown()
    if kind == "expired":
        bad, why = AUTHORITY.issue("ps", period=(-2 * DAY, -DAY)).shown(), "the server's certificate has expired"
    elif kind == "another server name":
        bad, why = AUTHORITY.issue("ps").shown(), "does not have the DNS name"
        named = client.credentials.tls.certificate()._replace(server_name="workers.example.com")
        monkeypatch.setattr(client.credentials.tls, "certificate", lambda: named)
    monkeypatch.setattr(server.credentials.tls, "certificate", lambda: bad._replace(authority=good.authority))
    server.serve("127.0.0.1", 0)
    with pytest.raises(AuthenticationFailed, match=why):
        open_link(client, server, handler=Recorder(), retry=False)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("authority", "# Főtanúsítvány\n".encode()),
        ("authority", "# Zürich\n".encode("latin-1")),
        ("cert", "# Zürich\n".encode("latin-1")),
        ("key", AUTHORITY.certificate.public_bytes(Encoding.PEM)),
    ],
)
def test_what_else_is_in_the_files_does_not_matter(tmp_path: Path, name: str, before: bytes) -> None:
    options = AUTHORITY.issue("ps").write(tmp_path)
    file = tmp_path / f"{name}.pem"
    file.write_bytes(before + file.read_bytes())
    identity = TlsIdentity(CertificateFiles(options, "default").current)
    identity.ssl_context(server_side=True)
    identity.ssl_context(server_side=False)
    identity.grpc_server_credentials(lambda: None)


BAD_FILES = {
    "a malformed URI": (AUTHORITY.issue(uris=["rpcdist://[::1"]), r"are malformed: Invalid IPv6 URL"),
    "a small key": (AUTHORITY.issue("ps", key=rsa_key(1024)), "must be an RSA key with 2048 bits or more"),
    "another curve": (AUTHORITY.issue("ps", key=ec.generate_private_key(ec.SECP256K1())), "P-256, P-384 or P-521"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_files_that_cannot_be_used_are_explained_and_the_old_ones_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    bad, why = BAD_FILES[kind]
    with pytest.raises(ConfigError, match=why):
        CertificateFiles(bad.write(tmp_path), "default")
    files = CertificateFiles(AUTHORITY.issue("ps").write(tmp_path), "default")
    shown = files.current()
    bad.write(tmp_path)
    assert files.current() is shown and files.current() is shown
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "new certificate files cannot be used, so the old ones stay in use"
    ]


# ---------------------------------------------------------------- a relay that has the token, and a certificate


class ForgingRelay(grpc.GenericRpcHandler):
    """Passes hello and challenge on, and would answer the proof itself: the token is all that the welcome needs."""

    def __init__(self, target: str, shown: OwnCertificate) -> None:
        self.target, self.shown = target, shown
        self.answers: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._relay)

    async def _relay(self, _requests: Any, context: Any) -> None:
        async with connect_grpc(self.target, self.shown.shown()) as connection:
            onward: Any = connection.stream_stream(SESSION_PATH)()
            await onward.write(await context.read())
            await context.write(await onward.read())
            answer = pb.Handshake.FromString(await context.read())
            self.answers.append(str(answer.WhichOneof("step")))


@asynccontextmanager
async def relayed(target: str, shown: OwnCertificate) -> AsyncIterator[tuple[str, ForgingRelay]]:
    relay, listener = ForgingRelay(target, shown), grpc.aio.server()
    listener.add_generic_rpc_handlers((relay,))
    pair = (shown.key_pem, shown.chain_pem)
    credentials = grpc.ssl_server_credentials([pair], shown.authority_pem, require_client_auth=True)
    port = listener.add_secure_port("127.0.0.1:0", credentials)
    await listener.start()
    try:
        yield f"127.0.0.1:{port}", relay
    finally:
        await listener.stop(0)


def test_a_relay_with_the_certificate_of_another_worker_is_found_out(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    server, client = worker("ps", serve=True), worker("trainer")

    async def attempt() -> ForgingRelay:
        async with relayed(server.address, AUTHORITY.issue("carol")) as (address, relay):
            linking = asyncio.run_coroutine_threadsafe(client.connect(address, "echo", LIMIT_S), client.io.loop)
            with pytest.raises(AuthenticationFailed, match="a process in between relays it"):
                await asyncio.wrap_future(linking)
            return relay

    assert asyncio.run(attempt()).answers == ["refusal"]  # it has proven nothing by then
    assert not server.sessions and not client.links


# ---------------------------------------------------------------- files that change


def fingerprints(link: Any) -> str:
    return str(socket_of(link.session).ends())


def test_renewed_files_count_from_the_next_connection_on(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "tcp")
    monkeypatch.setenv("RPCDIST_TLS", "always")
    server, client = worker("ps", serve=True), worker("trainer")
    before = open_link(client, server, handler=Recorder())
    new = {name: AUTHORITY.issue(name) for name in ("ps", "trainer")}
    for name, certificate in new.items():
        certificate.write(tmp_path / name)
    after = open_link(client, server, handler=Recorder())
    ends = f"from certificate {new['trainer'].shown().fingerprint} to {new['ps'].shown().fingerprint}"
    assert ends in fingerprints(after) and ends not in fingerprints(before)
    eventually(lambda: len(server.sessions) == 2, "the server has both sessions")
    assert before.session.closed_reason is None


def test_another_authority_takes_over_while_it_runs(worker: Any, tmp_path: Path, channel: str) -> None:
    server, client = worker("ps", serve=True), worker("trainer")
    open_link(client, server, handler=Recorder())
    following = OwnAuthority("the following one")
    following.issue("ps").write(tmp_path / "ps")
    with pytest.raises(AuthenticationFailed, match=r"another authority|not from an authority that this process trusts"):
        open_link(client, server, handler=Recorder())
    following.issue("trainer").write(tmp_path / "trainer")
    open_link(client, server, handler=Recorder())


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("follows", ["a renewed certificate", "another authority"])
def test_files_that_are_replaced_between_tls_and_proof(
    worker: Any, tmp_path: Path, channel: str, monkeypatch: pytest.MonkeyPatch, side: str, follows: str
) -> None:
    """One connection shows the certificate of one pair, and proves itself with the other."""
    server, client = worker("ps", serve=True), worker("trainer")
    node, name, other = (client, "trainer", "ps") if side == "client" else (server, "ps", "trainer")
    issuer = AUTHORITY if follows == "a renewed certificate" else OwnAuthority("the following one")
    new, prove = issuer.issue(name), node.credentials.prover
    swapped: list[TlsOptions] = []

    def swap_and_prove() -> Any:
        if not swapped:
            swapped.append(new.write(tmp_path / name))
        return prove()

    monkeypatch.setattr(node.credentials, "prover", swap_and_prove)
    if issuer is AUTHORITY:
        assert open_link(client, server, handler=Recorder()).peer == server.identity
    else:
        with pytest.raises(
            AuthenticationFailed, match=r"another authority|not from an authority that this process trusts"
        ):
            open_link(client, server, handler=Recorder())
        issuer.issue(other).write(tmp_path / other)
    assert swapped
    assert open_link(client, server, handler=Recorder()).peer == server.identity


def test_half_replaced_files_leave_what_was_there(
    worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = worker("ps", serve=True), worker("trainer")
    before = client.credentials.tls.certificate()
    new = AUTHORITY.issue("trainer")
    (tmp_path / "trainer" / "cert.pem").write_bytes(new.chain_pem)
    with caplog.at_level(logging.WARNING):
        open_link(client, server, handler=Recorder())
        open_link(client, server, handler=Recorder())
    assert caplog.text.count("new certificate files cannot be used") == 1 and "does not belong to" in caplog.text
    assert client.credentials.tls.certificate() is before
    (tmp_path / "trainer" / "key.pem").write_bytes(new.key_pem)
    assert client.credentials.tls.certificate().chain == new.chain_pem


def test_files_that_have_gone_leave_what_was_there(worker: Any, tmp_path: Path) -> None:
    server, client = worker("ps", serve=True), worker("trainer")
    shutil.rmtree(tmp_path / "trainer")
    assert open_link(client, server, handler=Recorder()).peer == server.identity


def test_a_process_whose_certificate_expires_says_so(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc")
    server, client = worker("ps", serve=True), worker("trainer")
    files = client.credentials._files
    ended = files._certificate._replace(renew_at=files._certificate.renew_at - 2 * DAY)
    monkeypatch.setattr(files, "_certificate", ended)
    with pytest.raises(
        AuthenticationFailed, match=r"the certificate of this process, .*cert.pem, expired on .* replace it"
    ):
        open_link(client, server, handler=Recorder())


REFUSED_FILES = {
    "no certificate": ("cert.pem", b"nothing", "contains no certificate in PEM"),
    "no key": ("key.pem", b"nothing", "contains no PEM private key"),
    "another key": ("key.pem", AUTHORITY.issue("x").key_pem, "does not belong to the certificate"),
    "another authority": (
        "authority.pem",
        OwnAuthority().issue("x").authority_pem,
        "not from an authority that this process trusts",
    ),
    "expired": ("cert.pem", None, "expired on"),
}


@pytest.mark.parametrize("kind", REFUSED_FILES)
def test_files_that_do_not_fit_are_refused_at_the_start(nodes: Nodes, tmp_path: Path, kind: str) -> None:
    name, content, why = REFUSED_FILES[kind]
    certificate = AUTHORITY.issue("w", period=(-2 * DAY, -DAY) if content is None else (-DAY, DAY))
    files = certificate.write(tmp_path / "w")
    if content is not None:
        (tmp_path / "w" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        nodes.make("w", tls=files)


def test_what_is_no_file_or_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(bytes(2 << 20))
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path / "long"):
        with pytest.raises(ConfigError, match=r"is not a regular file of at most 1048576 bytes"):
            CertificateFiles(TlsOptions(str(path), str(path), str(path)), "job")


def test_a_missing_file_and_a_missing_server_name_are_named(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the TLS file .*nowhere.pem cannot be read: No such file"):
        nodes.make("w", tls=TlsOptions(tmp_path / "nowhere.pem", "key.pem", "authority.pem"))
    files = AUTHORITY.issue("w").write(tmp_path / "w", server_name="workers.example.com")
    with pytest.raises(ConfigError, match=r"does not have the DNS name workers.example.com"):
        nodes.make("w", tls=files)
    files = AUTHORITY.issue("w", "workers.example.com").write(tmp_path / "w", server_name="workers.example.com")
    assert nodes.make("w", tls=files).credentials.tls.certificate().server_name == "workers.example.com"


def test_the_environment_names_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = AUTHORITY.issue("w").write(tmp_path / "w")
    monkeypatch.setenv("RPCDIST_TLS", f"certificate={files.certificate}")
    with pytest.raises(ConfigError, match="key and authority are missing"):
        TlsPolicy.of_environment()
    named = f"certificate={files.certificate},key={files.key},authority={files.authority}"
    monkeypatch.setenv("RPCDIST_TLS", f"{named},color=blue")
    with pytest.raises(ConfigError, match=r"an unknown word.*color"):
        TlsPolicy.of_environment()
    monkeypatch.setenv("RPCDIST_TLS", f"always,{named},server_name=w.example.com")
    policy = TlsPolicy.of_environment()
    assert (policy.mode, policy.files) == ("always", replace(files, server_name="w.example.com"))
    monkeypatch.setenv("RPCDIST_TLS", f"off,{named}")
    with pytest.raises(ConfigError, match="TLS is off"):
        TlsPolicy.of_environment()
    monkeypatch.setenv("RPCDIST_TLS", named)
    assert TlsPolicy.of_environment().files == files == TlsPolicy.of_environment(files).files
    with pytest.raises(ConfigError, match="TLS is off"):
        TlsPolicy.of_environment(False)


# ---------------------------------------------------------------- the collectives' sockets


@pytest.mark.parametrize("unix", [False, True])
def test_sockets_of_the_collectives(nodes: Nodes, worker: Any, unix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    hubs = [SocketHub(node) for node in (worker("a"), worker("b"), worker("c", claimed="a"), nodes.make("d"))]
    try:
        hubs[0].open("127.0.0.1")
        with (
            hubs[1].connect(hubs[0].address, "data", LIMIT_S, unix=unix) as here,
            expect(hubs[0], "data") as there,
        ):
            write_all(here, b"x")
            assert read_exactly(there, 1) == b"x"
        with pytest.raises(AuthenticationFailed, match="but not of worker 'a'"):
            hubs[2].connect(hubs[0].address, "data", LIMIT_S, unix=unix)
        with pytest.raises(AuthenticationFailed, match=r"another authority|the peer sent no certificate"):
            hubs[3].connect(hubs[0].address, "data", LIMIT_S, unix=unix)
    finally:
        for hub in hubs:
            hub.close()


# ---------------------------------------------------------------- workers of RPC


def double(number: int) -> int:
    return 2 * number


@pytest.mark.multiproc
def test_rpc_with_certificates_of_ones_own(worker_pool: WorkerPool, tmp_path: Path) -> None:
    files = {name: AUTHORITY.issue(name).write(tmp_path / name) for name in ("ps", "trainer")}
    world = worker_pool.new_world(None)
    world.join("ps", 0, tls=files["ps"])
    with pytest.raises(ConfigError, match="but not worker 'boss'"):
        world.join("boss", 1, tls=files["trainer"])
    trainer = world.join("trainer", 1, tls=files["trainer"])
    assert trainer.run(rpc.rpc_sync, "ps", double, (21,)) == 42
    refused = trainer.run(claim_rank, 0)
    assert "'trainer' is not the worker of rank 0 here, which is 'ps'" in refused
    world.shutdown("ps", "trainer")


def claim_rank(rank: int) -> str:
    """Why the worker of a rank refuses this process, which has its own name and says that it has that rank."""
    agent = current_agent()
    node: Any = agent.network
    mine, address = node.identity, agent.directory.member(rank).address
    node.credentials.identity = mine._replace(id=rank)
    try:
        with pytest.raises(AuthenticationFailed) as caught:
            node.run(node.connect(address, ROLE, LIMIT_S, Recorder()), LIMIT_S)
    finally:
        node.credentials.identity = mine
    return str(caught.value)
