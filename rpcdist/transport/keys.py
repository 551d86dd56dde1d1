"""Keys of a session after the handshake, proofs of its unary calls, and the replay window.

Pure, as is handshake.py. `mac` makes all keyed hashes of the package, so that no two uses can be confused: every input
starts with its own label, and every field is preceded by its length.
"""

from __future__ import annotations

import hmac
from typing import Final, NamedTuple

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

    __slots__ = ("_highest", "_seen", "_size")

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
