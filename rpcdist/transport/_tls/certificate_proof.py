"""Proofs by a process's own certificate in a handshake: its key signs the connection, and its names must fit the peer.

TLS alone does not bind a certificate to a worker: gRPC's client does not get the server's certificate, and local
channels have no TLS. So both sides sign their view of the handshake and of the connection with their certificates'
keys.

`cryptography` takes 80 ms to import, so import this module only where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import Criticality, ExtensionPolicy, Policy, PolicyBuilder, Store, VerificationError

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.ids import Identity
from rpcdist.transport.identities import printable
from rpcdist.transport.keys import framed

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

_SCHEME: Final = "rpcdist"
_MAX_CERTIFICATES: Final = 8
_PSS: Final = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
MALFORMED: Final = (
    ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)  # fmt: skip
"""The errors of `cryptography` for certificates that it cannot parse, when they are examined."""


class CertificateProver:
    """Signs handshakes with one certificate, and verifies those of peers. Any thread may use it.

    Args:
        chain: the certificate, and intermediate ones.
        authorities: the authorities that must have signed the certificates of peers.
    """

    def __init__(
        self, chain: Sequence[x509.Certificate], key: PrivateKey, authorities: Sequence[x509.Certificate], job: str
    ) -> None:
        self.names = _worker_names(chain[0], job)
        self._chain = [certificate.public_bytes(Encoding.DER) for certificate in chain]
        self._key = key
        self._authorities = authorities
        self._job = job

    def prove(self, statement: bytes) -> pb.CertificateProof:
        """Signs this side's view of the handshake and the connection."""
        signed = framed(statement, *self._chain)
        if isinstance(self._key, rsa.RSAPrivateKey):
            signature = self._key.sign(signed, _PSS, hashes.SHA256())
        else:
            signature = self._key.sign(signed, ec.ECDSA(hashes.SHA256()))
        return pb.CertificateProof(chain=self._chain, signature=signature)

    def refusal(self, shown: pb.CertificateProof, statement: bytes, peer: Identity) -> str | None:
        """The reason why a peer's proof does not prove its identity, or None.

        Args:
            shown: the proof.
            statement: the statement that the peer must have signed, as this side sees it.
            peer: the identity that the peer claims; certificates are bound to the names of workers only.
        """
        if not shown.chain:
            return "the peer sent no certificate: either all processes of the job use their own certificates, or none"
        if len(shown.chain) > _MAX_CERTIFICATES:
            return f"the peer sent {len(shown.chain)} certificates; the limit is {_MAX_CERTIFICATES}"
        try:
            chain = [x509.load_der_x509_certificate(data) for data in shown.chain]
            reason = chain_refusal(chain, self._authorities)
            if reason is not None:
                return reason
            if not _has_signed(chain[0], shown.signature, framed(statement, *shown.chain)):
                return (
                    "the certificate's key did not sign this connection as this side sees it: a process in between "
                    "relays it, or the peer does not have the certificate's key"
                )
            names = _worker_names(chain[0], self._job)
        except MALFORMED as exc:
            return f"the peer's certificate is malformed: {printable(str(exc))[:200]}"
        if peer.id >= 0 and peer.name not in names:
            return f"the certificate is {_named(names)}, but not of worker {peer.name!r} in job {self._job!r}"
        return None


def chain_refusal(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> str | None:
    """The reason why a certificate is not trusted now, or None. Raises one of `MALFORMED` if it is malformed."""
    now, subject = datetime.now(UTC), printable(chain[0].subject.rfc4514_string())[:200]
    if now > chain[0].not_valid_after_utc:
        return f"the certificate of {subject!r} expired on {chain[0].not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < chain[0].not_valid_before_utc:
        return f"the certificate of {subject!r} is valid only from {chain[0].not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    rules = PolicyBuilder().store(Store(list(authorities))).time(now)
    # Certificates of `openssl req -x509` do not state the purpose of their key, and OpenSSL accepts them in TLS.
    defaults, may = ExtensionPolicy.webpki_defaults_ca(), Criticality.AGNOSTIC
    of_authorities = defaults.may_be_present(x509.KeyUsage, may, _signs_certificates)
    rules = rules.extension_policies(ca_policy=of_authorities, ee_policy=ExtensionPolicy.permit_all())
    try:
        rules.build_client_verifier().verify(chain[0], list(chain[1:]))
    except VerificationError as exc:
        return (
            f"the certificate of {subject!r}, issued by {printable(chain[0].issuer.rfc4514_string())[:200]!r}, is not "
            f"from an authority that this process trusts ({printable(str(exc))[:200]})"
        )
    return None


def _signs_certificates(_policy: Policy, _certificate: x509.Certificate, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("the key usage of the authority does not include signing certificates")


def dns_names(certificate: x509.Certificate) -> list[str]:
    """The DNS names of a certificate."""
    names = _alternative_names(certificate)
    return [] if names is None else names.get_values_for_type(x509.DNSName)


def _worker_names(certificate: x509.Certificate, job: str) -> frozenset[str]:
    """The workers that a certificate names: by URIs, which also name the job, if it has any, or else by plain names."""
    alternative = _alternative_names(certificate)
    uris = [] if alternative is None else alternative.get_values_for_type(x509.UniformResourceIdentifier)
    places = [urlsplit(uri) for uri in uris if uri.lower().startswith(f"{_SCHEME}://")]
    if places:
        return frozenset(
            unquote(place.path.removeprefix("/")) for place in places if unquote(place.netloc) == job and place.path
        )
    common = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return frozenset([*common, *dns_names(certificate)])


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _has_signed(certificate: x509.Certificate, signature: bytes, signed: bytes) -> bool:
    key = certificate.public_key()
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, signed, _PSS, hashes.SHA256())
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _named(names: frozenset[str]) -> str:
    return "of " + ", ".join(repr(printable(name)[:120]) for name in sorted(names)[:8]) if names else "of no worker"
