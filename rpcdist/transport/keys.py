"""Keys of a session after the handshake, proofs of its unary calls, and the replay window.

Pure, like handshake.py. `mac` makes all keyed hashes of the package, so that no two uses can be confused: every input
starts with its own label, and every field is preceded by its length.

A unary gRPC call proves that it belongs to a session: the client adds the session's id, a counter, and a keyed hash of
method and counter as metadata. The server knows the keys of its open sessions, and accepts each counter once. Large
messages are cut into pieces.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from rpcdist.errors import ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport._framing.frames import CHUNK_BYTES

PROOF_BYTES: Final = 32
SESSION_ID_BYTES: Final = 16


class SessionKeys(NamedTuple):
    """The keys that both sides have after the handshake.

    Attributes:
        session_id: 16 bytes; public; identifies the session.
        key: 32 bytes; secret, never sent. Unary calls use it to prove that they belong to the session.
    """

    session_id: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"SessionKeys({self.session_id.hex()[:8]}...)"  # the key stays out of logs and tracebacks


def request_proof(key: bytes, method: str, counter: int) -> bytes:
    """Proves that a unary call belongs to a session.

    Args:
        key: `SessionKeys.key`.
        method: the full gRPC method, such as "/rpcdist.Store/Get".
        counter: 1 for the session's first call, then counting up; never used twice.

    Returns:
        32 bytes for the call's metadata, next to the session id and the counter.
    """
    return mac(key, b"rpcdist request", framed(method.encode()), counter.to_bytes(8, "big"))


def verify_request(key: bytes, method: str, counter: int, proof: bytes) -> bool:
    """True if `proof` is the one that `request_proof` makes; compared in constant time.

    Call `ReplayWindow.accept` only after this: an outsider must not be able to use up counters.
    """
    return 0 < counter < 2**64 and hmac.compare_digest(proof, request_proof(key, method, counter))


class ReplayWindow:
    """Accepts every counter once, in any order within a sliding window; for one thread.

    Counters older than the window are refused, seen or not. One per session, at the server.
    """

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._highest = 0
        self._seen = 1  # bit i: highest - i was seen; counter 0 counts as seen

    def accept(self, counter: int) -> bool:
        """True the first time that `counter` comes, False for a replay or one that has left the window."""
        ahead = counter - self._highest
        if ahead > 0:
            kept = self._seen << ahead if ahead < self._size else 0  # avoids a huge shift for a huge jump
            self._seen = (kept | 1) & ((1 << self._size) - 1)
            self._highest = counter
            return True
        if counter <= 0 or -ahead >= self._size or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of the framed parts; the first part is a label that names the use."""
    return hmac.digest(key, framed(*parts), "sha256")


def framed(*fields: bytes) -> bytes:
    """Fields preceded by their lengths, so that two different lists never give the same bytes."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


PACKAGE: Final = "rpcdist"
REFUSED: Final = "refused the call"
"""Part of the error of a unary call that its server did not answer, while the connection is still open."""
SESSION_PATH: Final = f"/{PACKAGE}.Rpc/Session"  # needs no such proof: its stream begins with the handshake
SESSION_KEY: Final = "rpcdist-session-bin"
COUNTER_KEY: Final = "rpcdist-counter"
PROOF_KEY: Final = "rpcdist-proof-bin"
_MAX_DIGITS: Final = 18  # checked before `int`, which takes quadratic time

Metadata = tuple[tuple[str, str | bytes], ...]


def request_metadata(keys: SessionKeys, counter: int, path: str) -> Metadata:
    """The metadata of a call of the method `path`: the `counter`th of its session, from 1."""
    proof = request_proof(keys.key, path, counter)
    return (SESSION_KEY, keys.session_id), (COUNTER_KEY, str(counter)), (PROOF_KEY, proof)


class ProvenSessions:
    """The server's side: the open sessions by id. Used on one thread."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, tuple[bytes, Identity, ReplayWindow]] = {}  # key, peer, calls so far

    def add(self, keys: SessionKeys, peer: Identity) -> None:
        self._sessions[keys.session_id] = keys.key, peer, ReplayWindow()

    def remove(self, keys: SessionKeys) -> None:
        del self._sessions[keys.session_id]

    def peer_of(self, path: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity | None:
        """The peer whose session this metadata proves for a call of `path`; None if it proves none."""
        values = dict(metadata)
        session_id, counter, proof = values.get(SESSION_KEY), values.get(COUNTER_KEY), values.get(PROOF_KEY, b"")
        session = self._sessions.get(session_id) if isinstance(session_id, bytes) else None
        if session is None or not isinstance(counter, str) or not isinstance(proof, bytes):
            return None
        if not (counter.isascii() and counter.isdigit() and len(counter) <= _MAX_DIGITS):
            return None
        key, peer, window = session
        if not verify_request(key, path, int(counter), proof):
            return None
        return peer if window.accept(int(counter)) else None


# ---------------------------------------------------------------- messages beyond gRPC's limit, cut into pieces

LARGEST_UNCUT_BYTES: Final = 2 << 20
"""The size that fits into one message of gRPC with its header; see the limit of the channels."""
LARGEST_JOINED_BYTES: Final = 160 << 20
"""Limit of all pieces of a message together, so that no peer can fill the memory of a process."""


def cut(data: bytes, piece_type: type[Message]) -> Iterator[bytes]:
    """The serialized pieces of `data`, at least one. A piece is a message of a type with the field `data`."""
    kind: Any = piece_type
    for start in range(0, max(1, len(data)), CHUNK_BYTES):
        yield kind(data=data[start : start + CHUNK_BYTES]).SerializeToString()


async def joined(pieces: AsyncIterable[bytes], piece_type: type[Message]) -> bytes:
    """The data of which `cut` made the pieces.

    Raises:
        ProtocolViolation: the pieces exceed the limit, or are too many for their bytes; the rest is not read.
        DecodeError: a message is not a piece.
    """
    kind: Any = piece_type
    parts: list[bytes] = []
    size_bytes = 0
    async for piece in pieces:
        if parts and len(parts[-1]) < CHUNK_BYTES:  # each piece takes memory, even an empty one
            raise ProtocolViolation(f"a piece of {len(parts[-1])} bytes is not the last of its message")
        parts.append(kind.FromString(piece).data)
        size_bytes += len(parts[-1])
        if size_bytes > LARGEST_JOINED_BYTES:
            raise ProtocolViolation(f"the message has more than {LARGEST_JOINED_BYTES} bytes")
    return b"".join(parts)
