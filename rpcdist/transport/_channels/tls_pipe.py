"""The handshake's messages on a raw connection that speaks TLS, and the TLS handshake before them."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from rpcdist.errors import AuthenticationFailed, ProtocolViolation, TransportError
from rpcdist.transport._channels.socket_pipe import RawPipe, SocketPipe, until_ready
from rpcdist.transport._channels.stream_sockets import connected_ends
from rpcdist.transport._tls.tls_socket import StreamSocket, TlsSocket
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import STRANGE_CERTIFICATE

_TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS record of that kind, which its version follows
_TLS_MAJOR_VERSION: Final = 3
_PEEKED_BYTES: Final = 3


def wrapped(raw: socket.socket, address: str, credentials: Credentials, server_side: bool) -> TlsSocket:
    """The end of a connected TCP socket that speaks TLS, before the handshake; it takes the place of `raw`.

    Raises:
        TransportError: the connection broke before; it is closed.
    """
    context, fingerprint = credentials.tls.ssl_context(server_side)
    try:
        return TlsSocket(raw, context, server_side, fingerprint)
    except OSError as exc:
        raise TransportError(f"the connection with {address} broke: {exc.strerror or exc}") from exc


async def connected_pipe(
    raw: socket.socket, address: str, credentials: Credentials
) -> tuple[StreamSocket, SocketPipe | TlsPipe, str]:
    """What a connection that this process opened is used through: with TLS, unless it leads to where none is needed.

    Args:
        raw: just connected; the caller closes it if this raises. With TLS, what is returned takes its place.
        address: of the peer, for messages.
        credentials: what this process proves itself with.

    Returns:
        The socket, its pipe, and what both sides call the connection.
    """
    ends = connected_ends(raw)
    if raw.family == socket.AF_UNIX or not credentials.tls_policy.encrypts_raw(str(raw.getpeername()[0])):
        return raw, SocketPipe(raw, address), ends
    tls = wrapped(raw, address, credentials, server_side=False)
    try:
        pipe = TlsPipe(tls, address, credentials.tls_source)
        await pipe.shake_hands()
        return tls, pipe, f"{tls.ends()}, {ends}"
    except BaseException:
        tls.close()
        raise


class TlsPipe(RawPipe):
    """Of a connection with TLS. Reads exactly what belongs to the handshake, so that the socket can be given away then.

    Args:
        connection: before or after its TLS handshake; it stays its owner's.
        address: of the peer, for messages.
        tls_source: see `Credentials.tls_source`, for messages.
    """

    def __init__(self, connection: TlsSocket, address: str, tls_source: str | None = None) -> None:
        super().__init__(address)
        self._connection = connection
        self._tls_source = tls_source

    async def shake_hands(self) -> None:
        """The TLS handshake; the caller limits the time.

        Raises:
            AuthenticationFailed: it failed.
            TransportError: the connection broke.
        """
        try:
            while not self._connection.shake_hands():
                await until_ready(self._connection, for_writing=self._connection.has_unsent)
        except OSError as exc:
            raise self._broken(exc) from exc

    async def _read_exactly(self, size: int) -> bytes | None:
        data, got = bytearray(size), 0
        while got < size:
            try:
                more = self._connection.recv_into(memoryview(data)[got:])
            except BlockingIOError:
                await until_ready(self._connection, for_writing=False)
                continue
            except OSError as exc:
                raise self._broken(exc) from exc
            if not more:
                return None
            got += more
        return bytes(data)

    async def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._connection.sendmsg([rest]) :]
            except BlockingIOError:
                await until_ready(self._connection, for_writing=True)

    def _broken(self, exc: OSError) -> TransportError:
        if isinstance(exc, ssl.SSLError) and not isinstance(exc, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            source = f" This process uses {self._tls_source}." if self._tls_source else ""
            return AuthenticationFailed(
                f"TLS with {self._address} failed ({exc.reason or exc}): it {STRANGE_CERTIFICATE}{source}"
            )
        return super()._broken(exc)


class AcceptedPipe:
    """See `HandshakePipe`: of an accepted TCP connection whose first bytes say whether it speaks TLS.

    Attributes:
        tls: the end that speaks TLS, once that is known; it has taken the place of `raw`, and the owner closes it.
            None for a plain connection.

    Args:
        raw: accepted, not blocking; it stays its owner's.
        address: of the peer, for messages.
        credentials: what this process proves itself with.
        may_be_plain: whether a connection without TLS is taken.
    """

    def __init__(self, raw: socket.socket, address: str, credentials: Credentials, may_be_plain: bool) -> None:
        self.tls: TlsSocket | None = None
        self._raw = raw
        self._address = address
        self._credentials = credentials
        self._may_be_plain = may_be_plain
        self._plain = SocketPipe(raw, address)
        self._pipe: SocketPipe | TlsPipe | None = None

    async def read(self) -> bytes | None:
        if self._pipe is None:
            if await self._speaks_tls():
                self.tls = wrapped(self._raw, self._address, self._credentials, server_side=True)
                pipe = self._pipe = TlsPipe(self.tls, self._address, self._credentials.tls_source)
                await pipe.shake_hands()
            else:
                self._pipe = self._plain
                if not self._may_be_plain:
                    await self._plain.read()  # or else the connection ends with a reset, and nobody hears why
                    raise ProtocolViolation(
                        f"{self._address} came without TLS, which is only taken from networks declared trusted; "
                        "set RPCDIST_TLS and RPCDIST_TRUSTED_NETWORKS to the same in every process of the job"
                    )
        return await self._pipe.read()

    async def write(self, data: bytes) -> None:
        await (self._pipe or self._plain).write(data)

    async def _speaks_tls(self) -> bool:
        """A plain message has its length first: then the third byte is 0, and in TLS a version."""
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _PEEKED_BYTES)  # not readable before
        try:
            while True:
                try:
                    first = self._raw.recv(_PEEKED_BYTES, socket.MSG_PEEK)
                except BlockingIOError:
                    await until_ready(self._raw, for_writing=False)
                    continue
                if 0 < len(first) < _PEEKED_BYTES and first[0] == _TLS_HANDSHAKE:
                    raise TransportError(f"the connection with {self._address} ended within its first bytes")
                break
            self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except OSError as exc:
            raise TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}") from exc
        return first[:2] == bytes((_TLS_HANDSHAKE, _TLS_MAJOR_VERSION)) and first[2:] != b"\0"
