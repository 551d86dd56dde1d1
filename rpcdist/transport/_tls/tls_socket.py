"""A connected TCP socket with TLS, which never blocks and has only the methods of a socket that its users need.

The writing thread encrypts, and the reading thread decrypts. OpenSSL reads and writes the socket itself, so it can
leave both to the kernel if the kernel supports TLS (`ssl.OP_ENABLE_KTLS`). Its state is accessed only under a lock: one
thread may read while another writes. TLS 1.3 only: there is no renegotiation, and key updates need no action of the
owner.

[Note: sent and owed] OpenSSL cannot take back what it has encrypted. If the socket does not take all of a piece, the
bytes of the piece are *owed*: they are not reported as sent, and the caller must pass the same bytes again, possibly
followed by more. So the caller waits for room in the socket, as with a plain one.

[Note: buffered] OpenSSL decrypts whole records. If the caller took only a part of one, no poll of the socket reports
the rest, so a thread that is about to wait must check `has_buffered` first.
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

NO_SIGPIPE: Final = int(socket.MSG_NOSIGNAL)
"""The flag for every `send` and `sendmsg` to another process. If that process has ended, the call raises `OSError`,
even if the program lets SIGPIPE end it (`signal.signal(SIGPIPE, SIG_DFL)`, for the sake of its standard output)."""

P = ParamSpec("P")
T = TypeVar("T")

_SIGPIPE: Final = int(getattr(signal, "SIGPIPE", 0))
_RECORD_BYTES: Final = 16 << 10  # limit of the plain text in a record
_PIECE_BYTES: Final = 128 << 10  # encrypted with one call of OpenSSL
_HANDSHAKE_BYTES: Final = 32 << 10  # limit for the peer; 8 certificates with keys of 4096 bits have 16 KiB
_RECEIVED_BYTES: Final = struct.Struct("=128xQ")  # tcpi_bytes_received of struct tcp_info
_TCP_CLOSE: Final = 7  # a state in struct tcp_info; after the peer's end it is another one until this side closes
_SOL_TLS: Final = 282
_TLS_TX: Final = 1
_TLS_RX: Final = 2
_CIPHER_BYTES: Final = 64  # limit of the kernel's description of a key


class TlsSocket:
    """One end of a connection, before and after its TLS handshake.

    One thread may read while another one writes. Errors are `OSError`, as with a plain socket.

    Attributes:
        has_buffered: whether decrypted bytes wait for `recv_into`.
        num_owed: the bytes of a `sendmsg` that were encrypted, but not reported as sent.

    Args:
        raw: connected; it is closed with this object, and must not be used any more.
        server_side: whether this side accepted the connection.
        own_fingerprint: the fingerprint of the certificate in `context`.

    Raises:
        OSError: the connection had broken; `raw` is closed.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, server_side: bool, own_fingerprint: str) -> None:
        raw.setblocking(False)
        self.family = raw.family
        self.has_buffered = False
        self.num_owed = 0  # [Note: sent and owed]
        self._server_side = server_side
        self._own_fingerprint = own_fingerprint
        name = None if server_side else PEER_NAME
        self._tls = context.wrap_socket(raw, server_side, False, suppress_ragged_eofs=False, server_hostname=name)
        fork.note_socket(self._tls)
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # with a buffer
        self._lock = threading.Lock()  # protects OpenSSL's state
        self._is_broken = False
        self._failure: OSError | None = None  # of a read; OpenSSL reports it only once
        self.has_unsent = False  # handshake bytes wait for room in the socket

    def __enter__(self) -> TlsSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ as a socket

    def fileno(self) -> int:
        return self._tls.fileno()

    def setblocking(self, flag: bool) -> None:
        """Accepts only False."""
        if flag:
            raise ValueError("a TlsSocket never blocks")

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._tls.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._tls.getsockopt(level, option, size)

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)  # SSLSocket.shutdown drops TLS: a reader would get ciphertext

    def close(self) -> None:
        """Closes the socket, after it has sent TLS's close message if the socket takes it."""
        with self._lock:
            if self._tls.fileno() >= 0 and not self._is_broken:
                # One of these errors is SSLWantReadError: the peer need not answer.
                with suppress(OSError, ValueError):
                    _without_sigpipe(self._tls.unwrap)
            self._tls.close()

    # ------------------------------------------------------------ the handshake

    def shake_hands(self) -> bool:
        """Continues the handshake as far as possible.

        Returns:
            True when it is done here. False: wait until the socket is readable, or writable if `has_unsent`.

        Raises:
            ssl.SSLError: it failed; the peer gets the reason.
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
        """The certificates of both ends, the client's first; the same text on both sides. Call after the handshake."""
        shown = self._tls.getpeercert(binary_form=True)
        peer = fingerprint(shown) if shown else "none"
        ends = (peer, self._own_fingerprint) if self._server_side else (self._own_fingerprint, peer)
        return f"tls, from certificate {ends[0]} to {ends[1]}"

    def is_left_to_kernel(self, direction: int) -> bool:
        """Whether the kernel encrypts, or decrypts, itself. Call after the handshake."""
        try:
            self._tls.getsockopt(_SOL_TLS, direction, _CIPHER_BYTES)
        except OSError:  # the kernel does not support TLS, or does not have the keys
            return False
        return True

    def _num_received(self) -> int:
        """The bytes that the kernel has received from the peer; 0 if it is not a TCP socket."""
        if self.family == socket.AF_UNIX:
            return 0
        info = self._tls.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_BYTES.size)
        return int(_RECEIVED_BYTES.unpack(info)[0]) if len(info) == _RECEIVED_BYTES.size else 0

    # ------------------------------------------------------------ reading

    def recv_into(self, place: memoryview) -> int:
        """Like `recv_into` of a socket: raises `BlockingIOError` if no bytes are there; returns 0 at the end."""
        with self._lock:
            self._check_open()
            if self._failure is not None:
                raise self._failure
            return _without_sigpipe(self._read_records, place)  # OpenSSL may answer alerts and key updates

    def _read_records(self, place: memoryview) -> int:
        got, size, read = 0, len(place), self._read
        try:
            while got < size:  # a record at a time
                num_bytes = read(size - got, place[got:])
                if not num_bytes:
                    break  # users that distinguish a regular end from a lost one mark it in their own frames
                got += num_bytes
            self.has_buffered = self._tls.pending() > 0
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self.has_buffered = False
            if not got:
                raise BlockingIOError from None
        except ssl.SSLEOFError as exc:  # an end without TLS's close message, as of a killed process
            self.has_buffered = False
            if self._has_broken():
                self._failure = ConnectionResetError(errno.ECONNRESET, "the connection was reset, or timed out")
                if not got:
                    raise self._failure from exc
                self.has_buffered = True  # the next call raises it
        except OSError as exc:
            self._failure = exc
            if not got:
                raise
            self.has_buffered = True  # the next call raises it
        return got

    def _has_broken(self) -> bool:
        """Whether the kernel has given the connection up, which Python's ssl reports like an end by the peer."""
        if self.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
            return False
        return self._tls.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE

    def recv(self, size: int) -> bytes:
        """Like `recv` of a socket."""
        data = bytearray(size)
        return bytes(data[: self.recv_into(memoryview(data))])

    # ------------------------------------------------------------ writing

    def send(self, data: memoryview | bytes, flags: int = NO_SIGPIPE) -> int:
        """See `sendmsg`."""
        return self.sendmsg((data,))

    def sendmsg(
        self, parts: Sequence[memoryview | bytes], ancillary: Sequence[object] = (), flags: int = NO_SIGPIPE
    ) -> int:
        """Like `sendmsg` of a socket. If it takes fewer bytes than all, or none, pass the rest again."""
        if ancillary:
            raise OSError("descriptors cannot be sent over TLS")
        with self._lock:
            self._check_open()
            if self._is_broken:
                raise OSError("the connection broke when a write to it was interrupted")
            pieces = _pieces([memoryview(part) for part in parts], self.num_owed)
            self._is_broken = True  # until the writes below are complete: no record may be sent twice, or in part
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
and `close`; `has_buffered` and `num_owed` tell them apart."""


def _without_sigpipe(operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does what `NO_SIGPIPE` does, for OpenSSL, which passes no flags: blocks the signal, and consumes it."""
    if not NO_SIGPIPE or getsignal(_SIGPIPE) == signal.SIG_IGN:  # Python's default
        return operation(*args, **kwargs)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        return operation(*args, **kwargs)
    finally:
        signal.sigtimedwait({signal.SIGPIPE}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_buffered(connection: StreamSocket) -> bool:
    """Whether bytes can be read that no poll reports; check before each wait. [Note: buffered]"""
    return isinstance(connection, TlsSocket) and connection.has_buffered


def num_owed(connection: StreamSocket) -> int:
    """The number of bytes that were not reported as sent and must be sent next. [Note: sent and owed]"""
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
    """The pieces to encrypt at once, in order: owed bytes first, then small parts joined, and large parts uncopied.

    Raises:
        OSError: there are fewer bytes than are owed.
    """
    pieces: list[memoryview | bytes] = []
    if num_owed:
        owed, parts = _split(parts, num_owed)
        if sum(map(len, owed)) < num_owed:
            raise OSError(f"{num_owed} bytes are already encrypted, and must be sent first")
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
