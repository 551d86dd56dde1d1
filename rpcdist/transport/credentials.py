"""The credentials of a process, for the handshakes of all its connections and for signed records in a store."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rpcdist.errors import AuthenticationFailed
from rpcdist.ids import Identity
from rpcdist.transport._tls.tls_identity import TlsIdentity, issued_certificates
from rpcdist.transport._tls.tls_policy import TlsPolicy
from rpcdist.transport.keys import mac

if TYPE_CHECKING:
    from rpcdist.transport._tls.certificate_files import CertificateFiles
    from rpcdist.transport._tls.certificate_proof import CertificateProver


_MARK: Final = b"rpcdist-record-1:"
_HEX_CHARS: Final = 64
_STRANGER: Final = (
    "another program writes to the store. Nothing was sent to the address in the record. Allow only machines of the "
    "job to reach the store (MASTER_PORT), and start the job again"
)


@dataclass(eq=False, repr=False)
class Credentials:
    """The job's token and name, and the identity of this process. Any thread may sign and verify records.

    Raises:
        ConfigError: certificate files of the policy cannot be used.

    Attributes:
        identity: the identity of this process. RPC sets it to name and id of its worker, before later handshakes.
        tls: the certificate that this process shows on encrypted connections.
    """

    token: bytes
    job: str
    identity: Identity
    token_source: str | None = None
    tls_policy: TlsPolicy = field(default_factory=TlsPolicy)
    _files: CertificateFiles | None = None

    def __post_init__(self) -> None:
        if self.tls_policy.files is not None:
            from rpcdist.transport._tls.certificate_files import CertificateFiles  # takes 80 ms to import

            self._files = CertificateFiles(self.tls_policy.files, self.job)
        issued = issued_certificates(self.token, self.job, lambda: self.identity)
        self.tls = TlsIdentity(issued if self._files is None else self._files.current)

    @property
    def tls_source(self) -> str | None:
        """The source of the keys with which TLS authenticates peers, for error messages."""
        return self.token_source if self._files is None else str(self.tls_policy.files)

    def check_name(self, identity: Identity) -> None:
        """Raises `ConfigError` if this process has a certificate of its own that names other workers."""
        if self._files is not None:
            self._files.check_name(identity)

    def prover(self) -> CertificateProver | None:
        """Proofs for one handshake, by a certificate of this process's own; None if it has none."""
        return None if self._files is None else self._files.prover()

    # ------------------------------------------------------------ records in a store
    #
    # A store does not prove the author of a value: torchrun's own store takes writes from every program that reaches
    # its port. So processes sign their records, such as addresses, over the job, the key and the value, with a key
    # derived from the job token.

    def sign(self, key: str, value: bytes) -> bytes:
        """The record to store.

        Args:
            key: the complete key, with all prefixes: the record is valid only there.
        """
        return _MARK + self._record_proof(key, value) + b":" + value

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
            why = f"{text}is not signed: a process with another version of rpcdist wrote it, or {_STRANGER}"
            raise AuthenticationFailed(why)
        if not hmac.compare_digest(proof, self._record_proof(key, value)):
            source = self.token_source or "the job token of this process"
            raise AuthenticationFailed(
                f"{text}was not signed by a process of job {self.job!r} with the same token. This process uses "
                f"{source}: give every process the same RPCDIST_TOKEN (or a copy of the token file) and RPCDIST_JOB. "
                f"If they are the same, {_STRANGER}"
            )
        return value

    def _record_proof(self, key: str, value: bytes) -> bytes:
        signing_key = mac(self.token, b"rpcdist record key")  # the token itself signs only handshakes
        return mac(signing_key, b"rpcdist record", self.job.encode(), key.encode(), value).hex().encode()
