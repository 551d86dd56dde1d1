"""The connecting side of a socket hub: the address of a hub, and sockets to it whose both ends are proven."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Final

from rpcdist._proto import handshake_pb2
from rpcdist.deadline import backoff
from rpcdist.errors import AuthenticationFailed, ConfigError, ConnectFailed, ProtocolViolation, RpcdistError
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import FIRST_PAUSE_S, LONGEST_PAUSE_S
from rpcdist.transport._channels.proving import prove_client
from rpcdist.transport._channels.socket_pipe import connected_pipe
from rpcdist.transport._channels.stream_sockets import connect_tcp, connect_unix
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.addresses import join_address, split_address
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.roles import SOCKET_ROLE, socket_purpose
from rpcdist.transport.unix_sockets import has_abstract_sockets, names_senders


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Where a hub listens.

    Attributes:
        host: host of the TCP listener.
        port: port of the TCP listener.
        unix_name: name of the abstract Unix listener, without the leading zero byte; empty where there is none.
        taker: which hub of the process is meant; they share the listeners.
    """

    host: str
    port: int
    unix_name: str = ""
    taker: str = ""

    def __str__(self) -> str:
        tcp = f"{join_address(self.host, self.port)}/{self.taker}"
        return f"{tcp},@{self.unix_name}" if self.unix_name else tcp

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """The inverse of `str`. Raises `ConfigError` for anything else."""
        tcp, comma, unix = text.partition(",")
        address, slash, taker = tcp.partition("/")
        if not slash or (comma and (len(unix) < 2 or not unix.startswith("@") or len(unix) > 100)):
            raise ConfigError(f"a hub's address is written host:port/hub or host:port/hub,@name, not {text[:200]!r}")
        return cls(*split_address(address), unix[1:], taker)


logger = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 4 << 20

Code = handshake_pb2.Refusal.Code


async def connect_to_hub(
    credentials: Credentials, address: HubAddress, purpose: str, unix: bool | None
) -> StreamSocket:
    """A proven connection; see `SocketHub.connect`. The caller limits the time. Cancelled, it leaves nothing open."""
    possible = bool(address.unix_name) and has_abstract_sockets()
    if unix and not possible:
        raise ConnectFailed(str(address), "it has no Unix socket that this process could reach")
    if unix or (unix is None and possible):
        try:
            return await _attempt(credentials, address, purpose, unix=True)
        except OSError as exc:
            if unix or (isinstance(exc, RpcdistError | TimeoutError) and not isinstance(exc, ConnectFailed)):
                raise
            logger.debug("%s has no Unix socket here (%s): taking TCP", address, exc)
    return await _attempt(credentials, address, purpose, unix=False)


async def _attempt(credentials: Credentials, address: HubAddress, purpose: str, unix: bool) -> StreamSocket:
    """Connects in one way, again and again while the peer has too much to do, or this process lacks descriptors."""
    pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        try:
            connection = await (connect_unix(address.unix_name) if unix else connect_tcp(address.host, address.port))
        except OSError as exc:
            if own_shortage(exc) is None:
                raise
            await asyncio.sleep(next(pauses))
            continue
        try:
            used = await _prove(credentials, connection, address, purpose)
            if used is not None:
                widen(used)
                return used
        except BaseException:
            connection.close()
            raise
        connection.close()
        await asyncio.sleep(next(pauses))


async def _prove(
    credentials: Credentials, connection: socket.socket, address: HubAddress, purpose: str
) -> StreamSocket | None:
    """The connection, when the peer is proven; None if that has too many handshakes under way."""
    used, pipe, ends = await connected_pipe(connection, str(address), credentials)
    handshake = credentials.client_handshake(SOCKET_ROLE, purpose=socket_purpose(address.taker, purpose), channel=ends)
    is_proven = False
    try:
        await prove_client(pipe, handshake)
        names_senders(connection, on=False)
        is_proven = True
    except AuthenticationFailed as exc:
        if handshake.refusal_code == Code.BUSY:
            return None
        if handshake.refusal_code == Code.POLICY:
            raise ProtocolViolation(f"no connection for {purpose!r}: {exc}") from exc
        if handshake.refusal_code == Code.CHANNEL:
            raise ConnectFailed(str(address), str(exc)) from exc
        raise
    finally:
        if not is_proven:
            used.close()
    return used


def widen(connection: StreamSocket) -> None:
    """TCP grows its own buffers; those of Unix sockets have to be asked for."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
