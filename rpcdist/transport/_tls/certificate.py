"""A certificate with its key and authority, as bytes, and its fingerprint."""

from __future__ import annotations

import hashlib
import ssl
from datetime import datetime
from typing import Final, NamedTuple

PEER_NAME: Final = "worker.rpcdist.internal"
"""What certificates are issued to: an address says nothing about who may listen there, and the authority does."""

_END: Final = b"-----END CERTIFICATE-----"


class Certificate(NamedTuple):
    """What a process shows in TLS.

    Attributes:
        key: the private key, PEM.
        chain: the certificate, perhaps followed by intermediate ones, PEM.
        authority: whose signature peers need, PEM.
        fingerprint: SHA-256 of the certificate, in hexadecimal.
        renew_at: from then on another one is to be shown, in UTC.
        server_name: the name that gRPC's clients look for in the certificate of a server.
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
    """The same of the first certificate in a text. Raises `ValueError` if there is none."""
    return fingerprint(ssl.PEM_cert_to_DER_cert((pem.partition(_END)[0].strip() + b"\n" + _END).decode()))
