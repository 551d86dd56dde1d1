"""Unary gRPC calls: their proof that they belong to a session, and large messages cut into pieces.

The client adds three metadata entries to each call: the session's id, a counter, and a keyed hash of method and
counter. The server knows the keys of its open sessions, and accepts each counter once.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any, Final

from google.protobuf.message import Message

from rpcdist.errors import ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport._framing.frames import CHUNK_BYTES
from rpcdist.transport.keys import ReplayWindow, SessionKeys, request_proof, verify_request

PACKAGE: Final = "rpcdist"
SESSION_PATH: Final = f"/{PACKAGE}.Rpc/Session"  # needs no such proof: its handshake is on the stream itself
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
        ProtocolViolation: the pieces exceed the limit; the rest is not read.
        DecodeError: a message is not a piece.
    """
    kind: Any = piece_type
    parts: list[bytes] = []
    size_bytes = 0
    async for piece in pieces:
        parts.append(kind.FromString(piece).data)
        size_bytes += len(parts[-1])
        if size_bytes > LARGEST_JOINED_BYTES:
            raise ProtocolViolation(f"more than {LARGEST_JOINED_BYTES} bytes")
    return b"".join(parts)
