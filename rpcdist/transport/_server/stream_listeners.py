"""The raw listeners of a process: they accept sessions, and sockets of the collectives, over TCP and Unix sockets.

There is one TCP listener for each host, usually one, and one Unix listener for each name. Every connection goes through
the same admission; its role then decides which part of the process gets it (roles.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rpcdist._proto import handshake_pb2
from rpcdist.errors import TransportError
from rpcdist.time_limits import CONNECTION_CLOSE_LIMIT_S
from rpcdist.transport._channels.proving import write_step
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._channels.socket_pipe import SocketPipe
from rpcdist.transport._channels.stream_sockets import accept, accepted_ends, listen_tcp, listen_unix, tune
from rpcdist.transport._server.admission import Admission, Origin
from rpcdist.transport._tls.tls_socket import TlsSocket
from rpcdist.transport.addresses import PortRange, why_not_here
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ServerHandshake
from rpcdist.transport.handshake_side import refusal
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.roles import SOCKET_ROLE, Roles
from rpcdist.transport.unix_sockets import has_abstract_sockets, local_name, names_senders, peer_process, same_user

logger = logging.getLogger(__name__)

ServeSession = Callable[[SocketChannel, ServerHandshake], Awaitable[None]]
"""Serves the session of a proven peer until it ends; closes the channel."""


@dataclass(eq=False, repr=False)
class StreamListeners:
    """The raw listeners of a process; lives on the I/O loop.

    Args:
        admission: limits the cost of unproven connections, for all listeners of the process together.
        serve_session: serves sessions; cancelled when their listener ends.
        ports: the ports on which it may listen over TCP.
    """

    io: IoLoop
    credentials: Credentials
    roles: Roles
    admission: Admission
    serve_session: ServeSession
    ports: PortRange
    _tcp: dict[str, tuple[str, int]] = field(default_factory=dict)  # address and port, by the requested host
    _accepting: dict[str, asyncio.Task[Any]] = field(default_factory=dict)  # by host, or "@" and a Unix socket's name
    _lasting_name: str = ""  # the Unix listener that stays while the process serves
    _ours: set[socket.socket] = field(default_factory=set)  # accepted, and not handed to another part yet

    @property
    def tcp_port(self) -> int:
        """The port of the first TCP listener; 0 if there is none."""
        return next((port for _, port in self._tcp.values()), 0)

    def open_tcp(self, host: str) -> tuple[str, int]:
        """Listens on a host, unless it already does; returns address and port. Raises `TransportError`."""
        if host not in self._tcp:
            try:
                listener = self.ports.bind(partial(listen_tcp, host))
            except OSError as exc:
                raise TransportError(f"cannot listen on {host!r}: {why_not_here(host, exc)}") from exc
            address, port = listener.getsockname()[:2]
            self._tcp[host] = address, port
            self._start(host, listener)
        return self._tcp[host]

    def open_local(self, address: str) -> None:
        """Listens under the name that belongs to `address`. If the name is in use, peers use another channel."""
        name = local_name(address)
        try:
            self._start(f"@{name}", listen_unix(name))
        except OSError as exc:
            logger.warning("no local channel to %s: its name is in use (%s), so peers use the network", address, exc)

    def unix_name(self) -> str:
        """A name under which it listens as long as the process serves; empty on systems without abstract sockets."""
        if not has_abstract_sockets():
            return ""
        if not self._lasting_name:
            self._lasting_name = f"rpcdist-{secrets.token_hex(16)}"
            self._start(f"@{self._lasting_name}", listen_unix(self._lasting_name))
        return self._lasting_name

    async def close_local(self, address: str) -> None:
        """Ends the listener of `open_local`, and all sessions that were accepted there; bounded."""
        await self._stop(f"@{local_name(address)}")

    async def stop(self) -> None:
        """Ends all listeners; bounded."""
        self._tcp.clear()
        await asyncio.gather(*(self._stop(key) for key in list(self._accepting)))

    async def _stop(self, key: str) -> None:
        task = self._accepting.pop(key, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=CONNECTION_CLOSE_LIMIT_S)

    def _start(self, key: str, listener: socket.socket) -> None:
        task = self._accepting[key] = self.io.spawn(self._accept(listener), f"rpcdist listener {key}")
        task.add_done_callback(lambda task: listener.close())  # a task cancelled before its first step closes nothing

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts connections until it is cancelled; then ends those that it still serves."""
        served: set[asyncio.Task[Any]] = set()
        try:
            while True:
                connection = await accept(listener)
                self._ours.add(connection)
                task = self.io.spawn(self._serve(connection), "rpcdist raw connection")
                served.add(task)
                task.add_done_callback(served.discard)
                task.add_done_callback(partial(self._served, connection))
                await asyncio.sleep(0)  # a client that connects in a loop must not starve other tasks
        finally:
            listener.close()
            for task in served:
                task.cancel()
            if served:
                await asyncio.wait(served, timeout=CONNECTION_CLOSE_LIMIT_S)

    def _served(self, connection: socket.socket, task: asyncio.Task[Any]) -> None:
        if connection in self._ours:
            self._ours.remove(connection)
            connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        """Serves a connection until it ends, or until another part takes it."""
        try:
            origin = _origin(connection)
            if origin is None:
                return  # another user's process: closed unread
            tune(connection)
            ends = accepted_ends(connection)
        except OSError as exc:
            logger.debug("a connection ended before it was examined: %s", exc)
            return
        tcp = self.credentials if connection.family != socket.AF_UNIX else None
        may_be_plain = not self.credentials.tls_policy.encrypts_raw(origin.host)
        pipe = SocketPipe(connection, str(origin), accepting=tcp, may_be_plain=may_be_plain)

        def seen_ends() -> str:
            used = pipe.connection
            return f"{used.ends()}, {ends}" if isinstance(used, TlsSocket) else ends

        handshake = ServerHandshake(self.credentials, self.roles.refusal, channel=seen_ends)

        async def turn_away(reason: handshake_pb2.Refusal) -> None:
            if pipe.accepting is not None and not may_be_plain:
                return  # within its TLS handshake the client would take the refusal for a wrong certificate
            if handshake.failure is None:  # otherwise the peer has sent or received a refusal already
                await write_step(pipe, refusal(reason.code, reason.reason))

        try:
            if not await self.admission.admit(pipe, origin, handshake, turn_away):
                return
            names_senders(connection, on=False)
            if handshake.role == SOCKET_ROLE and not self.roles.hand_over(handshake.purpose, pipe.connection):
                return
            self._ours.remove(connection)
            if handshake.role == SOCKET_ROLE:
                return
            channel = SocketChannel(pipe.connection, handshake.peer.name)
        finally:
            if pipe.connection is not connection and connection in self._ours:
                pipe.connection.close()
        try:
            await self.serve_session(channel, handshake)
        finally:
            channel.abort("the connection was closed")


def _origin(connection: socket.socket) -> Origin | None:
    if connection.family == socket.AF_UNIX:
        if not same_user(connection):
            return None
        return Origin(f"process {peer_process(connection).pid} of this host")
    host, port = connection.getpeername()[:2]
    return Origin(str(host), str(port))
