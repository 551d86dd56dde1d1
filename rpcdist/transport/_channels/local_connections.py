"""The channel between two workers of one user on one host: sessions as on gRPC, over an abstract Unix socket.

A worker that serves host:port also listens under a name made of that address, so a peer on the same host that knows the
address finds the channel, and a peer elsewhere (another host, another network namespace) finds nothing and takes gRPC.
A name is a hint and proves nothing: anybody on the host can take it first. So the kernel says whose process the other
end is, the handshake is the same as on gRPC and comes first as well, and whatever goes wrong before it is done leaves
gRPC to be tried, whose answer counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.time_limits import DESCRIPTOR_SHORTAGE_PAUSE_S
from rpcdist.transport import fork
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport.unix_sockets import has_abstract_sockets, same_user

__all__ = [
    "CHANNELS_VARIABLE",
    "accept_local",
    "connect_local",
    "listen_local",
    "local_channels_allowed",
]

logger = logging.getLogger(__name__)

CHANNELS_VARIABLE: Final = "RPCDIST_CHANNELS"
_BACKLOG: Final = 512
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")


def local_channels_allowed() -> bool:
    """Whether this process may use channels beside gRPC: where they exist, unless `RPCDIST_CHANNELS=grpc` says no.

    Raises:
        ConfigError: the variable has another value than "auto" or "grpc".
    """
    text = os.environ.get(CHANNELS_VARIABLE, "auto")
    if text not in ("auto", "grpc"):
        raise ConfigError(f"{CHANNELS_VARIABLE} is 'auto' or 'grpc', not {text!r}")
    return text == "auto" and has_abstract_sockets() and not _looks_like_anybody()


def _looks_like_anybody() -> bool:
    """Whether this user's number is the one that the kernel shows for all users from outside of a user namespace."""
    try:
        return int(_OVERFLOW_UID.read_text()) == os.getuid()
    except (OSError, ValueError):
        return False


def _name(address: str) -> str:
    return f"\0rpcdist-channel-{address}"


def listen_local(address: str) -> socket.socket | None:
    """Listens for peers on this host that look for `address`; None where that is impossible: they will take gRPC."""
    if not local_channels_allowed():
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fork.note_socket(listener)
    try:
        listener.bind(_name(address))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        logger.warning("no local channel to %s: its name is taken (%s); peers on this host use gRPC", address, exc)
        return None
    listener.setblocking(False)
    return listener


async def accept_local(listener: socket.socket) -> SocketChannel:
    """The next connection from a process of this user; others are closed unread.

    Cancelled, it leaves the listener open.
    """
    while True:
        try:
            connection = await _accept(listener)
        except OSError as exc:  # no descriptors or no memory left: sessions that end give some back
            logger.warning("a local connection could not be accepted (%s); trying again", exc)
            await asyncio.sleep(DESCRIPTOR_SHORTAGE_PAUSE_S)
            continue
        fork.note_socket(connection)
        try:
            if same_user(connection):
                return SocketChannel(connection, "the peer")
        except OSError:
            logger.debug("a local connection ended before it was looked at")
        connection.close()
        await asyncio.sleep(0)  # whoever does this in a loop must not keep others from their turn


async def _accept(listener: socket.socket) -> socket.socket:
    """As `loop.sock_accept`, which drops a connection unclosed if it is cancelled when one has just been accepted."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return listener.accept()[0]
        except (BlockingIOError, InterruptedError):
            readable = loop.create_future()
            loop.add_reader(listener, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(listener)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def connect_local(address: str) -> SocketChannel | None:
    """Connects to the channel of the worker at `address`; None if there is none on this host. On the I/O loop."""
    if not local_channels_allowed():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fork.note_socket(connection)
    connection.setblocking(False)
    try:
        connection.connect(_name(address))
        if same_user(connection):
            return SocketChannel(connection, address)
        logger.warning("another user's process listens under the name of the local channel to %s; using gRPC", address)
    except OSError as exc:  # nobody there, or a full backlog
        logger.debug("no local channel to %s: %s", address, exc)
    connection.close()
    return None
