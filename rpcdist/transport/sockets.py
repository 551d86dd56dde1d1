"""Raw sockets between processes, authenticated before anything of the peer is believed.

A `SocketHub` listens on one TCP port and, on Linux, under one abstract Unix name. `connect` opens a connection for a
purpose, a string that both ends agree on; `expect` returns the connection that a peer opened for it, whichever side
came first. Both give away a bare non-blocking socket on which nothing but the handshake has happened.

Guarantees:

 1. The mutual proof of the job token (handshake.py) comes first, on every socket. A Unix peer is this user, too.
 2. Unproven connections are bounded: `MAX_UNPROVEN` of them, `HANDSHAKE_LIMIT_S` for each, `MAX_HANDSHAKE_BYTES` a
    message. A stranger is turned away with a log line; silent ones make room when others come.
 3. Proven connections that nobody expects yet are bounded as well: `MAX_WAITING` of them, `UNEXPECTED_SOCKET_LIMIT_S`
    for each. No time limit holds for purposes that were announced by `announce`.
 4. Children that are forked get none of these sockets (fork.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from rpcdist.deadline import Deadline
from rpcdist.errors import (
    BlockingInLoop,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    RpcdistError,
    TransportError,
)
from rpcdist.time_limits import (
    CHECK_INTERVAL_S,
    HUB_CLOSE_LIMIT_S,
    HUB_OPEN_LIMIT_S,
    THREAD_GRACE_S,
    UNEXPECTED_SOCKET_LIMIT_S,
)
from rpcdist.transport import fork
from rpcdist.transport._socket_hub.hub_acceptor import HubAcceptor
from rpcdist.transport._socket_hub.hub_address import HubAddress
from rpcdist.transport._socket_hub.hub_connector import HubConnector
from rpcdist.transport._socket_hub.waiting_room import WaitingRoom
from rpcdist.transport._socket_hub.wire import ROLE, check_purpose
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.io_loop import IoLoop

__all__ = ["MAX_WAITING", "HubAddress", "SocketHub"]

T = TypeVar("T")

MAX_WAITING: Final = 4096

Check = Callable[[], None]
Taker = Callable[[str, socket.socket], None]


class SocketHub:
    """The raw sockets of one process; any thread may use it. Nothing listens before `open`.

    Args:
        io: the I/O loop that connects and accepts.
        credentials: what this process proves itself with.
    """

    def __init__(self, io: IoLoop, credentials: Credentials) -> None:
        self._io = io
        self._address: HubAddress | None = None
        self._room = WaitingRoom(io, MAX_WAITING, UNEXPECTED_SOCKET_LIMIT_S)
        self._connector = HubConnector(lambda: credentials.client_handshake(ROLE))
        self._acceptor = HubAcceptor(io, self._room, credentials.server_handshake)
        self._closed = False
        self._lock = threading.Lock()  # for `open` and `close`

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self._address}" if self._address else "not open"
        return f"<SocketHub {state} [{len(self._room)} waiting, {self._acceptor.num_unproven} unproven]>"

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
                address = self._acceptor.listen(host)
                self._wait(self._acceptor.start(), Deadline.after(timeout_s), None)
                self._address = address
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
            purpose: the string that the peer gave to `connect`.
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
            prefix: beginning of the purposes.
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
                return await self._connector.connect(HubAddress.parse(address), purpose, unix)
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
                self._wait(self._acceptor.stop(), Deadline.after(HUB_CLOSE_LIMIT_S), None)
        self._acceptor.close_listeners()

    # ------------------------------------------------------------ any thread

    def _wait(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline, check: Check | None) -> T:
        """Runs a coroutine on the I/O loop; its own time limit fires before this one's."""
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


def _close_result(future: concurrent.futures.Future[Any]) -> None:
    """A connection that was ready when nobody waited for it any more."""
    if not future.cancelled() and future.exception() is None and isinstance(result := future.result(), socket.socket):
        result.close()


def _closed() -> TransportError:
    return TransportError("the socket hub is closed")
