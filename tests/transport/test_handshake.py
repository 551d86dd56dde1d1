"""The handshake's state machines, message by message; no socket, no clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from handshake_sides import ALICE, BOB, TOKEN, client, server, shake, text_of, wire
from own_certificates import OwnAuthority

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import ConfigError, ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import MAX_PURPOSE_BYTES, ClientHandshake, ServerHandshake
from rpcdist.transport.handshake_side import PROTOCOL_VERSION
from rpcdist.transport.identities import identity_from_proto, identity_to_proto
from rpcdist.transport.keys import SessionKeys, request_proof, verify_request

Code = pb.Refusal.Code


def test_both_sides_prove_the_token_and_hold_the_same_keys() -> None:
    a, b = client(), server()
    assert shake(a, b) == ["hello", "challenge", "proof", "welcome"]
    a.check()
    b.check()
    assert (a.done, b.done, a.peer, b.peer, b.role) == (True, True, BOB, ALICE, "rpc")
    assert a.session == b.session and len(a.session.key) == 32
    assert a.session.key.hex() not in repr(a.session) and a.session.key.hex() not in repr(a)


def test_two_sessions_share_no_key() -> None:
    keys = set()
    for _ in range(4):
        a, b = client(), server()
        shake(a, b)
        keys |= {a.session.key, a.session.session_id}
    assert len(keys) == 8


def test_neither_token_nor_key_crosses_the_wire() -> None:
    a, b = client(), server()
    hello = a.start()
    challenge = wire(b.receive(hello))
    proof = wire(a.receive(challenge))
    welcome = wire(b.receive(proof))
    a.receive(welcome)
    traffic = b"".join(message.SerializeToString() for message in (hello, challenge, proof, welcome))
    assert TOKEN not in traffic and a.session.key not in traffic


def test_a_wrong_token_fails_on_both_sides_and_says_what_to_set() -> None:
    a, b = client(token=b"another token altogether"), server()
    assert shake(a, b) == ["hello", "challenge", "refusal"]
    for side in (a, b):
        text = text_of(side)
        assert "RPCDIST_TOKEN" in text and "token file" in text and "This process uses a test." in text
        assert side.refusal_code == Code.TOKEN
        assert "another token" not in text and TOKEN.decode() not in text


def test_the_server_checks_the_client_also_when_the_client_skips_its_own_check() -> None:
    a, b = client(), server()
    challenge = wire(b.receive(a.start()))
    refusal = wire(b.receive(pb.Handshake(proof=pb.Proof(proof=challenge.challenge.proof))))  # its own proof, reflected
    assert refusal.refusal.code == Code.TOKEN
    assert "RPCDIST_TOKEN" in text_of(b)


def test_different_versions_of_the_package_are_named_on_both_sides_to_token_holders_only() -> None:
    a, b = client(package="0.1.0"), server(package="0.2.0")
    assert shake(a, b) == ["hello", "challenge", "proof", "refusal"]
    for side in (a, b):
        assert side.refusal_code == Code.VERSION
        assert "rpcdist 0.2.0" in text_of(side) and "rpcdist 0.1.0" in text_of(side)
    stranger, b = client(token=b"another token of the same length", package="0.1.0"), server(package="0.2.0")
    shake(stranger, b)
    assert "0.2.0" not in text_of(stranger)


def test_a_version_cannot_be_changed_on_the_way() -> None:
    a, b = client(package="0.1.0"), server(package="0.2.0")
    hello = a.start()
    hello.hello.package = "0.2.0"
    challenge = b.receive(wire(hello))
    a.receive(wire(challenge))
    assert a.refusal_code == Code.TOKEN  # the proof does not fit what the client has said


def test_other_versions_are_told_apart_from_wrong_tokens() -> None:
    b = server(token=b"another token altogether")
    hello = wire(client().start())
    hello.hello.version = PROTOCOL_VERSION + 1
    hello.hello.nonce = b"of another shape in that version"[:7]
    refusal = wire(b.receive(hello))
    assert refusal.refusal.code == Code.VERSION
    other = f"version {PROTOCOL_VERSION + 1}"
    assert other in text_of(b) and "same version of rpcdist" in refusal.refusal.reason
    a = client()
    a.start()
    a.receive(refusal)
    assert other in text_of(a) and a.refusal_code == Code.VERSION


def test_jobs_do_not_mix() -> None:
    a, b = client(job="digits"), server(job="letters")
    assert shake(a, b) == ["hello", "refusal"]
    for side in (a, b):
        text = text_of(side)
        assert "'digits'" in text and "'letters'" in text
        assert side.refusal_code == Code.JOB


def test_the_policy_is_asked_about_proven_peers_only() -> None:
    asked: list[str] = []

    def accept(hello: pb.Hello) -> str | None:
        asked.append(hello.identity.name)
        return "worker alice is not welcome"

    shake(client(token=b"another token altogether"), server(accept=accept))
    assert asked == []
    a, b = client(), server(accept=accept)
    assert shake(a, b) == ["hello", "challenge", "proof", "refusal"]
    assert asked == ["alice"]
    assert "not welcome" in text_of(a) and "not welcome" in text_of(b)
    assert a.refusal_code == b.refusal_code == Code.POLICY


@pytest.mark.parametrize(
    ("expected", "matches"),
    [
        (BOB, True),
        (Identity("bob", -1, 0), True),
        (Identity("", 0, 0), True),
        (Identity("carol", 0, 22), False),
        (Identity("bob", 3, 22), False),
        (Identity("bob", 0, 23), False),
    ],
)
def test_an_address_that_now_belongs_to_somebody_else_is_noticed(expected: Identity, matches: bool) -> None:
    a, b = client(expected=expected), server()
    shake(a, b)
    assert a.done is b.done is matches
    if not matches:
        assert "'bob'" in text_of(a) and "refused" in text_of(b)
        assert a.refusal_code == Code.WRONG_PEER


Change = Callable[[pb.Handshake], None]


def _other(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def _flip(part: str, name: str) -> Change:
    def change(message: pb.Handshake) -> None:
        holder = getattr(message, part)
        setattr(holder, name, _other(getattr(holder, name)))

    return change


def _set(part: str, name: str, value: object) -> Change:
    return lambda message: setattr(getattr(message, part), name, value)


def _identity(part: str, name: str, value: object) -> Change:
    return lambda message: setattr(getattr(message, part).identity, name, value)


def _certificate(part: str, change: Callable[[pb.CertificateProof], None]) -> Change:
    return lambda message: change(getattr(message, part).certificate)


def _flip_chain(proof: pb.CertificateProof) -> None:
    proof.chain[0] = proof.chain[0][:-1] + _other(proof.chain[0][-1:])


def _flip_signature(proof: pb.CertificateProof) -> None:
    proof.signature = proof.signature[:-1] + _other(proof.signature[-1:])


TAMPERING: dict[str, tuple[int, Change]] = {
    "hello.version": (0, _set("hello", "version", PROTOCOL_VERSION + 1)),
    "hello.nonce": (0, _flip("hello", "nonce")),
    "hello.job": (0, _set("hello", "job", "letters")),
    "hello.role": (0, _set("hello", "role", "store")),
    "hello.purpose": (0, _set("hello", "purpose", "another")),
    "hello.channel": (0, _set("hello", "channel", "pigeon")),
    "hello.package": (0, _set("hello", "package", "0.0.1")),
    "hello.identity.name": (0, _identity("hello", "name", "mallory")),
    "hello.identity.id": (0, _identity("hello", "id", 7)),
    "hello.identity.incarnation": (0, _identity("hello", "incarnation", 7)),
    "challenge.nonce": (1, _flip("challenge", "nonce")),
    "challenge.proof": (1, _flip("challenge", "proof")),
    "challenge.stream_port": (1, _set("challenge", "stream_port", 5001)),
    "challenge.identity.name": (1, _identity("challenge", "name", "mallory")),
    "challenge.identity.id": (1, _identity("challenge", "id", 7)),
    "challenge.identity.incarnation": (1, _identity("challenge", "incarnation", 7)),
    "challenge.certificate.chain": (1, _certificate("challenge", _flip_chain)),
    "challenge.certificate.signature": (1, _certificate("challenge", _flip_signature)),
    "proof.certificate.chain": (2, _certificate("proof", _flip_chain)),
    "proof.certificate.signature": (2, _certificate("proof", _flip_signature)),
    "proof.proof": (2, _flip("proof", "proof")),
    "welcome.session_id": (3, _flip("welcome", "session_id")),
    "welcome.proof": (3, _flip("welcome", "proof")),
}


@pytest.mark.parametrize("field", TAMPERING)
def test_tampering_with_any_field_ends_the_handshake(field: str) -> None:
    at, change = TAMPERING[field]
    authority = OwnAuthority()
    a = client(certificates=authority.issue("alice").prover("digits"))
    b = server(certificates=authority.issue("bob").prover("digits"))
    message: pb.Handshake | None = a.start()
    for step in range(4):
        message = wire(message)
        if step == at:
            change(message)
        message = (b, a)[step % 2].receive(message)
        if a.failure or b.failure:
            break
    assert a.failure is not None or b.failure is not None
    assert not a.done


def test_every_field_of_the_messages_is_tampered_with_above() -> None:
    fields = set()
    for part in ("hello", "challenge", "proof", "welcome"):
        for field in getattr(pb.Handshake(), part).DESCRIPTOR.fields:
            inner = [f".{name.name}" for name in field.message_type.fields] if field.message_type else [""]
            fields |= {f"{part}.{field.name}{suffix}" for suffix in inner}
    assert fields == set(TAMPERING)


def test_a_relay_between_two_connections_is_found_out() -> None:
    """It passes every message on as it is; only the two ends differ, as each side's system names them."""
    a = ClientHandshake(TOKEN, "digits", "rpc", ALICE, channel="unix, from 7 to 66")
    b = ServerHandshake(Credentials(TOKEN, "digits", BOB), channel="unix, from 66 to 8")
    assert shake(a, b) == ["hello", "challenge", "proof", "refusal"]
    for side in (a, b):
        assert "'unix, from 7 to 66'" in text_of(side) and "relays" in text_of(side)
        assert side.refusal_code == Code.CHANNEL


