"""The mutual proof of the job token that opens every connection, as pure state machines.

No socket, clock or logging lives here: messages go in, messages come out, and any channel can carry them.

    client                                        server
      hello(version, nonce, job, role, purpose, channel, identity) --->
      <--- challenge(nonce, proof, identity, port)       proof = HMAC(token, "server" + transcript)
      proof(proof) --->                                  proof = HMAC(token, "client" + transcript)
      <--- welcome(session_id, proof)                    proof = HMAC(session key, "welcome")

The transcript contains hello and challenge without the proofs, each part preceded by its length. Invariants:

 1. The token never crosses the wire. No proof is valid for another connection (both nonces), another direction
    (labels), another job, another role or purpose, another pair of processes or another kind of connection. Where the
    system identifies both ends of a connection (raw sockets), both sides must name the same ends, so a relay between
    them is detected.
 2. Only the names in `Hello` are read before the peer's proof is verified, in constant time; the policy hook `accept`
    runs after that.
 3. Either side may send a refusal instead of its next message; both then fail with `AuthenticationFailed`.
 4. A message that is out of order, too large or malformed raises `ProtocolViolation`.
 5. Where processes have certificates of their own, challenge and proof also carry them, with a signature over the
    transcript and over the channel as the signer sees it; the verifier compares that with its own view. So a process
    with the token and another worker's certificate can neither answer for this worker nor relay its connections.
 6. After any failure the machine stays closed: it has no peer and no session, and takes no message.

A channel drives one side as follows (`send` and `read` are the channel's, within its own time limit):

    await send(client.start())            # only the client
    while not side.done:
        reply = side.receive(await read())
        if reply is not None:
            await send(reply)
        side.check()                              # raises AuthenticationFailed, after the refusal was sent
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from typing import Final

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import ConfigError, ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake_side import NONCE_BYTES, PROTOCOL_VERSION, Code, HandshakeSide
from rpcdist.transport.identities import identity_from_proto, identity_to_proto, is_name, matches, named, printable
from rpcdist.transport.keys import PROOF_BYTES, SESSION_ID_BYTES, mac

MAX_PURPOSE_BYTES: Final = 600
_MAX_CHANNEL_LENGTH: Final = 300

_ROLE = re.compile(r"[a-z0-9_.\-]{1,32}\Z")

TOKEN_ADVICE = (
    "The job tokens differ. Set RPCDIST_TOKEN to the same value in every process of the job, or give every host the "
    "same token file (RPCDIST_TOKEN_FILE, by default ~/.config/rpcdist/token, mode 0600)."
)

UNTRUSTED_CERTIFICATE: Final = (
    f"did not prove the job token, or shows a certificate of another authority. {TOKEN_ADVICE} Either all processes "
    "use certificates of their own (RpcOptions(tls=TlsOptions(...))), issued by one authority, or none does."
)


class ClientHandshake(HandshakeSide):
    """The side that opened the connection.

    Args:
        token, job, identity: those of this process.
        role: the service that the connection is for ("rpc", "store", "socket" ...).
        purpose: the purpose of the connection within its role; for raw sockets, it begins with the name of the taker.
        channel: the kind of connection, and its two ends as this side sees them.
        expected: the identity that should answer. An empty name, an id of -1 and an incarnation of 0 match any.
        credentials: token, job and identity, with the source of the token and the certificate of this process, if any.
    """

    def __init__(
        self,
        token: bytes,
        job: str,
        role: str,
        identity: Identity,
        *,
        purpose: str = "",
        channel: str = "",
        expected: Identity | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(Credentials(token, job, identity) if credentials is None else credentials)
        if not _ROLE.match(role):
            raise ConfigError(f"a role has 1 to 32 characters of a-z, 0-9, '.', '_' and '-', but it is {role[:64]!r}")
        if not _is_purpose(purpose):
            raise ConfigError(f"a purpose is printable text of up to {MAX_PURPOSE_BYTES} bytes, not {purpose[:80]!r}")
        self._expected = expected
        self._stream_port = 0
        nonce, me = secrets.token_bytes(NONCE_BYTES), identity_to_proto(self._identity)
        self._hello = pb.Hello(version=PROTOCOL_VERSION, nonce=nonce, job=job, role=role, identity=me, purpose=purpose)
        self._hello.channel, self._hello.package = channel, self._package

    @property
    def other_way(self) -> tuple[Identity, int] | None:
        """The server and its TCP port for raw connections; None before it has proven the token, or without a port."""
        if self._peer is None or not self._stream_port or self._state == "failed":
            return None
        return self._peer, self._stream_port

    def start(self) -> pb.Handshake:
        """The first message."""
        if self._state != "start":
            raise ProtocolViolation("the handshake was started twice")
        self._state = "hello sent"
        return pb.Handshake(hello=self._hello)

    def receive(self, message: pb.Handshake) -> pb.Handshake | None:
        """Takes the server's next message.

        Returns:
            The message to send: the proof, or a refusal (then `failure` is set); None if nothing must be sent.

        Raises:
            ProtocolViolation: the message is out of order, too large or malformed. Close the connection.
        """
        step = self._open(message)
        if step == "refusal" and self._state != "start":
            self._refused_by_peer(message.refusal, "the server")
            return None
        if step == "challenge" and self._state == "hello sent":
            return self._receive_challenge(message.challenge)
        if step == "welcome" and self._state == "proof sent":
            return self._receive_welcome(message.welcome)
        raise self._unexpected(step)

    def _receive_challenge(self, challenge: pb.Challenge) -> pb.Handshake:
        if len(challenge.nonce) != NONCE_BYTES or len(challenge.proof) != PROOF_BYTES:
            raise self._violation("the challenge has a nonce or proof of the wrong length")
        if challenge.nonce == self._hello.nonce:
            raise self._violation("the challenge repeats this process's own nonce")
        if challenge.stream_port > 65535:
            raise self._violation("the challenge names an impossible port")
        peer = self._identity_of(challenge)
        self._record(challenge.nonce, challenge.stream_port, self._identity, peer)
        if not hmac.compare_digest(challenge.proof, self._proof(b"server")):
            # The refusal carries only the code and the advice: the server's operator needs them, and they tell an
            # eavesdropper nothing.
            return self._refuse(Code.TOKEN, TOKEN_ADVICE, f"the server did not prove the job token. {TOKEN_ADVICE}")
        if not matches(self._expected, peer):
            return self._refuse(
                Code.WRONG_PEER,
                f"this address was expected to belong to {named(self._expected)}",
                f"{named(peer)} answers at the address of {named(self._expected)}: that process has ended, or two "
                "workers published the same address. Ask the coordinator for its current address.",
            )
        seen = self._hello.channel
        reason = self._certificate_refusal(challenge.certificate, b"server", seen, peer)
        if reason is not None:
            return self._refuse(Code.CERTIFICATE, reason, f"{named(peer)} at this address is refused: {reason}")
        self._peer = peer
        self._stream_port = challenge.stream_port
        self._state = "proof sent"
        shown = self._shown_certificate(b"client", seen)
        return pb.Handshake(proof=pb.Proof(proof=self._proof(b"client"), certificate=shown))

    def _receive_welcome(self, welcome: pb.Welcome) -> pb.Handshake | None:
        if len(welcome.session_id) != SESSION_ID_BYTES or len(welcome.proof) != PROOF_BYTES:
            raise self._violation("the welcome has a session id or proof of the wrong length")
        session = self._session_keys(welcome.session_id)
        if not hmac.compare_digest(welcome.proof, mac(session.key, b"rpcdist welcome")):
            text = "the server's welcome was changed in transit, or belongs to another session"
            return self._refuse(Code.UNSPECIFIED, text)
        self._session = session
        self._state = "done"
        return None


class ServerHandshake(HandshakeSide):
    """The side that accepted the connection.

    Args:
        channel: the kind of connection and its two ends as this side sees them; the client must see the same. It may be
            a callable, called when the hello has arrived: on a raw connection, TLS starts after the accept.
        stream_port: the port where this process accepts raw connections, which is sent to the client; 0 for none.
        accept: policy, called once with the hello of a proven peer: returns None to accept, or the reason to refuse,
            which is sent to the peer.
    """

    def __init__(
        self,
        credentials: Credentials,
        accept: Callable[[pb.Hello], str | None] | None = None,
        *,
        channel: str | Callable[[], str] = "",
        stream_port: int = 0,
    ) -> None:
        super().__init__(credentials)
        self._accept = accept
        self._channel = channel
        self._stream_port = stream_port
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def role(self) -> str:
        """The role that the proven peer asks for."""
        self.peer  # noqa: B018  (raises unless the peer is proven)
        return self._hello.role

    @property
    def purpose(self) -> str:
        """The purpose that the proven peer states for the taker of its role."""
        self.peer  # noqa: B018  (raises unless the peer is proven)
        return self._hello.purpose

    def receive(self, message: pb.Handshake) -> pb.Handshake | None:
        """Takes the client's next message.

        Returns:
            The message to send: challenge, welcome or a refusal (then `failure` is set); None if the client refused.

        Raises:
            ProtocolViolation: the message is out of order, too large or malformed. Close the connection.
        """
        step = self._open(message)
        if step == "refusal" and self._state != "start":
            name = printable(self._hello.identity.name)
            self._refused_by_peer(message.refusal, f"the client, which calls itself {name!r},")
            return None
        if step == "hello" and self._state == "start":
            return self._receive_hello(message.hello)
        if step == "proof" and self._state == "challenge sent":
            return self._receive_proof(message.proof)
        raise self._unexpected(step)

    def _receive_hello(self, hello: pb.Hello) -> pb.Handshake:
        if hello.version != PROTOCOL_VERSION:  # first: another version may fill the other fields differently
            return self._refuse(
                Code.VERSION,
                f"the server speaks version {PROTOCOL_VERSION} of the handshake, the client version {hello.version}. "
                "Install the same version of rpcdist on both.",
            )
        if len(hello.nonce) != NONCE_BYTES:
            raise self._violation(f"the hello has a nonce of {len(hello.nonce)} bytes, not {NONCE_BYTES}")
        if not _ROLE.match(hello.role) or (hello.job and not is_name(hello.job)):
            raise self._violation("the hello has a malformed role or job")
        if not _is_purpose(hello.purpose) or max(len(hello.channel), len(hello.package)) > _MAX_CHANNEL_LENGTH:
            raise self._violation("the hello has a malformed purpose, channel or version")
        peer = self._identity_of(hello)
        job = self._credentials.job
        if hello.job != job:
            return self._refuse(
                Code.JOB,
                f"the server belongs to job {job!r}, the client to job {hello.job!r}. Give both the same job "
                "name, or use another port for one of the jobs.",
            )
        self._hello = hello
        self._record(self._nonce, self._stream_port, peer, self._identity)
        self._peer = peer
        self._state = "challenge sent"
        me, shown = identity_to_proto(self._identity), self._shown_certificate(b"server", self._seen_channel())
        challenge = pb.Challenge(nonce=self._nonce, proof=self._proof(b"server"), identity=me, certificate=shown)
        challenge.stream_port = self._stream_port
        return pb.Handshake(challenge=challenge)

    def _receive_proof(self, proof: pb.Proof) -> pb.Handshake:
        if len(proof.proof) != PROOF_BYTES:
            raise self._violation("the proof has the wrong length")
        who = f"the client, which calls itself {self._hello.identity.name!r},"
        if not hmac.compare_digest(proof.proof, self._proof(b"client")):
            return self._refuse(Code.TOKEN, TOKEN_ADVICE, f"{who} did not prove the job token. {TOKEN_ADVICE}")
        if self._hello.package != self._package:
            return self._refuse(
                Code.VERSION,
                f"the server runs rpcdist {self._package}, the client, which calls itself "
                f"{self._hello.identity.name!r}, rpcdist {printable(self._hello.package)}. Install the same version "
                "for all processes of the job.",
            )
        channel = self._seen_channel()
        if self._hello.channel != channel:
            return self._refuse(
                Code.CHANNEL,
                f"the client sees the connection as {printable(self._hello.channel)!r}, the server as "
                f"{channel!r}: a process or network between them relays it or translates addresses",
            )
        client = identity_from_proto(self._hello.identity)
        reason = self._certificate_refusal(proof.certificate, b"client", channel, client)
        if reason is not None:
            return self._refuse(Code.CERTIFICATE, reason, f"{who} is refused: {reason}")
        reason = None if self._accept is None else self._accept(self._hello)
        if reason is not None:
            return self._refuse(Code.POLICY, reason, f"{who} is not accepted: {reason}")
        self._session = self._session_keys(secrets.token_bytes(SESSION_ID_BYTES))
        self._state = "done"
        proof_bytes = mac(self._session.key, b"rpcdist welcome")
        return pb.Handshake(welcome=pb.Welcome(session_id=self._session.session_id, proof=proof_bytes))

    def _seen_channel(self) -> str:
        return self._channel() if callable(self._channel) else self._channel


def _is_purpose(purpose: str) -> bool:
    return (not purpose or purpose.isprintable()) and len(purpose.encode()) <= MAX_PURPOSE_BYTES
