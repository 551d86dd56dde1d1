"""The certificate that a process shows at present, and TLS settings made of it, for gRPC."""

from __future__ import annotations

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
