"""The job token as a certificate authority: every holder derives the same authority, and issues its own certificate.

So mutual TLS needs no configuration, and a process without the token cannot take part in it. The authority's private
key is derived from the token by HKDF-SHA256. Its own certificate has another number and signature in each process, but
peers compare only its name and its key.

`cryptography` takes 80 ms to import, so import this module only where it is needed.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from rpcdist.ids import Identity
from rpcdist.transport._tls.certificate import PEER_NAME, Certificate, fingerprint_of_pem

LIFETIME: Final = timedelta(days=2)
"""Certificates are renewed after half of it. A stolen certificate is worthless after all of it."""

CLOCK_TOLERANCE: Final = timedelta(days=1)
"""A certificate is valid from that long before its issue, since the clocks of hosts differ."""

_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_KEY_MATERIAL_BYTES: Final = 48  # 128 bits more than the order, so that all remainders are equally likely
_MAX_COMMON_NAME_BYTES: Final = 64  # X.509's limit
_AUTHORITY_PERIOD: Final = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


class JobAuthority:
    """Issues certificates that all holders of a token accept. Any thread may use it."""

    def __init__(self, token: bytes) -> None:
        material = HKDF(hashes.SHA256(), _KEY_MATERIAL_BYTES, salt=b"rpcdist job", info=b"certificate authority")
        number = int.from_bytes(material.derive(token), "big") % (_P256_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        self._name = _name("rpcdist job")
        is_authority = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._sign(self._name, self._key.public_key(), _AUTHORITY_PERIOD, is_authority)

    def issue(self, owner: Identity, job: str, now: datetime | None = None) -> Certificate:
        """A certificate, with a new key, for a process of the job; takes about 1 ms.

        Args:
            owner: the process; only people who read the certificate use it.
            now: the time of issue, in UTC; by default the present.
        """
        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        place = f"rpcdist://{quote(job, safe='')}/{quote(owner.name, safe='')}/{owner.incarnation}"
        chain = self._sign(
            _name(owner.name),
            key.public_key(),
            (now - CLOCK_TOLERANCE, now + LIFETIME),
            x509.BasicConstraints(ca=False, path_length=None),
            x509.SubjectAlternativeName([x509.DNSName(PEER_NAME), x509.UniformResourceIdentifier(place)]),
        )
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Certificate(key_pem, chain, self.certificate, fingerprint_of_pem(chain), now + LIFETIME / 2)

    def _sign(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        period: tuple[datetime, datetime],
        constraints: x509.BasicConstraints,
        names: x509.SubjectAlternativeName | None = None,
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(period[0])
            .not_valid_after(period[1])
            .add_extension(constraints, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(_usage(is_authority=constraints.ca), critical=True)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _usage(is_authority: bool) -> x509.KeyUsage:
    unused = "content_commitment key_encipherment data_encipherment key_agreement crl_sign encipher_only decipher_only"
    denied = dict.fromkeys(unused.split(), False)
    return x509.KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, **denied)


def _name(text: str) -> x509.Name:
    fitting = text.encode()[:_MAX_COMMON_NAME_BYTES].decode(errors="ignore")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, fitting or "?")])