def test_a_relay_that_lies_about_the_ends_has_no_proof() -> None:
    a = ClientHandshake(TOKEN, "digits", "rpc", ALICE, channel="tcp, to 10.0.0.6:1")
    b = ServerHandshake(Credentials(TOKEN, "digits", BOB), channel="tcp, to 10.0.0.7:2")
    hello = wire(a.start())
    hello.hello.channel = "tcp, to 10.0.0.7:2"
    refusal = a.receive(wire(b.receive(hello)))
    assert refusal is not None and refusal.refusal.code == Code.TOKEN and not a.done and not b.done


def test_the_other_way_to_a_server_is_known_once_it_has_proven_itself() -> None:
    a, b = client(), ServerHandshake(Credentials(TOKEN, "digits", BOB), stream_port=5000)
    assert a.other_way is None
    challenge = wire(b.receive(a.start()))
    a.receive(challenge)
    assert a.other_way == (BOB, 5000) and not a.done
    liar = client()
    lie = wire(server(token=b"another token altogether").receive(liar.start()))
    lie.challenge.stream_port = 5000
    liar.receive(lie)
    assert liar.other_way is None
    far = client()
    challenge = wire(server().receive(far.start()))
    challenge.challenge.stream_port = 65536
    with pytest.raises(ProtocolViolation, match="port"):
        far.receive(challenge)


