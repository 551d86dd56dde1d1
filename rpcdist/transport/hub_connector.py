"""Both sides of a socket hub: its address, the connections to it, and the proven connections that no thread has
expected yet, with the threads that wait for them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import ConfigError, ConnectFailed, DeadlineExceeded, RpcdistError, TransportError
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import CHECK_INTERVAL_S, FIRST_PAUSE_S, LONGEST_PAUSE_S
from rpcdist.transport._channels.proving import open_proven
from rpcdist.transport._channels.stream_sockets import connect_tcp, connect_unix
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.addresses import join_address, split_address
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.io_loop import IoLoop
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
        if not slash or (comma and (len(unix) < 2 or not unix.startswith("@") or len(unix) > 100)):
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
    """Enlarges the buffers of a Unix socket; TCP grows its own."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


Taker = Callable[[str, StreamSocket], None]


class WaitingRoom:
    """Maps purposes to connections, in order of arrival; any thread may use it. A `SocketTaker`.

    Args:
        io: the loop whose timers close connections that wait too long.
        max_waiting: limit on the connections that wait at once.
        limit_s: limit on the wait of a connection whose purpose was not announced, in seconds.
    """

    def __init__(self, io: IoLoop, max_waiting: int, limit_s: float) -> None:
        self._io = io
        self._max_waiting = max_waiting
        self._limit_s = limit_s
        self._waiting: dict[str, deque[StreamSocket]] = {}
        self._num_waiting = 0
        self._wanted: dict[str, int] = {}  # purposes for which threads wait, with the number of threads
        self._announced: dict[str, Taker | None] = {}
        self._arrived = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._num_waiting

    def refusal(self, purpose: str, peer: Identity) -> str:
        """See `SocketTaker`."""
        with self._arrived:
            if self._closed:
                return "the socket hub is closed"
            if self._num_waiting >= self._max_waiting and purpose not in self._wanted:
                return f"{self._num_waiting} connections already wait here that no thread expects"
            return ""

    def put(self, purpose: str, connection: StreamSocket) -> bool:
        """See `SocketTaker`."""
        widen(connection)
        with self._arrived:
            if self._closed:
                return False
            prefix = self._prefix_of(purpose)
            taker = None if prefix is None else self._announced[prefix]
            if taker is None:
                self._waiting.setdefault(purpose, deque()).append(connection)
                self._num_waiting += 1
                self._arrived.notify_all()
        if taker is not None:
            taker(purpose, connection)
        elif prefix is None:
            self._io.loop.call_later(self._limit_s, self._expire, purpose, connection)
        return True

    def take(self, purpose: str, deadline: Deadline, check: Callable[[], None] | None) -> StreamSocket:
        """Waits for a connection; see `SocketHub.expect`."""
        with self._arrived:
            self._wanted[purpose] = self._wanted.get(purpose, 0) + 1
        try:
            while True:
                with self._arrived:
                    connection = self._next(purpose, deadline, check is not None)
                if connection is not None:
                    return connection
                if check is not None:
                    check()  # without the lock, since it may take long
        finally:
            with self._arrived:
                self._wanted[purpose] -= 1
                if not self._wanted[purpose]:
                    del self._wanted[purpose]

    def _next(self, purpose: str, deadline: Deadline, checked: bool) -> StreamSocket | None:
        """One turn of waiting, with the lock held."""
        if self._closed:
            raise TransportError("the socket hub was closed")
        if not self._waiting.get(purpose):
            if deadline.expired():
                raise DeadlineExceeded(f"no peer connected for {purpose!r} in time")
            self._arrived.wait(min(CHECK_INTERVAL_S, deadline.remaining_s()) if checked else deadline.wait_s())
        return self._pop(purpose) if self._waiting.get(purpose) else None

    def announce(self, prefix: str, taker: Taker | None = None) -> None:
        """Lets connections wait without a limit if their purpose begins with `prefix`.

        Args:
            taker: called with purpose and socket instead of `expect`, on the I/O loop; it must not block. It gets
                connections that already wait at once, on the caller's thread.
        """
        with self._arrived:
            self._announced[prefix] = taker
            purposes = [purpose for purpose in self._waiting if purpose.startswith(prefix)] if taker else []
            found = [(purpose, self._pop(purpose)) for purpose in purposes for _ in range(len(self._waiting[purpose]))]
        if taker is not None:
            for purpose, connection in found:
                taker(purpose, connection)

    def withdraw(self, prefix: str) -> None:
        """Ends `announce`, and closes connections that still wait for such a purpose."""
        with self._arrived:
            self._announced.pop(prefix, None)
            purposes = [purpose for purpose in self._waiting if purpose.startswith(prefix)]
            dropped = [self._pop(purpose) for purpose in purposes for _ in range(len(self._waiting[purpose]))]
        for connection in dropped:
            connection.close()

    def close(self) -> None:
        """Closes the waiting connections, and wakes the waiting threads."""
        with self._arrived:
            self._closed = True
            dropped = [connection for waiting in self._waiting.values() for connection in waiting]
            self._waiting.clear()
            self._num_waiting = 0
            self._arrived.notify_all()
        for connection in dropped:
            connection.close()

    def _prefix_of(self, purpose: str) -> str | None:
        return next((prefix for prefix in self._announced if purpose.startswith(prefix)), None)

    def _pop(self, purpose: str) -> StreamSocket:
        waiting = self._waiting[purpose]
        connection = waiting.popleft()
        if not waiting:
            del self._waiting[purpose]
        self._num_waiting -= 1
        return connection

    def _expire(self, purpose: str, connection: StreamSocket) -> None:
        with self._arrived:
            waiting = self._waiting.get(purpose)
            if waiting is None or connection not in waiting or self._prefix_of(purpose) is not None:
                return
            waiting.remove(connection)
            if not waiting:
                del self._waiting[purpose]
            self._num_waiting -= 1
        logger.warning("a connection for %r was closed: no thread expected it within %s s", purpose, self._limit_s)
        connection.close()
