"""Raw stream sockets, TCP and Unix: listening, accepting, connecting, and the name that both ends give a connection.

[Note: two ends] A proof of the token is valid for one pair of ends. Each side gets the ends from the system and not
from
the peer: over TCP, the address and port of the serving end; over a Unix socket, the processes and users of both ends,
and the pid namespace. The client states the ends in its hello, which the proofs cover, and the server compares them
with its own view. This detects a process that relays the handshake: it has another port, or another process id, which
the kernel adds to each message (unix_sockets.py). It also detects a network that translates addresses, and a container
that hides process ids; the channel is then not used.

[Note: pacing] BBR, the congestion control of some systems, sends at the rate that it has measured, by timers. Between
near peers, the timers and the first low estimates cost half of the rate, and more on a busy machine. So where the
system uses BBR, a connection begins with cubic, the kernel's own default, and changes to BBR if the peer is far: a
connection that has used BBR stays paced.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from contextlib import suppress
from typing import Any, Final

from rpcdist.deadline import backoff
from rpcdist.errors import AuthenticationFailed, TransportError, on_error
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import KEEP_ALIVE_S, LOCK_FIRST_PAUSE_S, LOCK_LONGEST_PAUSE_S, TICK_S
from rpcdist.transport import fork
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket, TlsSocket
from rpcdist.transport.addresses import join_address, literal
from rpcdist.transport.unix_sockets import PeerProcess, names_senders, peer_process, process_namespace, same_user
from rpcdist.waiters import wake

logger = logging.getLogger(__name__)

_BACKLOG: Final = 512
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # the address is not one of this machine

FAR_ROUND_TRIP: Final = 2e-3
"""A peer with this round trip or a longer one is far; within a data centre it is shorter."""

ROUND_TRIP_AT: Final = 68  # tcpi_rtt in struct tcp_info
SHORTEST_AT: Final = 148  # tcpi_min_rtt


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """Listens on a port; on a port that the system chooses, if it is 0. Blocks while a name is resolved.

    Of several addresses of a name it uses the first that this machine has: "localhost" often has two, but a network
    with IPv6 alone has only the second.

    Raises:
        OSError: the name has no address, none of its addresses belongs to this machine, or the port is in use.
    """
    name = host.strip("[]")
    # As bytes: with a `str`, Python would import the tables of its IDNA codec.
    places = socket.getaddrinfo(name.encode() if name.isascii() else name, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in places[:-1]:
        try:
            return _listen(socket.socket(family, kind, protocol), place)
        except OSError as exc:
            if exc.errno not in _NOT_HERE:
                raise
    family, kind, protocol, _, place = places[-1]
    return _listen(socket.socket(family, kind, protocol), place)


def listen_unix(name: str) -> socket.socket:
    """Listens under an abstract name. Raises `OSError` if the name is in use."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    names_senders(listener, on=True)  # accepted connections inherit it
    return _listen(listener, f"\0{name}")


def _listen(listener: socket.socket, place: Any) -> socket.socket:
    """Binds without SO_REUSEADDR: the port's previous owner could relay a connection that it still has.

    [Note: two ends]
    """
    fork.note_socket(listener)
    with on_error(listener.close):
        if listener.family != socket.AF_UNIX:
            _begin_unpaced(listener)  # accepted connections inherit it
        listener.bind(place)
        listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


async def accept(listener: socket.socket) -> socket.socket:
    """The next connection; the caller closes it. Cancellation leaves the listener open and no connection behind.

    `loop.sock_accept` would leak a connection if it is cancelled just after the accept.
    """
    while True:
        try:
            try:
                connection = listener.accept()[0]
            except (BlockingIOError, InterruptedError):
                await until_ready(listener, for_writing=False)
                continue
        except OSError as exc:  # too few descriptors or too little memory, until other connections end
            if own_shortage(exc) is None:
                logger.warning("a connection could not be accepted (%s); the listener tries again", exc)
            await asyncio.sleep(TICK_S)
            continue
        fork.note_socket(connection)
        connection.setblocking(False)
        return connection


async def connect_unix(name: str) -> socket.socket:
    """Connects to a process of this user that listens under an abstract name; the caller closes it.

    Raises:
        OSError: no process listens there.
        AuthenticationFailed: the process there belongs to another user.
    """
    connection = _new_socket(socket.AF_UNIX)
    pauses = backoff(LOCK_FIRST_PAUSE_S, LOCK_LONGEST_PAUSE_S)
    with on_error(connection.close):
        while True:
            try:
                connection.connect(f"\0{name}")
                break
            except BlockingIOError:  # the listener's backlog is full, and no event reports when it has room
                await asyncio.sleep(next(pauses))
        if not same_user(connection):
            raise AuthenticationFailed(f"another user's process listens under the name {name!r} on this host")
        names_senders(connection, on=True)
    return connection