def test_purposes_are_proven_with_the_role() -> None:
    a, b = ClientHandshake(TOKEN, "digits", "socket", ALICE, purpose="group 1"), server()
    shake(a, b)
    assert (b.role, b.purpose) == ("socket", "group 1")
    for purpose in ("a\n", "x" * (MAX_PURPOSE_BYTES + 1)):
        with pytest.raises(ConfigError, match="purpose"):
            ClientHandshake(TOKEN, "digits", "socket", ALICE, purpose=purpose)


def test_a_recorded_client_cannot_be_replayed() -> None:
    a, b = client(), server()
    hello = a.start()
    proof = wire(a.receive(wire(b.receive(hello))))
    again = server()
    again.receive(hello)
    again.receive(proof)
    assert "did not prove" in text_of(again)


def test_a_server_that_mirrors_the_client_is_refused() -> None:
    a = client()
    hello = a.start().hello
    mirrored = pb.Challenge(nonce=hello.nonce, proof=bytes(32), identity=hello.identity)
    with pytest.raises(ProtocolViolation, match="own nonce"):
        a.receive(pb.Handshake(challenge=mirrored))
    assert not a.done


@pytest.mark.parametrize(
    "make", [lambda: client(role="Bad Role"), lambda: client(job="a\nb"), lambda: client(token=b"")]
)
def test_own_mistakes_are_configuration_errors(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_tool_needs_no_name_and_identities_survive_the_wire() -> None:
    for identity in (ALICE, BOB, Identity("", -1, 0), Identity("pid-1.host", -1, 2**63)):
        assert identity_from_proto(identity_to_proto(identity)) == identity


def test_a_key_of_a_session_is_not_the_token() -> None:
    a, b = client(), server()
    shake(a, b)
    assert isinstance(a.session, SessionKeys)
    assert not verify_request(b.session.key, "/x/Y", 1, request_proof(TOKEN, "/x/Y", 1))
