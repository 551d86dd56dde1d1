"""A certificate with its key and authority, as bytes, and its fingerprint."""

from __future__ import annotations

import hashlib
import ssl
from datetime import datetime
from typing import Final, NamedTuple

PEER_NAME: Final = "worker.rpcdist.internal"
"""The DNS name in certificates of the job. They do not name addresses: the authority decides who is trusted."""

_END: Final = b"-----END CERTIFICATE-----"


class Certificate(NamedTuple):
    """The certificate that a process presents in TLS.

    Attributes:
        key: the private key, PEM.
        chain: the certificate, and intermediate ones if there are any, PEM.
        authority: the certificates of the authorities that must have signed the peers' certificates, PEM.
        fingerprint: SHA-256 of the certificate, in hexadecimal.
        renew_at: the time from which another certificate should be presented, in UTC.
        server_name: the name that gRPC's clients verify in the certificate of a server.
    """

    key: bytes
    chain: bytes
    authority: bytes
    fingerprint: str
    renew_at: datetime
    server_name: str = PEER_NAME

    def __repr__(self) -> str:  # the key stays out of logs and tracebacks
        return f"<Certificate {self.fingerprint[:16]} [renewed at {self.renew_at:%Y-%m-%d %H:%M} UTC]>"


def fingerprint(der: bytes) -> str:
    """SHA-256 of a certificate, in hexadecimal."""
    return hashlib.sha256(der).hexdigest()


def fingerprint_of_pem(pem: bytes) -> str:
    """SHA-256 of the first certificate in a PEM text. Raises `ValueError` if there is none."""
    return fingerprint(ssl.PEM_cert_to_DER_cert((pem.partition(_END)[0].strip() + b"\n" + _END).decode()))
