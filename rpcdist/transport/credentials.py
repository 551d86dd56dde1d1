"""What a process proves itself with on every connection, whichever side opens it."""

from __future__ import annotations

from collections.abc import Callable

from rpcdist._proto import handshake_pb2
from rpcdist.ids import Identity
from rpcdist.transport._tls.tls_identity import TlsIdentity
from rpcdist.transport._tls.tls_policy import TlsPolicy
from rpcdist.transport.handshake import ClientHandshake, ServerHandshake

__all__ = ["Credentials"]


class Credentials:
    """The job's token and name, and who this process is.

    Attributes:
        token: the job token.
        job: the job's name.
        identity: who this process is. RPC sets it to name and id of its worker; handshakes that begin later state it.
        token_source: where the token comes from, for error messages.
        tls_policy: which connections are encrypted.
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
        self.tls = TlsIdentity(token, job, lambda: self.identity)

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
        )
