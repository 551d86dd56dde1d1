"""How a unary gRPC call proves that it belongs to a session whose handshake is done.

The client adds three metadata entries to each call: the session's id, a counter, and a keyed hash of method and
counter. The server knows the keys of its open sessions, and accepts each counter once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from rpcdist.ids import Identity
from rpcdist.transport.keys import ReplayWindow, SessionKeys, request_proof, verify_request

PACKAGE: Final = "rpcdist"
SESSION_PATH: Final = f"/{PACKAGE}.Rpc/Session"  # needs no such proof: the handshake is on the stream itself
SESSION_KEY: Final = "rpcdist-session-bin"
COUNTER_KEY: Final = "rpcdist-counter"
PROOF_KEY: Final = "rpcdist-proof-bin"
_MAX_DIGITS: Final = 18  # checked before `int`, whose time grows with the square of the length

Metadata = tuple[tuple[str, str | bytes], ...]


class RequestProver:
    """The client's side: makes the metadata of the calls of one session."""

    def __init__(self, keys: SessionKeys) -> None:
        self._keys = keys
        self._counter = itertools.count(1)

    def metadata(self, path: str) -> Metadata:
        """For the next call of the method `path`."""
        counter = next(self._counter)
        proof = request_proof(self._keys.key, path, counter)
        return (SESSION_KEY, self._keys.session_id), (COUNTER_KEY, str(counter)), (PROOF_KEY, proof)


class _ProvenSession:
    __slots__ = ("key", "peer", "window")

    def __init__(self, key: bytes, peer: Identity) -> None:
        self.key = key
        self.peer = peer
        self.window = ReplayWindow()


class ProvenSessions:
    """The server's side: the open sessions, by their ids. Runs on one thread."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, _ProvenSession] = {}

    def add(self, keys: SessionKeys, peer: Identity) -> None:
        self._sessions[keys.session_id] = _ProvenSession(keys.key, peer)

    def remove(self, keys: SessionKeys) -> None:
        del self._sessions[keys.session_id]

    def peer_of(self, path: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity | None:
        """Whose call of the method `path` has this metadata; None if nothing proves it."""
        values = dict(metadata)
        session_id, counter, proof = values.get(SESSION_KEY), values.get(COUNTER_KEY), values.get(PROOF_KEY, b"")
        session = self._sessions.get(session_id) if isinstance(session_id, bytes) else None
        if session is None or not isinstance(counter, str) or not isinstance(proof, bytes):
            return None
        if not (counter.isascii() and counter.isdigit() and len(counter) <= _MAX_DIGITS):
            return None
        if not verify_request(session.key, path, int(counter), proof):
            return None
        return session.peer if session.window.accept(int(counter)) else None
