"""The process's own certificate files, which are read again when they have been replaced.

`cryptography` takes 80 ms to import, so import this module only where it is needed.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from rpcdist.errors import AuthenticationFailed, ConfigError, raised_as
from rpcdist.ids import Identity
from rpcdist.transport._tls.certificate import Certificate, fingerprint
from rpcdist.transport._tls.certificate_proof import MALFORMED, CertificateProver, PrivateKey, chain_refusal, dns_names
from rpcdist.transport._tls.tls_policy import TlsOptions

logger = logging.getLogger(__name__)

MIN_RSA_BITS: Final = 2048
_MAX_BYTES: Final = 1 << 20
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_Texts = tuple[bytes, ...]


class CertificateFiles:
    """Reads the files when it is created, and again when one of them has changed.

    If new files cannot be used, perhaps because not all of them have been replaced yet, the old certificate stays.
    Raises:
        ConfigError: a file cannot be read or used, or the files do not match.
    """

    def __init__(self, options: TlsOptions, job: str) -> None:
        self._options = options
        self._job = job
        self._lock = threading.Lock()
        self._refused: _Texts | None = None  # the unusable files about which a warning was logged
        self._used = self._texts()  # the files' contents: a replaced file may have the same time and length
        self._certificate, self._prover = self._load(self._used)

    def current(self) -> Certificate:
        """The certificate to present now. Raises `AuthenticationFailed` if it has expired."""
        shown, _ = self._latest()
        if datetime.now(UTC) > shown.renew_at:
            raise AuthenticationFailed(
                f"the certificate of this process, {self._options.certificate}, expired on "
                f"{shown.renew_at:%Y-%m-%d %H:%M} UTC; replace it and its key. The next connection uses the new ones"
            )
        return shown

    def prover(self) -> CertificateProver:
        """Signs with the key of the certificate to present now."""
        return self._latest()[1]

    def check_name(self, identity: Identity) -> None:
        """Raises `ConfigError` if peers would not accept this process as a worker of that name."""
        names = self.prover().names
        if identity.id >= 0 and identity.name not in names:
            raise ConfigError(
                f"the certificate {self._options.certificate} names {', '.join(sorted(names)) or 'no worker'} for job "
                f"{self._job!r}, but not worker {identity.name!r}: give it the URI rpcdist://{self._job}/"
                f"{identity.name}, or the name as its common name or a DNS name"
            )

    def _latest(self) -> tuple[Certificate, CertificateProver]:
        with self._lock:
            texts: _Texts = ()
            try:
                texts = self._texts()
                if texts != self._used:
                    self._certificate, self._prover = self._load(texts)
                    self._used = texts
                    logger.info("new certificate files are used from now on: %s", self._options)
            except ConfigError as exc:
                if texts != self._refused:
                    self._refused = texts
                    logger.warning("new certificate files cannot be used, so the old ones stay in use: %s", exc)
            return self._certificate, self._prover

    def _texts(self) -> _Texts:
        options = self._options
        return tuple([_content(path) for path in (options.certificate, options.key, options.authority)])

    def _load(self, texts: _Texts) -> tuple[Certificate, CertificateProver]:
        try:
            return self._read(texts)
        except ConfigError:
            raise
        except MALFORMED as exc:
            raise ConfigError(f"{self._options} are malformed: {exc}") from exc

    def _read(self, texts: _Texts) -> tuple[Certificate, CertificateProver]:
        options = self._options
        chain = _certificates(options.certificate, texts[0])
        key = _private_key(options.key, texts[1])
        authorities = _certificates(options.authority, texts[2])
        if key.public_key() != chain[0].public_key():
            raise ConfigError(f"the key {options.key} does not belong to the certificate {options.certificate}")
        reason = chain_refusal(chain, authorities)
        if reason is not None:
            raise ConfigError(f"{options.certificate} with the authority {options.authority}: {reason}")
        if options.server_name.lower() not in map(str.lower, dns_names(chain[0])):
            raise ConfigError(
                f"the certificate {options.certificate} does not have the DNS name {options.server_name}, which all "
                "certificates of a job need in addition; TlsOptions(server_name=...) sets another name"
            )
        # Not the files themselves: OpenSSL does not accept the comments that they may have, nor a second certificate in
        # the file of the key.
        pem_key = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        shown, renew_at = fingerprint(chain[0].public_bytes(Encoding.DER)), chain[0].not_valid_after_utc
        certificate = Certificate(pem_key, _pem(chain), _pem(authorities), shown, renew_at, options.server_name)
        return certificate, CertificateProver(chain, key, authorities, self._job)


def _content(path: str | os.PathLike[str]) -> bytes:
    with raised_as(ConfigError, f"the TLS file {path} cannot be read", OSError):
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_BYTES + 1) if is_file else b""
    if not is_file or len(content) > _MAX_BYTES:  # a pipe would be waited for, and a device has no end
        raise ConfigError(f"the TLS file {path} is not a regular file of at most {_MAX_BYTES} bytes")
    return content


def _certificates(path: str | os.PathLike[str], pem: bytes) -> list[x509.Certificate]:
    with raised_as(ConfigError, f"{path} contains no certificate in PEM", ValueError):
        return x509.load_pem_x509_certificates(pem)


def _pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def _private_key(path: str | os.PathLike[str], pem: bytes) -> PrivateKey:
    problem = f"{path} contains no PEM private key that is usable without a password"
    with raised_as(ConfigError, problem, ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        key = load_pem_private_key(pem, password=None)
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= MIN_RSA_BITS:
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, _CURVES):
        return key
    text = f"the key {path} must be an RSA key with {MIN_RSA_BITS} bits or more, or an EC key on P-256, P-384 or P-521"
    raise ConfigError(text)
