"""The address of a socket hub, and connections to it."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Final

from rpcdist.deadline import backoff
from rpcdist.errors import ConfigError, ConnectFailed, RpcdistError
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import FIRST_PAUSE_S, LONGEST_PAUSE_S
from rpcdist.transport._channels.proving import open_proven
from rpcdist.transport._channels.stream_sockets import connect_tcp, connect_unix, pace_if_far
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.addresses import join_address, split_address
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.roles import SOCKET_ROLE, socket_purpose
from rpcdist.transport.unix_sockets import has_abstract_sockets


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The address of a hub.

    Attributes:
        unix_name: name of the abstract Unix listener, without the leading zero byte; empty if there is none.
        taker: name of the hub within its process; the hubs of a process share the listeners.
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
        is_name = 1 < len(unix) <= 100 and unix.startswith("@") and unix.isprintable()  # UTF-8 has no surrogates
        if not slash or (comma and not is_name):
            raise ConfigError(f"a hub's address is written host:port/hub or host:port/hub,@name, not {text[:200]!r}")
        return cls(*split_address(address), unix[1:], taker)


logger = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 4 << 20


async def connect_to_hub(
    credentials: Credentials, address: HubAddress, purpose: str, unix: bool | None
) -> StreamSocket:
    """Opens a proven connection; see `SocketHub.connect`. The caller limits the time. Cancelled, it opens none."""
    possible = bool(address.unix_name) and has_abstract_sockets()
    if unix and not possible:
        raise ConnectFailed(str(address), "it has no Unix socket that this process can reach")
    if unix or (unix is None and possible):
        try:
            return await _attempt(credentials, address, purpose, unix=True)
        except OSError as exc:
            if unix or (isinstance(exc, RpcdistError | TimeoutError) and not isinstance(exc, ConnectFailed)):
                raise
            logger.debug("%s has no Unix socket here (%s), so TCP is used", address, exc)
    return await _attempt(credentials, address, purpose, unix=False)


async def _attempt(credentials: Credentials, address: HubAddress, purpose: str, unix: bool) -> StreamSocket:
    """Connects in one way; retries while this process lacks descriptors."""
    pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    async def connect() -> socket.socket:
        while True:
            try:
                return await (connect_unix(address.unix_name) if unix else connect_tcp(address.host, address.port))
            except OSError as exc:
                if own_shortage(exc) is None:
                    raise
            await asyncio.sleep(next(pauses))

    full_purpose = socket_purpose(address.taker, purpose)
    used, _ = await open_proven(connect, str(address), credentials, SOCKET_ROLE, purpose=full_purpose)
    widen(used)
    return used


def widen(connection: StreamSocket) -> None:
    """Lets a connection carry large amounts: a Unix socket with larger buffers, TCP paced only to a far peer."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    else:
        pace_if_far(connection)
