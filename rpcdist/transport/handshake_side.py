"""The common base of both sides of a handshake: the checks of every message, the transcript, and the outcome.

Pure, like handshake.py, which describes the handshake.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Literal

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import AuthenticationFailed, ConfigError, ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport import identities
from rpcdist.transport.keys import SessionKeys, framed, mac

if TYPE_CHECKING:
    from rpcdist.transport.credentials import Credentials

PROTOCOL_VERSION: Final = 14
NONCE_BYTES: Final = 32
MAX_HANDSHAKE_BYTES: Final = 16 << 10
"""Channels refuse a larger message before they parse it; `receive` checks again. Certificate chains take most of it."""

Code = pb.Refusal.Code


HandshakeState = Literal["start", "hello sent", "challenge sent", "proof sent", "done", "failed"]


class HandshakeSide:
    """Base of the two state machines: checks every message, keeps the outcome, and reports failures.

    Args:
        credentials: those of this process. Token, job (which may be empty) and the version of rpcdist must be the same
            on both sides. If this process has a certificate of its own, the peer must also show one.

    Attributes:
        failure: why the handshake failed; `check()` raises it.
        refusal_code: the failure's kind, one of `handshake_pb2.Refusal.Code`.
    """

    def __init__(self, credentials: Credentials) -> None:
        job = credentials.job
        if not credentials.token:
            raise ConfigError("the job token is empty; set RPCDIST_TOKEN (see docs/security.md)")
        if job and not identities.is_name(job):
            raise ConfigError(
                f"a job name has up to {identities.MAX_NAME_LENGTH} printable characters, but it is {job[:200]!r}"
            )
        self._credentials = credentials
        self._identity = credentials.identity  # those may get another one meanwhile
        self._certificates = credentials.prover()
        self._package = package_version()
        self._state: HandshakeState = "start"
        self._hello = pb.Hello()
        self._transcript = b""
        self._peer: Identity | None = None
        self._session: SessionKeys | None = None
        self.failure: AuthenticationFailed | None = None
        self.refusal_code: pb.Refusal.Code = Code.UNSPECIFIED

    @property
    def done(self) -> bool:
        """True once the peer is proven and the session is open."""
        return self._state == "done"

    @property
    def peer(self) -> Identity:
        """The identity that the peer has proven. Raises `AuthenticationFailed` before that."""
        if self._peer is None or not self.done:
            raise AuthenticationFailed("the peer has not proven the job token")
        return self._peer

    @property
    def session(self) -> SessionKeys:
        """The keys of the open session. Raises `AuthenticationFailed` before there is one."""
        if self._session is None or not self.done:
            raise AuthenticationFailed("the peer has not proven the job token")
        return self._session

    def check(self) -> None:
        """Raises the failure, if there is one. Call it after the reply was sent, so that the peer gets the reason."""
        if self.failure is not None:
            raise self.failure

    def _open(self, message: pb.Handshake) -> str:
        """Checks the rules that hold for every message, and returns its step."""
        if self._state in ("done", "failed"):
            raise self._violation(f"a handshake message arrived when the handshake was {self._state}")
        if message.ByteSize() > MAX_HANDSHAKE_BYTES:
            raise self._violation(f"a handshake message is larger than {MAX_HANDSHAKE_BYTES} bytes")
        step: str | None = message.WhichOneof("step")
        if step is None:
            raise self._violation("a handshake message is empty or of an unknown kind")
        return step

    def _violation(self, text: str) -> ProtocolViolation:
        if self._state != "done":  # later messages do not undo the handshake; the caller closes
            self._state = "failed"
        return ProtocolViolation(f"{text}; is the peer an rpcdist process?")

    def _unexpected(self, step: str) -> ProtocolViolation:
        return self._violation(f"unexpected handshake message {step!r} when the state was {self._state!r}")

    def _refuse(self, code: pb.Refusal.Code, reason: str, local: str | None = None) -> pb.Handshake:
        """Fails here with `local`; returns the refusal to send, which contains only `reason`."""
        self._fail(code, local or reason)
        return refusal(code, reason)

    def _refused_by_peer(self, message: pb.Refusal, who: str) -> None:
        self._fail(message.code, f"{who} refused the connection: {_reason(message)}")

    def _fail(self, code: pb.Refusal.Code, text: str) -> None:
        if code == Code.TOKEN and self._credentials.token_source is not None:
            text = f"{text} This process uses {self._credentials.token_source}."
        self._state = "failed"
        self.refusal_code = code
        self.failure = AuthenticationFailed(text)

    def _identity_of(self, message: pb.Hello | pb.Challenge) -> Identity:
        try:
            return identities.identity_from_proto(message.identity)
        except ProtocolViolation as exc:
            raise self._violation(str(exc)) from None

    def _record(self, server_nonce: bytes, stream_port: int, client: Identity, server: Identity) -> None:
        hello = self._hello
        texts = (hello.role, hello.job, hello.purpose, hello.channel, hello.package)
        self._transcript = framed(
            hello.version.to_bytes(4, "big"), hello.nonce, server_nonce, *(text.encode() for text in texts),
            stream_port.to_bytes(4, "big"), *identities.identity_fields(client), *identities.identity_fields(server),
        )  # fmt: skip

    def _proof(self, direction: bytes) -> bytes:
        return mac(self._credentials.token, b"rpcdist " + direction + b" proof", self._transcript)

    def _statement(self, side: bytes, channel: str) -> bytes:
        """The statement that a side signs with its certificate's key: the transcript and its view of the connection."""
        return framed(b"rpcdist " + side + b" certificate", self._transcript, channel.encode())

    def _shown_certificate(self, side: bytes, channel: str) -> pb.CertificateProof | None:
        return None if self._certificates is None else self._certificates.prove(self._statement(side, channel))

    def _certificate_refusal(self, shown: pb.CertificateProof, side: bytes, channel: str, peer: Identity) -> str | None:
        if self._certificates is None:
            return None  # a peer that needs certificates refuses this process
        return self._certificates.refusal(shown, self._statement(side, channel), peer)

    def _session_keys(self, session_id: bytes) -> SessionKeys:
        key = mac(self._credentials.token, b"rpcdist session key", self._transcript, session_id)
        return SessionKeys(session_id, key)


@cache
def package_version() -> str:
    """The version of rpcdist that is installed here."""
    try:
        return version("rpcdist")
    except PackageNotFoundError:
        return "(not installed)"


def refusal(code: pb.Refusal.Code, reason: str) -> pb.Handshake:
    """The message of a side that refuses."""
    return pb.Handshake(refusal=pb.Refusal(reason=reason[: identities.MAX_REASON_LENGTH], code=code))


def _reason(message: pb.Refusal) -> str:
    return identities.printable(message.reason[: identities.MAX_REASON_LENGTH]) or "no reason given"
