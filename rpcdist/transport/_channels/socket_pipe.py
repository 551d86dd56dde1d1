"""The handshake's messages on a raw connection, plain or with TLS: four bytes of length, little endian, and the bytes.

The pipe reads exactly these bytes, so another part can use the socket afterwards.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rpcdist.errors import AuthenticationFailed, ProtocolViolation, TransportError, on_error, raised_as
from rpcdist.transport._channels.stream_sockets import connected_ends, send_all, until_ready
from rpcdist.transport._tls.tls_socket import StreamSocket, TlsSocket
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import UNTRUSTED_CERTIFICATE
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES
from rpcdist.transport.unix_sockets import PeerProcess, peer_process, receive_from

_LENGTH: Final = struct.Struct("<I")
_TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS handshake record; the version follows
_TLS_MAJOR_VERSION: Final = 3
_PEEKED_BYTES: Final = 3


@dataclass(eq=False, repr=False)
class SocketPipe:
    """The `HandshakePipe` of one socket. On a Unix socket, every message must come from the process that connected.

    Attributes:
        connection: the socket, which the caller owns. The TLS socket replaces it when TLS begins.

    Args:
        connection: connected, not blocking; with TLS, before or after its TLS handshake.
        tls_source: see `Credentials.tls_source`, for messages.
        accepting: for an accepted TCP connection, whose first bytes show whether the client uses TLS. None after that,
            and after the TLS handshake: then a message can be written.
        may_be_plain: whether an accepted TCP connection without TLS is served.
    """

    connection: StreamSocket
    _address: str
    _tls_source: str | None = None
    accepting: Credentials | None = None
    may_be_plain: bool = True
    _opener: PeerProcess | None = None  # of a Unix socket, once it was read

    async def shake_hands(self) -> None:
        """Performs the TLS handshake; the caller limits the time.

        Raises:
            AuthenticationFailed: it failed.
            TransportError: the connection broke.
        """
        connection = self.connection
        assert isinstance(connection, TlsSocket)
        with self._mapped():
            while not connection.shake_hands():
                await until_ready(connection, for_writing=connection.has_unsent)

    async def read(self) -> bytes | None:
        if self.accepting is not None:
            await self._accept(self.accepting)
            self.accepting = None
        head = await self._read_exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_HANDSHAKE_BYTES:
            text = f"{self._address} announced a handshake message of {size} bytes, which is too large"
            raise ProtocolViolation(text)
        return await self._read_exactly(size)

    async def write(self, data: bytes) -> None:
        with self._mapped():
            await send_all(self.connection, _LENGTH.pack(len(data)) + data)

    async def _read_exactly(self, size: int) -> bytes | None:
        """Reads exactly `size` bytes; None if the connection ends earlier."""
        data = b""
        while len(data) < size:
            with self._mapped():
                more = await self._read_some(size - len(data))
            if not more:
                return None
            data += more
        return data

    async def _read_some(self, size: int) -> bytes:
        while True:
            try:
                if self._opener is None:
                    if isinstance(self.connection, TlsSocket) or self.connection.family != socket.AF_UNIX:
                        return self.connection.recv(size)
                    self._opener = peer_process(self.connection)
                assert isinstance(self.connection, socket.socket)
                data, sender = receive_from(self.connection, size)
            except BlockingIOError:
                await until_ready(self.connection, for_writing=False)
                continue
            if data and sender != self._opener:  # [Note: senders] in unix_sockets
                raise AuthenticationFailed(
                    f"{self._opener} opened the connection with {self._address}, but {sender} sends on it: a process "
                    "between them relays it"
                )
            return data

    async def _accept(self, credentials: Credentials) -> None:
        raw = self.connection
        assert isinstance(raw, socket.socket)
        if await self._speaks_tls(raw):
            self.connection = wrapped(raw, self._address, credentials, server_side=True)
            self._tls_source = credentials.tls_source
            await self.shake_hands()
        elif not self.may_be_plain:
            self.accepting = None
            await self.read()  # unread bytes would cause a reset, and the peer would get no reason
            raise ProtocolViolation(
                f"{self._address} connected without TLS, which is accepted only from trusted networks; "
                "set RPCDIST_TLS and RPCDIST_TRUSTED_NETWORKS to the same values in every process of the job"
            )

    async def _speaks_tls(self, raw: socket.socket) -> bool:
        """Whether the first bytes are TLS: a plain message begins with its length, so its third byte is 0."""
        with self._mapped():
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _PEEKED_BYTES)  # not readable with fewer bytes
            while True:
                try:
                    first = raw.recv(_PEEKED_BYTES, socket.MSG_PEEK)
                except BlockingIOError:
                    await until_ready(raw, for_writing=False)
                    continue
                break
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if 0 < len(first) < _PEEKED_BYTES and first[0] == _TLS_HANDSHAKE:
            raise TransportError(f"the connection with {self._address} ended within its first bytes")
        return first[:2] == bytes((_TLS_HANDSHAKE, _TLS_MAJOR_VERSION)) and first[2:] != b"\0"

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Turns the errors of the socket into errors of this package."""
        try:
            yield
        except AuthenticationFailed:
            raise
        except OSError as exc:
            if isinstance(exc, ssl.SSLError) and not isinstance(exc, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                source = f" This process uses {self._tls_source}." if self._tls_source else ""
                text = f"TLS with {self._address} failed ({exc.reason or exc}): it {UNTRUSTED_CERTIFICATE}{source}"
                raise AuthenticationFailed(text) from exc
            raise TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}") from exc


def wrapped(raw: socket.socket, address: str, credentials: Credentials, server_side: bool) -> TlsSocket:
    """The TLS socket on a connected TCP socket, before the handshake; it replaces `raw`.

    Raises:
        TransportError: the connection had broken; it is closed.
    """
    context, fingerprint = credentials.tls.ssl_context(server_side)
    with raised_as(TransportError, f"the connection with {address} broke", OSError):
        return TlsSocket(raw, context, server_side, fingerprint)


async def connected_pipe(
    raw: socket.socket, address: str, credentials: Credentials
) -> tuple[StreamSocket, SocketPipe, str]:
    """The socket and pipe for a connection that this process opened: with TLS, unless its address needs none.

    Args:
        raw: just connected; the caller closes it if this raises. With TLS, the returned socket replaces it.

    Returns:
        The socket, its pipe, and the name that both sides give the connection.
    """
    ends = connected_ends(raw)
    if raw.family == socket.AF_UNIX or not credentials.tls_policy.encrypts_raw(str(raw.getpeername()[0])):
        return raw, SocketPipe(raw, address), ends
    tls = wrapped(raw, address, credentials, server_side=False)
    with on_error(tls.close):
        pipe = SocketPipe(tls, address, credentials.tls_source)
        await pipe.shake_hands()
        return tls, pipe, f"{tls.ends()}, {ends}"
