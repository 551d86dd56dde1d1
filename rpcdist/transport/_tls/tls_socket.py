"""A connected TCP socket that speaks TLS, with the few methods of a socket that its users need, and never blocking.

The thread that writes encrypts, and the thread that reads decrypts. OpenSSL reads and writes the socket itself, so it
can leave both to the kernel where that knows TLS (`ssl.OP_ENABLE_KTLS`). Its state is only touched under a lock: one
thread may read while another writes. TLS 1.3 only: nothing is negotiated again, and new keys need no word of the owner.

[Note: sent and owed] OpenSSL cannot take back what it has encrypted. When the socket does not take all of a piece, its
bytes are *owed*: they are not reported as sent, and the caller comes again with the same bytes, perhaps with more
behind them. So the caller waits for room in the socket, as with a plain one.

[Note: buffered] OpenSSL decrypts whole records. When the caller took a part of one, no poll of the socket tells of the
rest: a thread that is about to wait has to look at `has_buffered` first.
"""

from __future__ import annotations

import errno
import signal
import socket
import ssl
import struct
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` makes an enum of every handler
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from rpcdist.transport import fork
from rpcdist.transport._tls.certificate import PEER_NAME, fingerprint

NO_SIGPIPE: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
"""The flag for every `send` and `sendmsg` to another process, whose end may be gone: that is an `OSError`, also where
the program lets SIGPIPE end it (`signal.signal(SIGPIPE, SIG_DFL)`, for the sake of its standard output)."""

P = ParamSpec("P")
T = TypeVar("T")

_SIGPIPE: Final = int(getattr(signal, "SIGPIPE", 0))
_RECORD_BYTES: Final = 16 << 10  # of plain text, at most
_PIECE_BYTES: Final = 128 << 10  # encrypted with one call of OpenSSL
_HANDSHAKE_BYTES: Final = 32 << 10  # of the peer, in all; 8 certificates with keys of 4096 bits have 16 KiB
_RECEIVED_BYTES: Final = struct.Struct("=128xQ")  # tcpi_bytes_received of struct tcp_info
_SOL_TLS: Final = 282
_TLS_TX: Final = 1
_TLS_RX: Final = 2
_CIPHER_BYTES: Final = 64  # of the kernel's description of a key, at most


class TlsSocket:
    """One end of a connection, before and after its TLS handshake.

    One thread at a time may read, and one at a time write; these may be two. Errors are `OSError`, as of a socket.

    Attributes:
        has_buffered: whether bytes have been decrypted that `recv_into` has not given away yet.
        num_owed: how many bytes of a `sendmsg` were encrypted without being reported as sent.

    Args:
        raw: connected; it is closed with this object, and must not be used any more.
        server_side: whether this side accepted the connection.
        own_fingerprint: of the certificate that `context` shows.

    Raises:
        OSError: the connection has broken already; `raw` is closed.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, server_side: bool, own_fingerprint: str) -> None:
        raw.setblocking(False)
        self.family = raw.family
        self.has_buffered = False
        self.num_owed = 0  # [Note: sent and owed]
        self._server_side = server_side
        self._own_fingerprint = own_fingerprint
        name = None if server_side else PEER_NAME
        self._tls = context.wrap_socket(raw, server_side, do_handshake_on_connect=False, server_hostname=name)
        fork.note_socket(self._tls)
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # with a buffer
        self._lock = threading.Lock()  # of OpenSSL's state
        self._is_broken = False
        self._failure: OSError | None = None  # of reading; OpenSSL says it once
        self.has_unsent = False  # of the handshake, which waits for room in the socket

    def __repr__(self) -> str:
        return f"<TlsSocket {self._tls!r} [{self.num_owed} B owed]>"

    def __enter__(self) -> TlsSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ as a socket

    def fileno(self) -> int:
        return self._tls.fileno()

    def setblocking(self, flag: bool) -> None:
        """Only False is possible."""
        if flag:
            raise ValueError("a TlsSocket never blocks")

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._tls.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._tls.getsockopt(level, option, size)

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)  # that of SSLSocket forgets TLS: a reader would get ciphertext

    def close(self) -> None:
        """Says so to the peer, if the socket takes it, and closes."""
        with self._lock:
            if self._tls.fileno() >= 0 and not self._is_broken:
                # Among them SSLWantReadError: the peer need not answer.
                with suppress(OSError, ValueError):
                    _without_sigpipe(self._tls.unwrap)
            self._tls.close()

    # ------------------------------------------------------------ the handshake

    def shake_hands(self) -> bool:
        """Goes on with the handshake as far as possible.

        Returns:
            True when it is done here. False: wait until the socket is readable, or writable if `has_unsent`.

        Raises:
            ssl.SSLError: it failed; the peer is told why.
            OSError: the connection broke.
        """
        with self._lock:
            self.has_unsent = False
            try:
                _without_sigpipe(self._tls.do_handshake)
                return True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLWantWriteError:
                self.has_unsent = True
        if self._num_received() > _HANDSHAKE_BYTES:
            raise OSError(f"the peer sent more than {_HANDSHAKE_BYTES} bytes before its TLS handshake was done")
        return False

    def ends(self) -> str:
        """The certificates of both ends, the client's first, as both sides name them. After the handshake."""
        shown = self._tls.getpeercert(binary_form=True)
        peer = fingerprint(shown) if shown else "none"
        ends = (peer, self._own_fingerprint) if self._server_side else (self._own_fingerprint, peer)
        return f"tls, from certificate {ends[0]} to {ends[1]}"

    def is_left_to_kernel(self, direction: int) -> bool:
        """Whether the kernel encrypts, or decrypts, itself. After the handshake."""
        try:
            self._tls.getsockopt(_SOL_TLS, direction, _CIPHER_BYTES)
        except OSError:  # it knows no TLS, or has not been given the keys
            return False
        return True

    def _num_received(self) -> int:
        """The bytes that the kernel has taken of the peer; 0 where the socket is none of TCP."""
        if self.family == socket.AF_UNIX:
            return 0
        info = self._tls.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_BYTES.size)
        return int(_RECEIVED_BYTES.unpack(info)[0]) if len(info) == _RECEIVED_BYTES.size else 0

    # ------------------------------------------------------------ reading

    def recv_into(self, place: memoryview) -> int:
        """As of a socket: raises `BlockingIOError` where nothing has come, and returns 0 at the end."""
        got, size = 0, len(place)
        with self._lock:
            self._check_open()
            if self._failure is not None:
                raise self._failure
            try:
                while got < size:  # a record at a time
                    num_bytes = _without_sigpipe(self._read, size - got, place[got:])  # it answers alerts, new keys
                    if not num_bytes:
                        break  # users that need to know whether a peer meant to end say so in their own frames
                    got += num_bytes
                self.has_buffered = self._tls.pending() > 0
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.has_buffered = False
                if not got:
                    raise BlockingIOError from None
            except OSError as exc:
                self._failure = exc
                if not got:
                    raise
                self.has_buffered = True  # the next call says it
        return got

    def recv(self, size: int) -> bytes:
        """As of a socket."""
        data = bytearray(size)
        return bytes(data[: self.recv_into(memoryview(data))])

    # ------------------------------------------------------------ writing

    def send(self, data: memoryview | bytes, flags: int = NO_SIGPIPE) -> int:
        """See `sendmsg`."""
        return self.sendmsg((data,))

    def sendmsg(
        self, parts: Sequence[memoryview | bytes], ancillary: Sequence[object] = (), flags: int = NO_SIGPIPE
    ) -> int:
        """As of a socket, with no other flag. After `BlockingIOError`, or fewer bytes than all, come with the rest."""
        if ancillary:
            raise OSError("descriptors cannot be sent over TLS")
        with self._lock:
            self._check_open()
            if self._is_broken:
                raise OSError("the connection was interrupted while something was sent")
            pieces = _pieces([memoryview(part) for part in parts], self.num_owed)
            self._is_broken = True  # unless what follows comes to its end: a record must not be sent twice, or half
            sent = 0
            for piece in pieces:
                self.num_owed = len(piece)
                try:
                    _without_sigpipe(self._tls.write, piece)
                except ssl.SSLWantWriteError:
                    break
                self.num_owed = 0
                sent += len(piece)
            self._is_broken = False
        if pieces and not sent:
            raise BlockingIOError
        return sent

    def _check_open(self) -> None:
        if self._tls.fileno() < 0:
            raise OSError(errno.EBADF, "the connection was closed")


StreamSocket = socket.socket | TlsSocket
"""A connected stream that never blocks, plain or with TLS. Both have `fileno`, `recv`, `recv_into`, `send`, `sendmsg`
and `close`; `has_buffered` and `num_owed` say what differs."""


def _without_sigpipe(operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `NO_SIGPIPE`, for OpenSSL, which passes no flags: the signal is held back, and taken if it came."""
    if not NO_SIGPIPE or getsignal(_SIGPIPE) == signal.SIG_IGN:  # as Python starts
        return operation(*args, **kwargs)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        return operation(*args, **kwargs)
    finally:
        signal.sigtimedwait({signal.SIGPIPE}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_buffered(connection: StreamSocket) -> bool:
    """Whether something can be read of which no poll tells; look before each wait. [Note: buffered]"""
    return isinstance(connection, TlsSocket) and connection.has_buffered


def num_owed(connection: StreamSocket) -> int:
    """How many bytes that were not reported as sent have to be sent next. [Note: sent and owed]"""
    return connection.num_owed if isinstance(connection, TlsSocket) else 0


def encrypted_by(connection: StreamSocket) -> str | None:
    """The part of the system that encrypts and decrypts, for a log; None for a plain connection."""
    if not isinstance(connection, TlsSocket):
        return None
    sends, receives = (
        "the kernel" if connection.is_left_to_kernel(direction) else "OpenSSL" for direction in (_TLS_TX, _TLS_RX)
    )
    return sends if sends == receives else f"{sends}, and decrypted by {receives}"


def _pieces(parts: Sequence[memoryview], num_owed: int) -> list[memoryview | bytes]:
    """The pieces to encrypt at once, in order: small parts joined, large parts as they lie; owed bytes come first.

    Raises:
        OSError: there are fewer bytes than are owed.
    """
    pieces: list[memoryview | bytes] = []
    if num_owed:
        owed, parts = _split(parts, num_owed)
        if sum(map(len, owed)) < num_owed:
            raise OSError(f"{num_owed} bytes have been encrypted, and must be sent first")
        pieces.append(owed[0] if len(owed) == 1 else b"".join(owed))
    small: list[memoryview] = []
    num_small = 0
    for part in parts:
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


def _split(parts: Sequence[memoryview], num_bytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first bytes of the parts, and the others."""
    first: list[memoryview] = []
    rest: list[memoryview] = []
    for part in parts:
        first.append(part[:num_bytes])
        rest.append(part[num_bytes:])
        num_bytes = max(0, num_bytes - len(part))
    return [part for part in first if part], [part for part in rest if part]
