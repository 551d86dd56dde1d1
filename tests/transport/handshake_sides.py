"""The two sides of a handshake in memory, and what runs them against each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import pytest

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import AuthenticationFailed
from rpcdist.ids import Identity
from rpcdist.transport import handshake_side
from rpcdist.transport._tls.certificate_proof import CertificateProver
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake, ServerHandshake

__all__ = ["ALICE", "BOB", "TOKEN", "OwnCredentials", "client", "server", "shake", "text_of", "wire"]

TOKEN = b"an excellent token of the job"
ALICE = Identity("alice", 1, 11)
BOB = Identity("bob", 0, 22)


class OwnCredentials(Credentials):
    """Those of a process that has these certificates, or none."""

    def __init__(self, token: bytes, job: str, identity: Identity, certificates: CertificateProver | None) -> None:
        super().__init__(token, job, identity, "a test")
        self._own = certificates

    def prover(self) -> CertificateProver | None:
        return self._own


def version(package: str | None) -> AbstractContextManager[object]:
    """Makes a side that begins meanwhile one of this version of the package."""
    return nullcontext() if package is None else patch.object(handshake_side, "package_version", lambda: package)


def client(
    token: bytes = TOKEN,
    job: str = "digits",
    role: str = "rpc",
    expected: Identity | None = None,
    channel: str = "",
    certificates: CertificateProver | None = None,
    package: str | None = None,
) -> ClientHandshake:
    own = OwnCredentials(token, job, ALICE, certificates)
    with version(package):
        return ClientHandshake(token, job, role, ALICE, channel=channel, expected=expected, credentials=own)


def server(
    token: bytes = TOKEN,
    job: str = "digits",
    accept: Callable[[pb.Hello], str | None] | None = None,
    channel: str = "",
    certificates: CertificateProver | None = None,
    package: str | None = None,
) -> ServerHandshake:
    with version(package):
        return ServerHandshake(OwnCredentials(token, job, BOB, certificates), accept, channel=channel)


def wire(message: pb.Handshake | None) -> pb.Handshake:
    """A message as it arrives at the other side."""
    assert message is not None
    return pb.Handshake.FromString(message.SerializeToString())


def shake(a: ClientHandshake, b: ServerHandshake) -> list[str]:
    """Runs both sides to their end, and returns the steps that crossed the wire."""
    steps: list[str] = []
    message: pb.Handshake | None = a.start()
    to_server = True
    while message is not None:
        steps.append(message.WhichOneof("step"))
        message = (b if to_server else a).receive(wire(message))
        to_server = not to_server
    return steps


def text_of(side: ClientHandshake | ServerHandshake) -> str:
    with pytest.raises(AuthenticationFailed) as caught:
        side.check()
    assert not side.done
    for hidden in ("peer", "session"):
        with pytest.raises(AuthenticationFailed):
            getattr(side, hidden)
    return str(caught.value)
