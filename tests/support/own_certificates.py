"""A certificate authority in the test, and certificate files of workers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from rpcdist.transport import TlsOptions
from rpcdist.transport._tls.certificate import PEER_NAME, Certificate, fingerprint_of_pem
from rpcdist.transport._tls.certificate_proof import CertificateProver, PrivateKey

__all__ = ["DAY", "OwnAuthority", "OwnCertificate", "rsa_key"]

DAY = timedelta(days=1)


class OwnCertificate:
    """A certificate with its key."""

    def __init__(self, chain: list[x509.Certificate], key: PrivateKey, authority: x509.Certificate) -> None:
        self.chain = chain
        self.key = key
        self.authority = authority

    @property
    def chain_pem(self) -> bytes:
        return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in self.chain)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def authority_pem(self) -> bytes:
        return self.authority.public_bytes(Encoding.PEM)

    def prover(self, job: str) -> CertificateProver:
        return CertificateProver(self.chain, self.key, [self.authority], job)

    def shown(self) -> Certificate:
        """For TLS, past all checks of one's own."""
        return Certificate(
            self.key_pem,
            self.chain_pem,
            self.authority_pem,
            fingerprint_of_pem(self.chain_pem),
            self.chain[0].not_valid_after_utc,
        )

    def write(self, folder: Path, server_name: str = PEER_NAME) -> TlsOptions:
        """Writes the three files, or replaces them, and names them."""
        folder.mkdir(exist_ok=True)
        for name, content in (("cert", self.chain_pem), ("key", self.key_pem), ("authority", self.authority_pem)):
            fresh = folder / f"{name}.new"
            fresh.write_bytes(content)
            fresh.replace(folder / f"{name}.pem")
        return TlsOptions(folder / "cert.pem", folder / "key.pem", folder / "authority.pem", server_name)


class OwnAuthority:
    """Issues certificates; of itself, or of another authority that vouches for it.

    `signs` is what its key usage says of signing certificates; None leaves the extension out, as OpenSSL does.
    """

    def __init__(
        self,
        name: str = "the authority of the tests",
        above: OwnAuthority | None = None,
        signs: bool | None = True,
    ) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._above = above
        self.certificate = (above or self)._sign(self._name, self._key, (-DAY, 9 * DAY), True, signs)

    def issue(
        self,
        *names: str,
        uris: Sequence[str] = (),
        common_name: str = "a worker",
        period: tuple[timedelta, timedelta] = (-DAY, DAY),
        key: PrivateKey | None = None,
    ) -> OwnCertificate:
        """A certificate with these DNS names and URIs, valid from and until so long from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        alternative = [*map(x509.DNSName, (PEER_NAME, *names)), *map(x509.UniformResourceIdentifier, uris)]
        chain = [self._sign(subject, key, period, alternative=alternative)]
        issuer = self
        while issuer._above is not None:
            chain.append(issuer.certificate)
            issuer = issuer._above
        return OwnCertificate(chain, key, issuer.certificate)

    def _sign(
        self,
        subject: x509.Name,
        key: PrivateKey,
        period: tuple[timedelta, timedelta],
        is_authority: bool = False,
        signs: bool | None = False,
        alternative: Sequence[x509.GeneralName] = (),
    ) -> x509.Certificate:
        now, issuer = datetime.now(UTC), self._key.public_key()
        builder = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now + period[0])
            .not_valid_after(now + period[1])
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )
        if signs is not None:
            usage = x509.KeyUsage(not is_authority, False, False, False, False, signs, is_authority, False, False)
            builder = builder.add_extension(usage, critical=True)
        if alternative:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternative), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def rsa_key(num_bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, num_bits)
