"""The certificate that a process shows at present, and TLS settings made of it, for gRPC and for raw sockets."""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc

from rpcdist.ids import Identity
from rpcdist.transport._tls.certificate import Certificate

if TYPE_CHECKING:
    from rpcdist.transport._tls.job_authority import JobAuthority

__all__ = ["TlsIdentity"]


class TlsIdentity:
    """Issues the certificate when it is first asked for, and again when its time or the process's name has changed.

    Any thread may use it; gRPC asks on threads of its own, at each connection that comes.

    Args:
        token: the job token.
        job: the job's name.
        owner: returns who the process is at present.
    """

    def __init__(self, token: bytes, job: str, owner: Callable[[], Identity]) -> None:
        self._token = token
        self._job = job
        self._owner = owner
        self._authority: JobAuthority | None = None
        self._current: tuple[Identity, Certificate] | None = None
        self._contexts: dict[bool, tuple[ssl.SSLContext, str]] = {}  # by side
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<TlsIdentity {self._current}>"

    def certificate(self) -> Certificate:
        """What is to be shown now."""
        with self._lock:
            owner = self._owner()
            if self._current is None or self._current[0] != owner or datetime.now(UTC) >= self._current[1].renew_at:
                self._current = owner, self._issue(owner)
            return self._current[1]

    def _issue(self, owner: Identity) -> Certificate:
        if self._authority is None:
            from rpcdist.transport._tls.job_authority import JobAuthority

            self._authority = JobAuthority(self._token)
        return self._authority.issue(owner, self._job)

    def ssl_context(self, server_side: bool) -> tuple[ssl.SSLContext, str]:
        """For a raw connection, with the fingerprint of what is shown: TLS 1.3, and both sides show a certificate."""
        shown = self.certificate()
        with self._lock:
            known = self._contexts.get(server_side)
            if known is None or known[1] != shown.fingerprint:
                known = self._contexts[server_side] = _context(shown, server_side), shown.fingerprint
            return known

    def grpc_server_credentials(self) -> Any:
        """For a server that shows what is to be shown when a connection comes, and refuses clients without one."""
        shown = self.certificate()
        latest = [shown.fingerprint]

        def newer() -> Any:
            certificate = self.certificate()
            if certificate.fingerprint == latest[0]:
                return None  # gRPC keeps what it has
            latest[0] = certificate.fingerprint
            return _server_configuration(certificate)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(shown), newer, require_client_authentication=True
        )


def _server_configuration(certificate: Certificate) -> Any:
    pair = (certificate.key, certificate.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificate.authority)


def _context(shown: Certificate, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=shown.authority.decode())
    if server_side:
        context.num_tickets = 0  # nobody comes back with one
    # OpenSSL's function takes nothing but a file, so it gets one that only this user can read, for as long as it takes.
    with tempfile.NamedTemporaryFile(dir=_memory_directory()) as file:
        file.write(shown.key + b"\n" + shown.chain)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _memory_directory() -> str | None:
    """Where files never reach a disk; None: the usual place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
