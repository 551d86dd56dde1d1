"""Raw sockets between processes, authenticated before anything of the peer is believed.

A `SocketHub` listens on one TCP port and, on Linux, under one abstract Unix name. `connect` opens a connection for a
purpose, a string that both ends agree on; `expect` returns the connection that a peer opened for it, whichever side
came first. Both give away a bare non-blocking socket on which nothing but the handshake has happened.

Guarantees:

 1. The mutual proof of the job token (handshake.py) comes first, on every socket. A Unix peer is this user, too.
 2. What is not proven is bounded: `MAX_UNPROVEN` connections, `HANDSHAKE_LIMIT_S` for each, `MAX_HANDSHAKE_BYTES` a
    message. A stranger is turned away with a log line; silent ones make room when others come.
 3. What is proven and not yet expected is bounded as well: `MAX_WAITING` connections, `UNEXPECTED_SOCKET_LIMIT_S`
    for each. No time limit holds for purposes that were announced by `announce`.
 4. Children that are forked get none of these sockets (fork.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from rpcdist.deadline import Deadline
from rpcdist.errors import (
    AuthenticationFailed,
    BlockingInLoop,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    ProtocolViolation,
    RpcdistError,
    TransportError,
)
from rpcdist.time_limits import (
    CHECK_INTERVAL_S,
    HANDSHAKE_LIMIT_S,
    HUB_CLOSE_LIMIT_S,
    HUB_OPEN_LIMIT_S,
    SILENT_HANDSHAKE_LIMIT_S,
    THREAD_GRACE_S,
    UNEXPECTED_SOCKET_LIMIT_S,
)
from rpcdist.transport import fork
from rpcdist.transport._socket_hub.waiting_room import WaitingRoom
from rpcdist.transport._socket_hub.wire import (
    ROLE,
    HubAddress,
    check_purpose,
    connect_tcp,
    connect_unix,
    has_abstract_sockets,
    prove_client,
    prove_server,
    same_user,
    tune,
)
from rpcdist.transport.node import Node

__all__ = ["MAX_UNPROVEN", "MAX_WAITING", "HubAddress", "SocketHub"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_UNPROVEN: Final = 64
MAX_WAITING: Final = 4096
_BACKLOG: Final = 512

Check = Callable[[], None]
Taker = Callable[[str, socket.socket], None]


class SocketHub:
    """The raw sockets of one process; any thread may use it. Nothing listens before `open`.

    Args:
        node: gives the token, the job, this process's identity and the I/O loop.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._address: HubAddress | None = None
        self._room = WaitingRoom(node.io, MAX_WAITING, UNEXPECTED_SOCKET_LIMIT_S)
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._unproven: dict[asyncio.Task[Any], float | None] = {}  # since when it is silent; None once it spoke
        self._slot_freed = asyncio.Event()
        self._closed = False
        self._lock = threading.Lock()  # for `open` and `close`

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self._address}" if self._address else "not open"
        return f"<SocketHub {state} [{len(self._room)} waiting, {len(self._unproven)} unproven]>"

    @property
    def address(self) -> str:
        """What peers pass to `connect`. Raises `ConfigError` before `open`."""
        if self._address is None:
            raise ConfigError("the socket hub does not listen yet; call open(host) first")
        return str(self._address)

    def open(self, host: str, timeout_s: float = HUB_OPEN_LIMIT_S) -> str:
        """Starts to listen; blocks briefly; a second call changes nothing.

        Args:
            host: the address for the TCP listener; its port is chosen by the system.
            timeout_s: limit, in seconds.

        Returns:
            The address.

        Raises:
            TransportError: the address cannot be bound, or the hub is closed.
        """
        with self._lock:
            if self._closed:
                raise _closed()
            if self._address is None:
                listeners = [self._listen_tcp(host)]
                bound_host, port = listeners[0].getsockname()[:2]
                unix_name = ""
                if has_abstract_sockets():
                    unix_name = f"rpcdist-{secrets.token_hex(16)}"
                    listeners.append(self._listen_unix(unix_name))
                self._listeners = listeners
                self._wait(self._start(), Deadline.after(timeout_s), None)
                self._address = HubAddress(bound_host, port, unix_name)
        return self.address

    def connect(
        self, address: str, purpose: str, timeout_s: float, unix: bool | None = None, check: Check | None = None
    ) -> socket.socket:
        """Opens a connection and proves both ends; blocks, on any thread but a loop's.

        Args:
            address: `SocketHub.address` of the peer.
            purpose: what the connection is for; the peer calls `expect` with the same.
            timeout_s: limit of all of it, in seconds.
            unix: True for the Unix socket, False for TCP; None tries the Unix socket first.
            check: called about every 50 ms; what it raises ends the wait.

        Returns:
            A non-blocking socket; the caller closes it. The peer may not have called `expect` yet.

        Raises:
            ConnectFailed: nobody answered in time.
            AuthenticationFailed: one side did not prove the token.
            ProtocolViolation: the peer refused the purpose, or is no hub.
        """
        deadline = Deadline.after(timeout_s)
        return self._wait(self.open_connection(address, purpose, timeout_s, unix), deadline, check)

    def expect(self, purpose: str, timeout_s: float, check: Check | None = None) -> socket.socket:
        """Waits for the connection that a peer opens for `purpose`; blocks. Several come in the order of arrival.

        Args:
            purpose: as the peer calls it.
            timeout_s: limit, in seconds.
            check: called about every 50 ms; what it raises ends the wait.

        Returns:
            A non-blocking socket; the caller closes it.

        Raises:
            DeadlineExceeded: nobody connected in time.
            TransportError: the hub was closed.
        """
        return self._room.take(check_purpose(purpose), Deadline.after(timeout_s), check)

    def announce(self, prefix: str, taker: Taker | None = None) -> None:
        """Says that connections whose purpose begins with `prefix` are wanted: they may wait as long as they like.

        Args:
            prefix: of the purposes.
            taker: called with purpose and socket instead of `expect`, on the I/O loop; it must not block. What waits
                already is given to it at once, on the caller's thread.
        """
        self._room.announce(prefix, taker)

    def withdraw(self, prefix: str) -> None:
        """Ends `announce`, and closes what still waits for such a purpose."""
        self._room.withdraw(prefix)

    async def open_connection(
        self, address: str, purpose: str, timeout_s: float, unix: bool | None = None
    ) -> socket.socket:
        """`connect`, on the I/O loop. Cancelling leaves nothing open."""
        if self._closed:
            raise _closed()
        check_purpose(purpose)
        began = time.monotonic()
        try:
            async with asyncio.timeout(Deadline.after(timeout_s).wait_s()):  # uvloop knows no infinity
                return await self._connect_any(HubAddress.parse(address), purpose, unix)
        except TimeoutError as exc:
            waited_s = time.monotonic() - began
            raise ConnectFailed(address, f"no answer to the handshake for {purpose!r}", waited_s) from exc
        except OSError as exc:
            if isinstance(exc, RpcdistError):
                raise
            raise ConnectFailed(address, exc.strerror or str(exc), time.monotonic() - began) from exc

    def close(self) -> None:
        """Stops to listen, and closes what was not handed over; idempotent, bounded. Waiting threads get an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._room.close()
        if not fork.in_forked_child():
            with suppress(RpcdistError):  # a loop that has ended already took its tasks along
                self._wait(self._stop(), Deadline.after(HUB_CLOSE_LIMIT_S), None)
        for listener in self._listeners:
            listener.close()

    # ------------------------------------------------------------ any thread

    def _wait(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline, check: Check | None) -> T:
        """Runs a coroutine on the I/O loop; its own time limit fires before this one's."""
        if asyncio._get_running_loop() is not None:
            coroutine.close()
            raise BlockingInLoop("opening a socket", "await hub.open_connection(...)")
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._node.io.loop)
        except RuntimeError as exc:
            coroutine.close()
            raise TransportError("the I/O loop of the socket hub is closed") from exc
        limit = Deadline(deadline.at + THREAD_GRACE_S)
        try:
            while True:
                with suppress(concurrent.futures.TimeoutError):
                    return future.result(CHECK_INTERVAL_S if check else limit.wait_s())
                if future.done():
                    return future.result()
                if check is not None:
                    check()
                if limit.expired():
                    raise DeadlineExceeded("the I/O loop did not answer in time")
        finally:
            if not future.done():
                future.cancel()
                future.add_done_callback(_close_result)

    def _listen_tcp(self, host: str) -> socket.socket:
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

    def _listen_unix(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fork.note_socket(listener)
        listener.bind("\0" + name)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return listener

    # ------------------------------------------------------------ I/O loop: out

    async def _connect_any(self, address: HubAddress, purpose: str, unix: bool | None) -> socket.socket:
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
        connection = self._new_socket(socket.AF_UNIX)
        try:
            await connect_unix(connection, address.unix_name)
            if not same_user(connection):
                raise AuthenticationFailed(f"the Unix socket of {address} belongs to another user")
            return await self._prove(connection, purpose)
        except BaseException:
            connection.close()
            raise

    async def _connect_tcp(self, address: HubAddress, purpose: str) -> socket.socket:
        connection = self._new_socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        try:
            await connect_tcp(connection, address.host, address.port)
            return await self._prove(connection, purpose)
        except BaseException:
            connection.close()
            raise

    def _new_socket(self, family: int) -> socket.socket:
        connection = socket.socket(family, socket.SOCK_STREAM)
        fork.note_socket(connection)
        connection.setblocking(False)
        tune(connection)
        return connection

    async def _prove(self, connection: socket.socket, purpose: str) -> socket.socket:
        node = self._node
        side = node.credentials.client_handshake(ROLE)
        await prove_client(connection, side, purpose)
        return connection

    # ------------------------------------------------------------ I/O loop: in

    async def _start(self) -> None:
        for listener in self._listeners:
            self._tasks.append(self._node.io.spawn(self._accept(listener), "rpcdist socket hub"))

    async def _stop(self) -> None:
        tasks = [*self._tasks, *self._unproven]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=HUB_CLOSE_LIMIT_S / 2)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._free_slot()
            try:
                connection, origin = await self._node.io.loop.sock_accept(listener)
            except OSError as exc:  # out of descriptors, or the peer is gone already
                logger.warning("a connection could not be accepted: %s", exc)
                await asyncio.sleep(CHECK_INTERVAL_S)
                continue
            fork.note_socket(connection)
            who = "a Unix socket" if listener.family == socket.AF_UNIX else f"{origin[0]}:{origin[1]}"
            task = self._node.io.spawn(self._admit(connection, who), f"rpcdist handshake with {who}")
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
            node = self._node
            side = node.credentials.server_handshake()
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                purpose = await prove_server(connection, side, self._room.refusal, spoke)
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


def _close_result(future: concurrent.futures.Future[Any]) -> None:
    """A connection that was ready when nobody waited for it any more."""
    if not future.cancelled() and future.exception() is None and isinstance(result := future.result(), socket.socket):
        result.close()


def _closed() -> TransportError:
    return TransportError("the socket hub is closed")
