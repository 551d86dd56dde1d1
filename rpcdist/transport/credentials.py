"""The credentials of a process, for the handshakes of all its connections and for signed records in a store."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rpcdist._proto import handshake_pb2
from rpcdist.errors import AuthenticationFailed
from rpcdist.ids import Identity
from rpcdist.transport._tls.tls_identity import TlsIdentity, issued_certificates
from rpcdist.transport._tls.tls_policy import TlsPolicy
from rpcdist.transport.handshake import ClientHandshake, ServerHandshake
from rpcdist.transport.keys import mac

if TYPE_CHECKING:
    from rpcdist.transport._tls.certificate_files import CertificateFiles
    from rpcdist.transport._tls.certificate_proof import CertificateProver


class Credentials:
    """The job's token and name, and the identity of this process.

    Raises:
        ConfigError: certificate files of the policy cannot be used.

    Attributes:
        identity: the identity of this process. RPC sets it to name and id of its worker, before later handshakes.
        tls: the certificate that this process shows on encrypted connections.
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
        self._files: CertificateFiles | None = None
        if self.tls_policy.files is not None:
            from rpcdist.transport._tls.certificate_files import CertificateFiles  # takes 80 ms to import

            self._files = CertificateFiles(self.tls_policy.files, job)
        issued = issued_certificates(token, job, lambda: self.identity)
        self.tls = TlsIdentity(issued if self._files is None else self._files.current)

    @property
    def tls_source(self) -> str | None:
        """The source of the keys with which TLS authenticates peers, for error messages."""
        return self.token_source if self._files is None else str(self.tls_policy.files)

    def check_name(self, identity: Identity) -> None:
        """Raises `ConfigError` if this process has a certificate of its own that names other workers."""
        if self._files is not None:
            self._files.check_name(identity)

    def _prover(self) -> CertificateProver | None:
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
            certificates=self._prover(),
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
            certificates=self._prover(),
        )


# ---------------------------------------------------------------- signed records

_MARK: Final = b"rpcdist-record-1:"
_HEX_CHARS: Final = 64
_STRANGER: Final = (
    "another program writes to the store. Nothing was sent to the address in the record. Allow only machines of the "
    "job to reach the store (MASTER_PORT), and start the job again"
)


class Records:
    """Signs and verifies records, such as addresses, that the processes of a job exchange through a store.

    A store does not prove the author of a value: torchrun's own store takes writes from every program that reaches its
    port. So processes sign their records over the job, the key and the value, with a key derived from the job token.
    Any thread may use it.

    Args:
        credentials: have the job's token and name.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._key = mac(credentials.token, b"rpcdist record key")  # the token itself signs only handshakes
        self._job = credentials.job
        self._token_source = credentials.token_source or "the job token of this process"

    def sign(self, key: str, value: bytes) -> bytes:
        """The record to store.

        Args:
            key: the complete key, with all prefixes: the record is valid only there.
        """
        return _MARK + self._proof(key, value) + b":" + value

    def verify(self, key: str, record: bytes, place: str) -> bytes:
        """The value of a record that a process of this job has signed.

        Args:
            key: the complete key, as for `sign`.
            place: names the store in the error.

        Raises:
            AuthenticationFailed: the record is not signed, or not with this job's token, for this job and this key.
        """
        text = f"the record {key!r} in the store at {place} "
        proof, colon, value = record[len(_MARK) :].partition(b":")
        if not record.startswith(_MARK) or not colon or len(proof) != _HEX_CHARS:
            raise AuthenticationFailed(
                f"{text}is not signed: a process with another version of rpcdist wrote it, or {_STRANGER}"
            )
        if not hmac.compare_digest(proof, self._proof(key, value)):
            raise AuthenticationFailed(
                f"{text}was not signed by a process of job {self._job!r} with the same token. This process uses "
                f"{self._token_source}: give every process the same RPCDIST_TOKEN (or a copy of the token file) and "
                f"RPCDIST_JOB. If they are the same, {_STRANGER}"
            )
        return value

    def _proof(self, key: str, value: bytes) -> bytes:
        return mac(self._key, b"rpcdist record", self._job.encode(), key.encode(), value).hex().encode()
