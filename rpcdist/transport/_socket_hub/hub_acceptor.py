"""The accepting side of a socket hub: its listeners, and the admission of connections."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from rpcdist.errors import AuthenticationFailed, ConfigError, ProtocolViolation, TransportError
from rpcdist.time_limits import CHECK_INTERVAL_S, HANDSHAKE_LIMIT_S, HUB_CLOSE_LIMIT_S, SILENT_HANDSHAKE_LIMIT_S
from rpcdist.transport import fork
from rpcdist.transport._socket_hub.hub_address import HubAddress
from rpcdist.transport._socket_hub.hub_connector import tune
from rpcdist.transport._socket_hub.waiting_room import WaitingRoom
from rpcdist.transport._socket_hub.wire import prove_server
from rpcdist.transport.handshake import ServerHandshake
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.unix_sockets import has_abstract_sockets, same_user

__all__ = ["MAX_UNPROVEN", "HubAcceptor"]

logger = logging.getLogger(__name__)

MAX_UNPROVEN: Final = 64
_BACKLOG: Final = 512


class HubAcceptor:
    """Accepts connections, lets them prove themselves, and files them in the waiting room.

    Attributes:
        num_unproven: connections in the middle of their handshake.

    Args:
        io: the I/O loop.
        room: where proven connections go.
        new_handshake: makes the server's side of one handshake.
    """

    def __init__(self, io: IoLoop, room: WaitingRoom, new_handshake: Callable[[], ServerHandshake]) -> None:
        self._io = io
        self._room = room
        self._new_handshake = new_handshake
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._unproven: dict[asyncio.Task[Any], float | None] = {}  # since when it is silent; None once it spoke
        self._slot_freed = asyncio.Event()

    @property
    def num_unproven(self) -> int:
        return len(self._unproven)

    def listen(self, host: str) -> HubAddress:
        """Binds the listeners, on any thread; `start` accepts. Raises `TransportError` where that is impossible."""
        listeners = [_listen_tcp(host)]
        bound_host, port = listeners[0].getsockname()[:2]
        unix_name = ""
        if has_abstract_sockets():
            unix_name = f"rpcdist-{secrets.token_hex(16)}"
            listeners.append(_listen_unix(unix_name))
        self._listeners = listeners
        return HubAddress(bound_host, port, unix_name)

    def close_listeners(self) -> None:
        """After `stop`; any thread."""
        for listener in self._listeners:
            listener.close()

    # ------------------------------------------------------------ I/O loop

    async def start(self) -> None:
        """Accepts from now on."""
        for listener in self._listeners:
            self._tasks.append(self._io.spawn(self._accept(listener), "rpcdist socket hub"))

    async def stop(self) -> None:
        """Accepts no more, and ends the handshakes under way; bounded."""
        tasks = [*self._tasks, *self._unproven]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=HUB_CLOSE_LIMIT_S / 2)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._free_slot()
            try:
                connection, origin = await self._io.loop.sock_accept(listener)
            except OSError as exc:  # out of descriptors, or the peer is gone already
                logger.warning("a connection could not be accepted: %s", exc)
                await asyncio.sleep(CHECK_INTERVAL_S)
                continue
            fork.note_socket(connection)
            who = "a Unix socket" if listener.family == socket.AF_UNIX else f"{origin[0]}:{origin[1]}"
            task = self._io.spawn(self._admit(connection, who), f"rpcdist handshake with {who}")
            self._unproven[task] = time.monotonic()
            task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[Any]) -> None:
        self._unproven.pop(task, None)
        self._slot_freed.set()

    async def _free_slot(self) -> None:
        """Waits until fewer than `MAX_UNPROVEN` connections are unproven; the longest silent one makes room."""
        while len(self._unproven) >= MAX_UNPROVEN:
            silent_before = time.monotonic() - SILENT_HANDSHAKE_LIMIT_S
            for task, since in self._unproven.items():
                if since is not None and since < silent_before:
                    logger.warning("%s was turned away: silent, and others are waiting", task.get_name())
                    task.cancel()
                    break
            self._slot_freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENT_HANDSHAKE_LIMIT_S / 10):
                    await self._slot_freed.wait()

    async def _admit(self, connection: socket.socket, who: str) -> None:
        """Lets a connection prove itself, and files it; closes it otherwise."""
        task = asyncio.current_task()
        assert task is not None
        handed_over = False

        def spoke() -> None:
            self._unproven[task] = None

        try:
            connection.setblocking(False)
            tune(connection)
            if connection.family == socket.AF_UNIX and not same_user(connection):
                raise AuthenticationFailed("it belongs to another user")
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                purpose = await prove_server(connection, self._new_handshake(), self._room.refusal, spoke)
            handed_over = self._room.put(purpose, connection)
        except TimeoutError:
            logger.warning("%s was turned away: no complete handshake within %s s", who, HANDSHAKE_LIMIT_S)
        except (AuthenticationFailed, ProtocolViolation, ConfigError) as exc:
            logger.warning("%s was turned away: %s", who, exc)
        except OSError as exc:
            logger.warning("%s was turned away: the connection ended during the handshake (%s)", who, exc)
        finally:
            if not handed_over:
                connection.close()


def _listen_tcp(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        fork.note_socket(listener)
        try:
            listener.bind(place)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise TransportError(f"cannot listen on {host!r}: {exc.strerror or exc}") from exc
    listener.setblocking(False)
    return listener


def _listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fork.note_socket(listener)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
