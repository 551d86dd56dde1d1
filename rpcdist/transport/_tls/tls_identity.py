"""TLS settings, for gRPC and for raw sockets, made from the certificate that a process currently presents."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc

from rpcdist.errors import RpcdistError
from rpcdist.ids import Identity
from rpcdist.transport._tls.certificate import PEER_NAME, Certificate

if TYPE_CHECKING:
    from rpcdist.transport._tls.job_authority import JobAuthority

logger = logging.getLogger(__name__)


class TlsIdentity:
    """Provides TLS settings. Any thread may use it; gRPC calls it on its own threads, for each connection.

    Args:
        certificate: returns the certificate to present now; the same object as before if nothing has changed.
    """

    def __init__(self, certificate: Callable[[], Certificate]) -> None:
        self.certificate = certificate
        self._contexts: dict[bool, tuple[ssl.SSLContext, Certificate]] = {}  # by side
        self._lock = threading.Lock()

    def ssl_context(self, server_side: bool) -> tuple[ssl.SSLContext, str]:
        """The context for raw connections, TLS 1.3 with client certificates, and the fingerprint of its certificate."""
        shown = self.certificate()
        with self._lock:
            known = self._contexts.get(server_side)
            if known is None or known[1] is not shown:
                known = self._contexts[server_side] = _context(shown, server_side), shown
            return known[0], shown.fingerprint

    def grpc_server_credentials(self, on_connection: Callable[[], object]) -> Any:
        """The credentials of a server that presents the latest certificate, and refuses clients without one.

        Args:
            on_connection: called on a thread of gRPC, when TLS begins on a connection.
        """
        latest = [self.certificate()]

        def newer() -> Any:
            on_connection()
            try:
                certificate = self.certificate()
            except RpcdistError as exc:
                logger.error("gRPC's port continues to present its old certificate: %s", exc)
                return None
            if certificate is latest[0]:
                return None  # gRPC keeps its configuration
            latest[0] = certificate
            return _server_configuration(certificate)

        first = _server_configuration(latest[0])
        return grpc.dynamic_ssl_server_credentials(first, newer, require_client_authentication=True)


def _server_configuration(certificate: Certificate) -> Any:
    pair = (certificate.key, certificate.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificate.authority)


def _context(shown: Certificate, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = not server_side and shown.server_name == PEER_NAME  # else the handshake verifies the peer
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=shown.authority.decode())
    context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # Python 3.12: the kernel encrypts, if it supports TLS
    if server_side:
        context.num_tickets = 0  # no client resumes a session
    with _file_of(shown.key + b"\n" + shown.chain) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """A file for OpenSSL, which accepts nothing else; it has no name, so a kill leaves none behind."""
    with open(os.memfd_create("rpcdist certificate"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def issued_certificates(token: bytes, job: str, owner: Callable[[], Identity]) -> Callable[[], Certificate]:
    """A function that returns the certificate to present now, issued by the authority that is derived from the token.

    It issues a certificate at the first call, and again when the time or the process's identity requires it. Any thread
    may call it.

    Args:
        owner: returns the current identity of the process.
    """
    authority: JobAuthority | None = None
    shown: tuple[Identity, Certificate] | None = None
    lock = threading.Lock()

    def current() -> Certificate:
        nonlocal authority, shown
        with lock:
            me = owner()
            if shown is None or shown[0] != me or datetime.now(UTC) >= shown[1].renew_at:
                if authority is None:
                    from rpcdist.transport._tls.job_authority import JobAuthority  # takes 80 ms to import

                    authority = JobAuthority(token)
                shown = me, authority.issue(me, job)
            return shown[1]

    return current
