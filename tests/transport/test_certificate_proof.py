"""Handshakes with certificates of one's own: what is signed, and which certificates are refused, by what words."""

from __future__ import annotations

import pytest
from handshake_sides import TOKEN, OwnCredentials, client, server, shake, text_of, wire
from own_certificates import DAY, OwnAuthority, OwnCertificate, rsa_key

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.ids import Identity
from rpcdist.transport._tls.certificate_proof import CertificateProver
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES

Code = pb.Refusal.Code
AUTHORITY = OwnAuthority()
PLAIN = OwnAuthority(signs=None)
ALICE, BOB = AUTHORITY.issue("alice"), AUTHORITY.issue("bob")

PAIRS = {
    "DNS names": (ALICE, BOB),
    "common names": (AUTHORITY.issue(common_name="alice"), AUTHORITY.issue(common_name="bob")),
    "URIs": (AUTHORITY.issue(uris=["rpcdist://digits/alice"]), AUTHORITY.issue(uris=["rpcdist://digits/bob"])),
    "one for the workers of a host": (AUTHORITY.issue("alice", "bob"),) * 2,
    "RSA": (AUTHORITY.issue("alice", key=rsa_key()), BOB),
    "an intermediate authority": (OwnAuthority("of the rack", above=AUTHORITY).issue("alice"), BOB),
    "an authority without key usage": (PLAIN.issue("alice"), PLAIN.issue("bob")),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_workers_with_certificates_of_one_authority_reach_each_other(kind: str) -> None:
    mine, theirs = PAIRS[kind]
    a, b = client(certificates=mine.prover("digits")), server(certificates=theirs.prover("digits"))
    assert shake(a, b) == ["hello", "challenge", "proof", "welcome"]
    assert a.done and b.done and a.session == b.session


STRANGERS: dict[str, tuple[OwnCertificate, str]] = {
    "the certificate of another worker": (
        AUTHORITY.issue("carol"),
        r"is of .*'carol'.*, but not of worker '(alice|bob)'",
    ),
    "that of a worker in another job": (
        AUTHORITY.issue(uris=["rpcdist://letters/alice", "rpcdist://letters/bob"]),
        r"is of no worker, but not of worker '(alice|bob)' in job 'digits'",
    ),
    "that of a worker in another job, in capitals": (
        AUTHORITY.issue("alice", "bob", uris=["RPCDIST://letters/alice"]),
        r"is of no worker, but not of worker '(alice|bob)' in job 'digits'",
    ),
    "an expired one": (
        AUTHORITY.issue("alice", "bob", period=(-2 * DAY, -DAY)),
        r"certificate of .* expired on \d{4}-",
    ),
    "one of the future": (AUTHORITY.issue("alice", "bob", period=(DAY, 2 * DAY)), r"is valid only from .* UTC"),
    "one of another authority": (
        OwnAuthority("a stranger").issue("alice", "bob"),
        "issued by 'CN=a stranger', is not from an authority that this process trusts",
    ),
    "one of an authority whose key is for something else": (
        OwnAuthority("of the rack", above=AUTHORITY, signs=False).issue("alice", "bob"),
        "is not from an authority that this process trusts .*authority does not include signing certificates",
    ),
    "one that a worker has issued": (
        OwnCertificate(
            OwnAuthority("the authority of the tests").issue("alice", "bob").chain, ALICE.key, ALICE.chain[0]
        ),
        "is not from an authority that this process trusts",
    ),
}


class Trusting(CertificateProver):
    """Shows what a prover shows, and believes everything: only the other side judges."""

    def __init__(self, certificate: OwnCertificate) -> None:
        super().__init__(certificate.chain, certificate.key, [certificate.authority], "digits")

    def refusal(self, shown: pb.CertificateProof, statement: bytes, peer: Identity) -> str | None:
        return None


@pytest.mark.parametrize("kind", STRANGERS)
def test_each_side_refuses_and_says_why(kind: str) -> None:
    certificate, why = STRANGERS[kind]
    for a, b in (
        (client(certificates=Trusting(certificate)), server(certificates=BOB.prover("digits"))),
        (client(certificates=ALICE.prover("digits")), server(certificates=Trusting(certificate))),
    ):
        assert shake(a, b)[-1] == "refusal"
        for side in (a, b):
            assert side.refusal_code == Code.CERTIFICATE
            with pytest.raises(Exception, match=why):
                side.check()
            assert text_of(side)


def test_either_all_use_their_own_or_none() -> None:
    for a, b in (
        (client(certificates=ALICE.prover("digits")), server()),
        (client(), server(certificates=BOB.prover("digits"))),
    ):
        assert shake(a, b)[-1] == "refusal"
        assert "the peer sent no certificate" in text_of(a) and "the peer sent no certificate" in text_of(b)


def test_who_is_no_worker_needs_no_name() -> None:
    """A store's client, for one. Its certificate has to be of the authority all the same."""
    b = server(certificates=BOB.prover("digits"))
    tool = AUTHORITY.issue("a tool").prover("digits")
    who = Identity("pid-7", -1, 1)
    a = ClientHandshake(TOKEN, "digits", "store", who, credentials=OwnCredentials(TOKEN, "digits", who, tool))
    assert shake(a, b)[-1] == "welcome"


def test_a_stolen_certificate_without_its_key_is_refused() -> None:
    stolen = OwnCertificate(ALICE.chain, AUTHORITY.issue("carol").key, ALICE.authority)
    a, b = client(certificates=stolen.prover("digits")), server(certificates=BOB.prover("digits"))
    assert shake(a, b) == ["hello", "challenge", "proof", "refusal"]
    assert "did not sign this connection" in text_of(a) and "did not sign this connection" in text_of(b)


def test_a_relay_with_token_and_certificate_cannot_answer_for_the_server() -> None:
    """It can make every proof that the token makes, the welcome included, and not the signature over this channel."""
    a = client(channel="grpc, from certificate alice", certificates=ALICE.prover("digits"))
    b = server(channel="grpc, from certificate carol", certificates=BOB.prover("digits"))
    challenge = wire(b.receive(wire(a.start())))  # the server sees the relay's connection, and signs that
    refusal = a.receive(challenge)
    assert refusal is not None and refusal.refusal.code == Code.CERTIFICATE
    assert "a process in between relays it" in text_of(a) and not b.done


def test_a_proof_counts_in_one_direction_and_one_handshake() -> None:
    prover = ALICE.prover("digits")
    a, b = client(certificates=prover), server(certificates=BOB.prover("digits"))
    proof = wire(a.receive(wire(b.receive(wire(a.start())))))
    again = server(certificates=BOB.prover("digits"))
    challenge = wire(again.receive(wire(client(certificates=prover).start())))
    assert challenge.challenge.certificate.signature != proof.proof.certificate.signature
    honest, reflected = client(certificates=prover), server(certificates=prover)
    challenge = wire(reflected.receive(wire(honest.start())))
    refusal = honest.receive(challenge)  # alice's certificate in bob's place
    assert refusal is not None and "not of worker 'bob'" in text_of(honest)


@pytest.mark.parametrize(
    ("proof", "why"),
    [
        (pb.CertificateProof(chain=[b"no certificate"], signature=b"x"), "malformed"),
        (pb.CertificateProof(chain=[b""] * 9, signature=b"x"), "the peer sent 9 certificates"),
        (pb.CertificateProof(signature=b"x"), "the peer sent no certificate"),
    ],
)
def test_nonsense_is_refused_and_raises_nothing(proof: pb.CertificateProof, why: str) -> None:
    reason = BOB.prover("digits").refusal(proof, b"a statement", Identity("alice", 1, 1))
    assert reason is not None and why in reason


def test_a_long_chain_fits_into_a_message() -> None:
    authority = AUTHORITY
    for depth in range(3):
        authority = OwnAuthority(f"intermediate {depth}", above=authority)
    assert (
        len(authority.issue("alice", key=rsa_key()).prover("digits").prove(b"").SerializeToString())
        < MAX_HANDSHAKE_BYTES / 4
    )
