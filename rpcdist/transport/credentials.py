"""What a process proves itself with on every connection, whichever side opens it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rpcdist._proto import handshake_pb2
from rpcdist.ids import Identity
from rpcdist.transport._tls.issued_certificates import IssuedCertificates
from rpcdist.transport._tls.tls_identity import TlsIdentity
from rpcdist.transport._tls.tls_policy import TlsPolicy
from rpcdist.transport.handshake import ClientHandshake, ServerHandshake
from rpcdist.transport.handshake_side import CertificateProofs

if TYPE_CHECKING:
    from rpcdist.transport._tls.certificate_files import CertificateFiles


class Credentials:
    """The job's token and name, and who this process is.

    Raises:
        ConfigError: certificate files of the policy cannot be used.

    Attributes:
        token: the job token.
        job: the job's name.
        identity: who this process is. RPC sets it to name and id of its worker; handshakes that begin later state it.
        token_source: where the token comes from, for error messages.
        tls_policy: which connections are encrypted, and whether with certificates of one's own.
        tls: what this process shows on those.
    """

    def __init__(
        self,
        token: bytes,
        job: str,
        identity: Identity,
        token_source: str | None = None,
        tls_policy: TlsPolicy | None = None,
    ) -> None:
        self.token = token
        self.job = job
        self.identity = identity
        self.token_source = token_source
        self.tls_policy = tls_policy or TlsPolicy()
        self._files = _certificate_files(self.tls_policy, job)
        self.tls = TlsIdentity(self._files or IssuedCertificates(token, job, lambda: self.identity))

    @property
    def tls_source(self) -> str | None:
        """Where that comes from by which TLS tells peers from strangers, for error messages."""
        return self.token_source if self._files is None else str(self.tls_policy.files)

    def check_name(self, identity: Identity) -> None:
        """Raises `ConfigError` if this process has a certificate of its own that names other workers."""
        if self._files is not None:
            self._files.check_name(identity)

    def _certificate_proofs(self) -> CertificateProofs | None:
        return None if self._files is None else self._files.prover()

    def client_handshake(
        self, role: str, expected: Identity | None = None, *, purpose: str = "", channel: str = ""
    ) -> ClientHandshake:
        """For a connection that this process opens; see `ClientHandshake` for the arguments."""
        return ClientHandshake(
            self.token,
            self.job,
            role,
            self.identity,
            purpose=purpose,
            channel=channel,
            expected=expected,
            token_source=self.token_source,
            certificates=self._certificate_proofs(),
        )

    def server_handshake(
        self,
        accept: Callable[[handshake_pb2.Hello], str | None],
        *,
        channel: str | Callable[[], str] = "",
        stream_port: int = 0,
    ) -> ServerHandshake:
        """For a connection that this process accepted; see `ServerHandshake` for the arguments."""
        return ServerHandshake(
            self.token,
            self.job,
            self.identity,
            accept,
            channel=channel,
            stream_port=stream_port,
            token_source=self.token_source,
            certificates=self._certificate_proofs(),
        )


def _certificate_files(policy: TlsPolicy, job: str) -> CertificateFiles | None:
    if policy.files is None:
        return None
    from rpcdist.transport._tls.certificate_files import CertificateFiles  # takes 80 ms, for those who need it

    return CertificateFiles(policy.files, job)
