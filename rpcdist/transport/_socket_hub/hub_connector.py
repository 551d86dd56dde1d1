"""The connecting side of a socket hub: opens a socket to another hub, and proves both ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from rpcdist.backoff import backoff
from rpcdist.errors import AuthenticationFailed, ConnectFailed, RpcdistError
from rpcdist.time_limits import LOCK_FIRST_PAUSE_S, LOCK_LONGEST_PAUSE_S
from rpcdist.transport import fork
from rpcdist.transport._socket_hub.hub_address import HubAddress
from rpcdist.transport._socket_hub.wire import prove_client
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.unix_sockets import has_abstract_sockets, same_user

__all__ = ["HubConnector", "tune"]

logger = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 4 << 20


class HubConnector:
    """Opens connections, on the I/O loop. Cancelling leaves nothing open.

    Args:
        new_handshake: makes the client's side of one handshake.
    """

    def __init__(self, new_handshake: Callable[[], ClientHandshake]) -> None:
        self._new_handshake = new_handshake

    async def connect(self, address: HubAddress, purpose: str, unix: bool | None) -> socket.socket:
        """A proven connection; see `SocketHub.connect`. The caller limits the time."""
        possible = bool(address.unix_name) and has_abstract_sockets()
        if unix and not possible:
            raise ConnectFailed(str(address), "it has no Unix socket that this process could reach")
        if unix or (unix is None and possible):
            try:
                return await self._connect_unix(address, purpose)
            except OSError as exc:
                if unix or isinstance(exc, RpcdistError | TimeoutError):
                    raise
                logger.debug("%s has no Unix socket here (%s): taking TCP", address, exc)
        return await self._connect_tcp(address, purpose)

    async def _connect_unix(self, address: HubAddress, purpose: str) -> socket.socket:
        connection = _new_socket(socket.AF_UNIX)
        try:
            await _connect_unix(connection, address.unix_name)
            if not same_user(connection):
                raise AuthenticationFailed(f"the Unix socket of {address} belongs to another user")
            return await self._prove(connection, purpose)
        except BaseException:
            connection.close()
            raise

    async def _connect_tcp(self, address: HubAddress, purpose: str) -> socket.socket:
        connection = _new_socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port))
            return await self._prove(connection, purpose)
        except BaseException:
            connection.close()
            raise

    async def _prove(self, connection: socket.socket, purpose: str) -> socket.socket:
        await prove_client(connection, self._new_handshake(), purpose)
        return connection


def _new_socket(family: int) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    fork.note_socket(connection)
    connection.setblocking(False)
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Small messages leave at once. TCP grows its own buffers; those of Unix sockets have to be asked for."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


async def _connect_unix(connection: socket.socket, name: str) -> None:
    """Connects to an abstract name; cancelling leaves the socket to its owner. Raises `OSError`."""
    pauses = backoff(LOCK_FIRST_PAUSE_S, LOCK_LONGEST_PAUSE_S)
    while True:
        try:
            connection.connect("\0" + name)
            return
        except BlockingIOError:  # the listener's backlog is full, and nothing tells when it is not
            await asyncio.sleep(next(pauses))
