"""Proven connections that nobody has expected yet, and the threads that wait for connections."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, TransportError
from rpcdist.ids import Identity
from rpcdist.time_limits import CHECK_INTERVAL_S
from rpcdist.transport._socket_hub.hub_connector import widen
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.io_loop import IoLoop

logger = logging.getLogger(__name__)


Taker = Callable[[str, StreamSocket], None]


class WaitingRoom:
    """Purpose to connections, in order of arrival; any thread may use it. A `SocketTaker`.

    Args:
        io: its loop's timers end what waits too long.
        max_waiting: how many connections may wait at once.
        limit_s: how long one may wait whose purpose was not announced, in seconds.
    """

    def __init__(self, io: IoLoop, max_waiting: int, limit_s: float) -> None:
        self._io = io
        self._max_waiting = max_waiting
        self._limit_s = limit_s
        self._waiting: dict[str, deque[StreamSocket]] = {}
        self._num_waiting = 0
        self._wanted: dict[str, int] = {}  # purposes that threads wait for
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
                return f"{self._num_waiting} connections wait already that nobody expects"
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
                    check()  # without the lock: it may take its time
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

    def announce(self, prefix: str, taker: Taker | None) -> None:
        """See `SocketHub.announce`."""
        with self._arrived:
            self._announced[prefix] = taker
            purposes = [purpose for purpose in self._waiting if purpose.startswith(prefix)] if taker else []
            found = [(purpose, self._pop(purpose)) for purpose in purposes for _ in range(len(self._waiting[purpose]))]
        if taker is not None:
            for purpose, connection in found:
                taker(purpose, connection)

    def withdraw(self, prefix: str) -> None:
        """See `SocketHub.withdraw`."""
        with self._arrived:
            self._announced.pop(prefix, None)
            purposes = [purpose for purpose in self._waiting if purpose.startswith(prefix)]
            dropped = [self._pop(purpose) for purpose in purposes for _ in range(len(self._waiting[purpose]))]
        for connection in dropped:
            connection.close()

    def close(self) -> None:
        """Closes what waits, and wakes who waits."""
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
        logger.warning("a connection for %r was closed: nobody expected it within %s s", purpose, self._limit_s)
        connection.close()
