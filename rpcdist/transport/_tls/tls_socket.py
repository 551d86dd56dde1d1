"""A connected TCP socket that speaks TLS, with the few methods of a socket that channels use, and never blocking.

Unlike `ssl.SSLSocket`, one thread may read while another writes: OpenSSL's state is only touched under a lock, and what
it reads and writes lies in memory. TLS 1.3 only: nothing is negotiated anew, and new keys need no word of the owner.

[Note: sent and owed] Bytes that were encrypted cannot be taken back. When the socket does not take all of a piece, its
bytes are *owed*: they are not reported as sent, the caller comes again with them, and only what is left of the
ciphertext is sent then. So a socket that has room is where the caller waits, as with a plain one.

[Note: buffered] A receive takes more from the socket than it gives to the caller. What is left makes no socket
readable: whoever waits for the socket has to look at `has_buffered` first.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from rpcdist.transport._tls.certificate import PEER_NAME, fingerprint

__all__ = ["TlsSocket"]

_RECORD_BYTES: Final = 16 << 10  # of plain text, at most
_CIPHERTEXT_BYTES: Final = 128 << 10  # taken from the socket at once
_HANDSHAKE_PIECE_BYTES: Final = 4 << 10  # the same during the handshake, when a stranger may be at the other end
_HANDSHAKE_BYTES: Final = 32 << 10  # of the peer, in all; 8 certificates with keys of 4096 bits have 16 KiB
_PIECE_BYTES: Final = 128 << 10  # encrypted before the socket is asked whether it takes it


class TlsSocket:
    """One end of a connection, before and after its TLS handshake.

    One thread at a time may read, and one at a time write; these may be two. Errors are `OSError`, as of a socket.

    Attributes:
        family: of the socket.
        has_buffered: whether bytes have been decrypted that `recv_into` has not given away yet.

    Args:
        raw: connected; owned from now on.
        context: certificates.
        server_side: whether this side accepted the connection.
        own_fingerprint: of the certificate that `context` shows.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, server_side: bool, own_fingerprint: str) -> None:
        raw.setblocking(False)
        self.family = raw.family
        self.has_buffered = False
        self._raw = raw
        self._server_side = server_side
        self._own_fingerprint = own_fingerprint
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if server_side else PEER_NAME
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side, name)
        self._read_tls: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # with a buffer
        self._lock = threading.Lock()  # of OpenSSL's state and of what is to be sent
        self._unsent = memoryview(b"")  # ciphertext
        self._num_owed = 0  # [Note: sent and owed]
        self._is_broken = False
        self._ciphertext = memoryview(bytearray(_HANDSHAKE_PIECE_BYTES))
        self._handshake_bytes = 0  # that came until it was done
        self._decrypted = memoryview(b"")  # [Note: buffered]
        self._failure: ssl.SSLError | None = None  # of what comes behind that; OpenSSL says it once

    def __repr__(self) -> str:
        return f"<TlsSocket {self._raw!r} [{len(self._unsent)} B to be sent]>"

    # ------------------------------------------------------------ as a socket

    def fileno(self) -> int:
        return self._raw.fileno()

    def setblocking(self, flag: bool) -> None:
        """Only False is possible."""
        if flag:
            raise ValueError("a TlsSocket never blocks")

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._raw.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._raw.getsockopt(level, option, size)

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        """Says so to the peer, if the socket takes it, and closes."""
        with self._lock:
            if self._raw.fileno() >= 0 and not self._is_broken:
                with suppress(OSError):  # among them SSLWantReadError: the peer need not answer
                    self._tls.unwrap()
                with suppress(OSError):
                    self._send_ciphertext()
            self._raw.close()

    # ------------------------------------------------------------ the handshake

    def shake_hands(self) -> bool:
        """Goes on with the handshake as far as possible.

        Returns:
            True when it is done here. False: wait until the socket is readable, or writable if `has_unsent`.

        Raises:
            ssl.SSLError: it failed; the peer is told why.
            OSError: the connection broke.
        """
        while True:
            is_done = False
            with self._lock:
                try:
                    self._tls.do_handshake()
                    is_done = True
                except ssl.SSLWantReadError:
                    pass
                finally:
                    is_sent = self._send_ciphertext()
            if is_done and len(self._ciphertext) < _CIPHERTEXT_BYTES:
                self._ciphertext = memoryview(bytearray(_CIPHERTEXT_BYTES))
            if is_done or not is_sent:
                return is_done and is_sent
            if self._handshake_bytes > _HANDSHAKE_BYTES:
                raise OSError(f"the peer sent more than {_HANDSHAKE_BYTES} bytes before its TLS handshake was done")
            if (num_bytes := self._feed()) is None:
                return False
            self._handshake_bytes += num_bytes

    @property
    def has_unsent(self) -> bool:
        """Whether ciphertext waits for room in the socket."""
        return len(self._unsent) > 0 or self._outgoing.pending > 0

    def ends(self) -> str:
        """The certificates of both ends, the client's first, as both sides name them. After the handshake."""
        shown = self._tls.getpeercert(binary_form=True)
        peer = fingerprint(shown) if shown else "none"
        ends = (peer, self._own_fingerprint) if self._server_side else (self._own_fingerprint, peer)
        return f"tls, from certificate {ends[0]} to {ends[1]}"

    # ------------------------------------------------------------ reading

    def recv_into(self, place: memoryview) -> int:
        """As of a socket: raises `BlockingIOError` where nothing has come, and returns 0 at the end."""
        if self._decrypted:
            num_bytes = min(len(place), len(self._decrypted))
            place[:num_bytes] = self._decrypted[:num_bytes]
            self._decrypted = self._decrypted[num_bytes:]
            if not self._decrypted:
                with self._lock:
                    self._look_ahead()
            return num_bytes
        while True:
            with self._lock:
                got = self._decrypt(place)
                if got is not None:
                    self._look_ahead()
                    return got
            if self._feed() is None:
                raise BlockingIOError

    def _feed(self) -> int | None:
        """Takes ciphertext from the socket; returns how many bytes, 0 at the end, and None if there is none yet."""
        try:
            num_bytes = self._raw.recv_into(self._ciphertext)
        except (BlockingIOError, InterruptedError):
            return None
        with self._lock:
            if num_bytes:
                self._incoming.write(self._ciphertext[:num_bytes])
            else:
                self._incoming.write_eof()
        return num_bytes

    def _decrypt(self, place: memoryview) -> int | None:
        """Fills the place as far as the ciphertext goes; None if that yields nothing, 0 at the end."""
        got = 0
        try:
            if self._failure is not None:
                raise self._failure
            while got < len(place):
                num_bytes = self._read_tls(len(place) - got, place[got:])
                if not num_bytes:
                    break
                got += num_bytes
        except ssl.SSLWantReadError:
            if not got:
                self._answer()
                return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass  # who needs to know whether a peer meant to end says so in its own frames
        self._answer()
        return got

    def _answer(self) -> None:
        """OpenSSL answers a peer that changes its keys, or breaks the rules."""
        if self._outgoing.pending:
            with suppress(OSError):  # what has come counts all the same, and who sends hears of it
                self._send_ciphertext()

    def _look_ahead(self) -> None:
        """Sees whether the ciphertext holds more whole records. [Note: buffered]"""
        if not self._decrypted and self._incoming.pending and not self._tls.pending():
            try:
                self._decrypted = memoryview(self._tls.read(_RECORD_BYTES))
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as exc:
                self._failure, self.has_buffered = exc, True
                return
        self.has_buffered = bool(self._decrypted) or self._tls.pending() > 0

    # ------------------------------------------------------------ writing

    def sendmsg(self, parts: Sequence[memoryview | bytes], ancillary: Sequence[object] = ()) -> int:
        """As of a socket. After `BlockingIOError`, or fewer bytes than all, come again with the rest alone."""
        if ancillary:
            raise OSError("descriptors cannot be sent over TLS")
        with self._lock:
            if self._is_broken:
                raise OSError("the connection was interrupted while something was sent")
            self._is_broken = True  # unless what follows comes to its end: a record must not be sent twice, or half
            sent = self._send_plain([memoryview(part) for part in parts])
            self._is_broken = False
        if not sent and any(len(part) for part in parts):
            raise BlockingIOError
        return sent

    def _send_plain(self, parts: list[memoryview]) -> int:
        if not self._send_ciphertext():
            return 0
        sent, self._num_owed = self._num_owed, 0
        for piece in _pieces(parts, sent):
            rest = memoryview(piece)
            while rest:
                rest = rest[self._tls.write(rest) :]
            if not self._send_ciphertext():
                self._num_owed = len(piece)
                break
            sent += len(piece)
        return sent

    def _send_ciphertext(self) -> bool:
        """Sends what lies there; whether all of it went."""
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                self._unsent = self._unsent[self._raw.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                return False
        return True


def _pieces(parts: list[memoryview], skipped: int) -> list[memoryview | bytes]:
    """What is to be encrypted at once, in order, without the first bytes: small parts joined, large as they lie."""
    pieces: list[memoryview | bytes] = []
    small: list[memoryview] = []
    num_small = 0
    for part in parts:
        if skipped:
            skipped, part = max(0, skipped - len(part)), part[skipped:]
        if num_small and num_small + len(part) > _RECORD_BYTES:
            room = _RECORD_BYTES - num_small
            pieces.append(b"".join([*small, part[:room]]))
            small, num_small, part = [], 0, part[room:]
        if len(part) <= _RECORD_BYTES:
            small.append(part)
            num_small += len(part)
        else:
            pieces += [part[at : at + _PIECE_BYTES] for at in range(0, len(part), _PIECE_BYTES)]
    if num_small:
        pieces.append(small[0] if len(small) == 1 else b"".join(small))
    return pieces
