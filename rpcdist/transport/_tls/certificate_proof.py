"""What a certificate of one's own says in a handshake: whose key signed it, and whether that may be the peer.

TLS alone does not bind a certificate to a worker: gRPC's client is not shown the server's, and local channels have no
TLS. So both sides sign, with their certificates' keys, what they see of the handshake and of the connection.

`cryptography` takes 80 ms to import; import this module where it is needed, and not before.
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
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What `cryptography` raises for certificates that it does not understand, when it looks into them."""


class CertificateProver:
    """Signs handshakes with one certificate, and judges those of peers. Any thread may use it.

    Args:
        chain: the certificate, and intermediate ones.
        authorities: by whom the certificates of peers must be signed.
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
        """Signs what this side sees."""
        signed = framed(statement, *self._chain)
        if isinstance(self._key, rsa.RSAPrivateKey):
            signature = self._key.sign(signed, _PSS, hashes.SHA256())
        else:
            signature = self._key.sign(signed, ec.ECDSA(hashes.SHA256()))
        return pb.CertificateProof(chain=self._chain, signature=signature)

    def refusal(self, shown: pb.CertificateProof, statement: bytes, peer: Identity) -> str | None:
        """Why a peer's proof does not show that it is who it says, or None.

        Args:
            shown: the proof.
            statement: what the peer must have signed, as this side sees it.
            peer: who it says that it is; only the names of workers are bound to certificates.
        """
        if not shown.chain:
            return "no certificate was shown: either all processes of the job use certificates of their own, or none"
        if len(shown.chain) > _MAX_CERTIFICATES:
            return f"{len(shown.chain)} certificates were shown, and {_MAX_CERTIFICATES} are the most"
        try:
            chain = [x509.load_der_x509_certificate(data) for data in shown.chain]
            reason = chain_refusal(chain, self._authorities)
            if reason is not None:
                return reason
            if not _has_signed(chain[0], shown.signature, framed(statement, *shown.chain)):
                return (
                    "the certificate's key did not sign this connection as it is seen here: something in between "
                    "relays it, or who shows the certificate does not have its key"
                )
            names = _worker_names(chain[0], self._job)
        except MALFORMED as exc:
            return f"the certificate that was shown is malformed: {printable(str(exc))[:200]}"
        if peer.id >= 0 and peer.name not in names:
            return f"the certificate is {_named(names)}, and not of worker {peer.name!r} in job {self._job!r}"
        return None


def chain_refusal(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> str | None:
    """Why a certificate is not trusted now, or None. Raises `ValueError` or an error of `x509` if it is malformed."""
    now, subject = datetime.now(UTC), printable(chain[0].subject.rfc4514_string())[:200]
    if now > chain[0].not_valid_after_utc:
        return f"the certificate of {subject!r} expired on {chain[0].not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < chain[0].not_valid_before_utc:
        return (
            f"the certificate of {subject!r} is valid from {chain[0].not_valid_before_utc:%Y-%m-%d %H:%M} UTC on only"
        )
    rules = PolicyBuilder().store(Store(list(authorities))).time(now)
    # What `openssl req -x509` makes says nothing of what its key is for, and OpenSSL takes it in TLS.
    of_authorities = ExtensionPolicy.webpki_defaults_ca().may_be_present(
        x509.KeyUsage, Criticality.AGNOSTIC, _signs_certificates
    )
    rules = rules.extension_policies(ca_policy=of_authorities, ee_policy=ExtensionPolicy.permit_all())
    try:
        rules.build_client_verifier().verify(chain[0], list(chain[1:]))
    except VerificationError as exc:
        return (
            f"the certificate of {subject!r}, issued by {printable(chain[0].issuer.rfc4514_string())[:200]!r}, is not "
            f"of the authority that is trusted here ({printable(str(exc))[:200]})"
        )
    return None


def _signs_certificates(_policy: Policy, _certificate: x509.Certificate, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("the authority's key usage does not say that its key signs certificates")


def dns_names(certificate: x509.Certificate) -> list[str]:
    """The DNS names that a certificate has."""
    names = _alternative_names(certificate)
    return [] if names is None else names.get_values_for_type(x509.DNSName)


def _worker_names(certificate: x509.Certificate, job: str) -> frozenset[str]:
    """The workers that a certificate names: by URIs if it has such, which name the job, too, or else by plain names."""
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
