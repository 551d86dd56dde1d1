"""Raw sockets between processes, authenticated before any data of the peer is used.

A `SocketHub` accepts connections on the raw listeners of its node: TCP and, on Linux, Unix. `connect` opens a
connection for a purpose, a string that both ends agree on; `expect` returns the connection that a peer opened for that
purpose, before or after the call. Both return a non-blocking socket that has carried only the handshake. Between hosts
it uses TLS, on the thread that uses it (`StreamSocket`).

Guarantees:

 1. The mutual proof of the job token (handshake.py) comes first on every socket, and covers the hub and the purpose. A
    Unix peer also belongs to this user.
 2. Unauthenticated peers can use only bounded resources (admission.py).
 3. At most `MAX_WAITING` proven connections wait for a call of `expect`, each for at most `ROLE_LIMIT_S`. A purpose
    announced by `announce` has no time limit.
 4. Forked children get none of these sockets (fork.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar, overload

from rpcdist.deadline import Deadline
from rpcdist.errors import BlockingInLoop, ConfigError, ConnectFailed, DeadlineExceeded, RpcdistError, TransportError
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import CHECK_INTERVAL_S, ROLE_LIMIT_S, SLOW_ANSWER_LIMIT_S, THREAD_GRACE_S
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.hub_connector import HubAddress, connect_to_hub, widen
from rpcdist.transport.node import Node

T = TypeVar("T")

MAX_WAITING: Final = 4096
MAX_PURPOSE_BYTES: Final = 512

Check = Callable[[], None]
Taker = Callable[[str, StreamSocket], None]

logger = logging.getLogger(__name__)


class SocketHub:
    """The raw sockets of one part of a process; any thread may use it. It does not listen before `open`.

    Args:
        node: the node whose listeners, connector and credentials the hub uses. It must outlive the hub.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._io = node.io
        self._name = secrets.token_hex(8)
        self._address: HubAddress | None = None
        self._closed = False
        self._lock = threading.Lock()  # held by `open` and `close`
        self._waiting: dict[str, deque[StreamSocket]] = {}  # proven connections by purpose, in order of arrival
        self._wanted: dict[str, int] = {}  # purposes for which threads wait, with the number of threads
        self._announced: dict[str, Taker | None] = {}
        self._arrived = threading.Condition()  # protects these three

    @property
    def address(self) -> str:
        """The address for `connect` of peers. Raises `ConfigError` before `open`."""
        if self._address is None:
            raise ConfigError("the socket hub is not listening yet. Call open(host) first.")
        return str(self._address)

    def open(self, host: str, timeout_s: float = SLOW_ANSWER_LIMIT_S) -> str:
        """Starts accepting connections; blocks briefly; a second call has no effect.

        Args:
            host: the address of the TCP listener; the system chooses the port.

        Returns:
            The address.

        Raises:
            TransportError: the address cannot be bound, or the hub is closed.
        """
        with self._lock:
            if self._closed:
                raise _closed()
            if self._address is None:
                self._address = self._node.take_sockets(self._name, self, host, timeout_s)
        return self.address

    @overload
    def connect(
        self, address: str, purpose: str, timeout_s: float, unix: Literal[True], check: Check | None = None
    ) -> socket.socket: ...

    @overload
    def connect(
        self, address: str, purpose: str, timeout_s: float, unix: bool | None = None, check: Check | None = None
    ) -> StreamSocket: ...

    def connect(
        self, address: str, purpose: str, timeout_s: float, unix: bool | None = None, check: Check | None = None
    ) -> StreamSocket:
        """Opens a connection and proves both ends; blocks. Do not call it on an event loop's thread.

        Args:
            address: `SocketHub.address` of the peer.
            purpose: the purpose of the connection, for which the peer calls `expect`.
            timeout_s: limit of the whole operation, in seconds.
            unix: True for the Unix socket, False for TCP; None tries the Unix socket first.
            check: called about every 50 ms; an exception that it raises ends the wait.

        Returns:
            A non-blocking socket; the caller closes it. The peer may not have called `expect` yet.

        Raises:
            ConnectFailed: the peer did not answer in time.
            AuthenticationFailed: one side did not prove the token.
            ProtocolViolation: the peer refused the purpose, or is not a hub.
        """
        deadline = Deadline.after(timeout_s)
        return self._wait(self.open_connection(address, purpose, timeout_s, unix), deadline, check)

    def expect(self, purpose: str, timeout_s: float, check: Check | None = None) -> StreamSocket:
        """Waits for the connection that a peer opens for `purpose`; blocks. Several come in the order of arrival.

        Args:
            purpose: the string that the peer gave to `connect`.
            check: called about every 50 ms; an exception that it raises ends the wait.

        Returns:
            A non-blocking socket; the caller closes it.

        Raises:
            DeadlineExceeded: no peer connected in time.
            TransportError: the hub was closed.
        """
        _check_purpose(purpose)
        deadline = Deadline.after(timeout_s)
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

    async def open_connection(
        self, address: str, purpose: str, timeout_s: float, unix: bool | None = None
    ) -> StreamSocket:
        """`connect`, on the I/O loop. A cancellation leaves nothing open."""
        if self._closed:
            raise _closed()
        _check_purpose(purpose)
        began = time.monotonic()
        try:
            async with asyncio.timeout(Deadline.after(timeout_s).wait_s()):  # uvloop accepts no infinite time
                return await connect_to_hub(self._node.credentials, HubAddress.parse(address), purpose, unix)
        except TimeoutError as exc:
            waited_s = time.monotonic() - began
            reason = own_shortage() or f"no answer to the handshake for {purpose!r}"
            raise ConnectFailed(address, reason, waited_s) from exc
        except OSError as exc:
            if isinstance(exc, RpcdistError):
                raise
            raise ConnectFailed(address, exc.strerror or str(exc), time.monotonic() - began) from exc

    def close(self) -> None:
        """Stops accepting connections, and closes those not handed over; idempotent. Waiting threads get an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._node.end_sockets(self._name)
        with self._arrived:
            dropped = [connection for waiting in self._waiting.values() for connection in waiting]
            self._waiting.clear()
            self._arrived.notify_all()
        for connection in dropped:
            connection.close()

    def announce(self, prefix: str, taker: Taker | None = None) -> None:
        """Lets connections wait without a limit if their purpose begins with `prefix`.

        Args:
            taker: called with purpose and socket instead of `expect`, on the I/O loop; it must not block. It gets
                connections that already wait at once, on the caller's thread.
        """
        with self._arrived:
            self._announced[prefix] = taker
            found = self._take(prefix) if taker else []
        if taker is not None:
            for purpose, connection in found:
                taker(purpose, connection)

    def withdraw(self, prefix: str) -> None:
        """Ends `announce`, and closes connections that still wait for such a purpose."""
        with self._arrived:
            self._announced.pop(prefix, None)
            dropped = self._take(prefix)
        for _, connection in dropped:
            connection.close()

    # ------------------------------------------------------------ a `SocketTaker`

    def refusal(self, purpose: str, peer: Identity) -> str:
        """See `SocketTaker`."""
        with self._arrived:
            if self._closed:
                return "the socket hub is closed"
            if (waiting := self._num_waiting()) >= MAX_WAITING and purpose not in self._wanted:
                return f"{waiting} connections already wait here that no thread expects"
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
                self._arrived.notify_all()
        if taker is not None:
            taker(purpose, connection)
        elif prefix is None:
            self._io.loop.call_later(ROLE_LIMIT_S, self._expire, purpose, connection)
        return True

    # ------------------------------------------------------------ any thread

    def _next(self, purpose: str, deadline: Deadline, checked: bool) -> StreamSocket | None:
        """One turn of waiting, with the lock held."""
        if self._closed:
            raise TransportError("the socket hub was closed")
        if not self._waiting.get(purpose):
            if deadline.expired():
                raise DeadlineExceeded(f"no peer connected for {purpose!r} in time")
            self._arrived.wait(min(CHECK_INTERVAL_S, deadline.remaining_s()) if checked else deadline.wait_s())
        return self._pop(purpose) if self._waiting.get(purpose) else None

    def _prefix_of(self, purpose: str) -> str | None:
        return next((prefix for prefix in self._announced if purpose.startswith(prefix)), None)

    def _pop(self, purpose: str) -> StreamSocket:
        waiting = self._waiting[purpose]
        connection = waiting.popleft()
        if not waiting:
            del self._waiting[purpose]
        return connection

    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _take(self, prefix: str) -> list[tuple[str, StreamSocket]]:
        """Removes the connections whose purpose begins with `prefix`; with the lock held."""
        purposes = [purpose for purpose in self._waiting if purpose.startswith(prefix)]
        return [(purpose, connection) for purpose in purposes for connection in self._waiting.pop(purpose)]

    def _expire(self, purpose: str, connection: StreamSocket) -> None:
        with self._arrived:
            waiting = self._waiting.get(purpose)
            if waiting is None or connection not in waiting or self._prefix_of(purpose) is not None:
                return
            waiting.remove(connection)
            if not waiting:
                del self._waiting[purpose]
        logger.warning("a connection for %r was closed: no thread expected it within %s s", purpose, ROLE_LIMIT_S)
        connection.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline, check: Check | None) -> T:
        """Runs a coroutine on the I/O loop; the coroutine's own time limit expires before this one."""
        if asyncio._get_running_loop() is not None:
            coroutine.close()
            raise BlockingInLoop("opening a socket", "await hub.open_connection(...)")
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._io.loop)
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


def _check_purpose(purpose: str) -> str:
    if not purpose or not purpose.isprintable() or len(purpose.encode()) > MAX_PURPOSE_BYTES:
        raise ConfigError(f"a purpose is printable text of up to {MAX_PURPOSE_BYTES} bytes, not {purpose[:80]!r}")
    return purpose


def _close_result(future: concurrent.futures.Future[Any]) -> None:
    """Closes a connection that became ready after the wait for it had ended."""
    if not future.cancelled() and future.exception() is None and isinstance(result := future.result(), StreamSocket):
        result.close()


def _closed() -> TransportError:
    return TransportError("the socket hub is closed")