async def connect_tcp(host: str, port: int) -> socket.socket:
    """Connects to the first address of the host that answers; the caller closes the socket. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"the host name {host!r} has no address")
    for family, _, _, _, place in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = _new_socket(family)
        try:
            with on_error(connection.close):
                await loop.sock_connect(connection, place)
            return connection
        except OSError as exc:
            failure = exc
    raise failure


def _new_socket(family: int) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    fork.note_socket(connection)
    connection.setblocking(False)
    tune(connection)
    return connection


async def until_ready(connection: StreamSocket, for_writing: bool) -> None:
    """Waits on the running loop until the socket is readable, or writable."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    descriptor = connection.fileno()
    if descriptor < 0:
        raise TransportError("the connection was closed")
    (loop.add_writer if for_writing else loop.add_reader)(descriptor, wake, ready)
    try:
        await ready
    finally:
        (loop.remove_writer if for_writing else loop.remove_reader)(descriptor)


async def send_all(connection: StreamSocket, data: bytes) -> None:
    """Sends on the running loop, like `loop.sock_sendall`. If cancelled, it may have sent a part. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest, NO_SIGPIPE) :]
        except BlockingIOError:
            await until_ready(connection, for_writing=True)


async def receive_some(connection: StreamSocket, size: int) -> bytes:
    """Receives one to `size` bytes, like `loop.sock_recv`; empty at the end of the stream. Raises `OSError`."""
    while True:
        try:
            return connection.recv(size)
        except BlockingIOError:
            await until_ready(connection, for_writing=False)


def tune(connection: socket.socket) -> None:
    """Makes a TCP socket send small messages at once, and detect that its peer's host is dead."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection, KEEP_ALIVE_S, KEEP_ALIVE_S // 3)
    _begin_unpaced(connection)


def keep_alive(connection: socket.socket | TlsSocket, idle_s: int, interval_s: int) -> None:
    """Makes the kernel probe a silent peer, and break the connection after three probes without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, idle_s), (socket.TCP_KEEPINTVL, interval_s), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def break_when_silent(connection: socket.socket | TlsSocket, limit_s: float) -> None:
    """Makes the kernel break a connection whose peer acknowledges no bytes for `limit_s`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, min(int(1000 * limit_s), 2**31 - 1)))


def round_trip_s(connection: StreamSocket, at: int) -> float | None:
    """The round trip in that field of the kernel's `tcp_info` of a connection; None if it is not available."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + 4)
    except OSError:  # the connection is closed, or it is a Unix socket
        return None
    return float(struct.unpack_from("=I", info, at)[0]) / 1e6 if len(info) == at + 4 else None


def pace_if_far(connection: StreamSocket) -> None:
    """Gives a connection to a far peer the system's congestion control, if it is BBR. [Note: pacing]"""
    trip_s = round_trip_s(connection, SHORTEST_AT)
    if trip_s is None or trip_s < FAR_ROUND_TRIP:
        return
    with suppress(OSError):  # it was closed, or this process has no descriptor left: it stays as it is
        with socket.socket(connection.family, socket.SOCK_STREAM) as fresh:
            of_system = _congestion_control(fresh)
        if of_system == b"bbr":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, of_system)


def _begin_unpaced(connection: StreamSocket) -> None:
    """Replaces BBR on a socket that is not connected, if the system allows it. [Note: pacing]"""
    with suppress(OSError):  # the system does not have or allow cubic, or cannot choose
        if _congestion_control(connection) == b"bbr":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _congestion_control(connection: StreamSocket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def connected_ends(connection: socket.socket) -> str:
    """Names a connection, at the side that opened it. [Note: two ends]"""
    if connection.family == socket.AF_UNIX:
        return _unix_ends(server=peer_process(connection), client=_me())
    return _tcp_ends(connection.getpeername())


def accepted_ends(connection: socket.socket) -> str:
    """Returns the name that `connected_ends` returns, at the side that accepted the connection."""
    if connection.family == socket.AF_UNIX:
        return _unix_ends(server=_me(), client=peer_process(connection))
    return _tcp_ends(connection.getsockname())


def _me() -> PeerProcess:
    return PeerProcess(os.getpid(), os.getuid())


def _unix_ends(server: PeerProcess, client: PeerProcess) -> str:
    return f"unix, from {client} to {server} in pid namespace {process_namespace()}"


def _tcp_ends(place: Any) -> str:
    return f"tcp, to {join_address(str(literal(str(place[0]))), int(place[1]))}"
