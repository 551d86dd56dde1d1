"""Raw sockets between processes, authenticated before anything of the peer is believed.

A `SocketHub` takes connections on the raw listeners of its node, TCP and, on Linux, Unix. `connect` opens a connection
for a purpose, a string that both ends agree on; `expect` returns the connection that a peer opened for it, whichever
side came first. Both give away a non-blocking socket on which nothing but the handshake has happened. Between hosts it
speaks TLS, on the thread that uses it (`StreamSocket`).

Guarantees:

 1. The mutual proof of the job token (handshake.py) comes first, on every socket, and names the hub and the purpose. A
    Unix peer is this user, too.
 2. What strangers may cost is bounded (admission.py).
 3. Proven connections that nobody expects yet are bounded as well: `MAX_WAITING` of them, `UNEXPECTED_SOCKET_LIMIT_S`
    for each. No time limit holds for purposes that were announced by `announce`.
 4. Children that are forked get none of these sockets (fork.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Literal, Protocol, TypeVar, overload

from rpcdist.deadline import Deadline
from rpcdist.errors import (
    BlockingInLoop,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    RpcdistError,
    TransportError,
)
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import (
    CHECK_INTERVAL_S,
    HUB_OPEN_LIMIT_S,
    THREAD_GRACE_S,
    UNEXPECTED_SOCKET_LIMIT_S,
)
from rpcdist.transport._channels.socket_pipe import until_ready
from rpcdist.transport._socket_hub.hub_address import HubAddress
from rpcdist.transport._socket_hub.hub_connector import HubConnector, widen
from rpcdist.transport._socket_hub.waiting_room import WaitingRoom
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.roles import SocketTaker

T = TypeVar("T")

MAX_WAITING: Final = 4096
MAX_PURPOSE_BYTES: Final = 512

Check = Callable[[], None]
Taker = Callable[[str, StreamSocket], None]


class SocketPlace(Protocol):
    """What a hub needs of a node; see there."""

    @property
    def io(self) -> IoLoop: ...

    @property
    def credentials(self) -> Credentials: ...

    def take_sockets(self, name: str, taker: SocketTaker, host: str, timeout_s: float) -> HubAddress: ...

    def end_sockets(self, name: str) -> None: ...


class SocketHub:
    """The raw sockets of one part of a process; any thread may use it. Nothing listens before `open`.

    Args:
        node: connects, listens, and proves this process. It outlives the hub.
    """

    def __init__(self, node: SocketPlace) -> None:
        self._node = node
        self._io = node.io
        self._name = secrets.token_hex(8)
        self._address: HubAddress | None = None
        self._room = WaitingRoom(node.io, MAX_WAITING, UNEXPECTED_SOCKET_LIMIT_S)
        self._connector = HubConnector(node.credentials)
        self._closed = False
        self._lock = threading.Lock()  # for `open` and `close`

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self._address}" if self._address else "not open"
        return f"<SocketHub {state} [{len(self._room)} waiting]>"

    @property
    def address(self) -> str:
        """What peers pass to `connect`. Raises `ConfigError` before `open`."""
        if self._address is None:
            raise ConfigError("the socket hub does not listen yet; call open(host) first")
        return str(self._address)

    def open(self, host: str, timeout_s: float = HUB_OPEN_LIMIT_S) -> str:
        """Starts to take connections; blocks briefly; a second call changes nothing.

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
                self._address = self._node.take_sockets(self._name, _Taker(self._room), host, timeout_s)
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

    def expect(self, purpose: str, timeout_s: float, check: Check | None = None) -> StreamSocket:
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
        return self._room.take(_check_purpose(purpose), Deadline.after(timeout_s), check)

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
    ) -> StreamSocket:
        """`connect`, on the I/O loop. Cancelling leaves nothing open."""
        if self._closed:
            raise _closed()
        _check_purpose(purpose)
        began = time.monotonic()
        try:
            async with asyncio.timeout(Deadline.after(timeout_s).wait_s()):  # uvloop knows no infinity
                return await self._connector.connect(HubAddress.parse(address), purpose, unix)
        except TimeoutError as exc:
            waited_s = time.monotonic() - began
            reason = own_shortage() or f"no answer to the handshake for {purpose!r}"
            raise ConnectFailed(address, reason, waited_s) from exc
        except OSError as exc:
            if isinstance(exc, RpcdistError):
                raise
            raise ConnectFailed(address, exc.strerror or str(exc), time.monotonic() - began) from exc

    def close(self) -> None:
        """Takes no more connections, and closes what was not handed over; idempotent. Waiting threads get an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._node.end_sockets(self._name)
        self._room.close()

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


class _Taker:
    """Files the connections that come in the waiting room."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room

    def refusal(self, purpose: str, peer: Identity) -> str:
        return self._room.refusal(purpose)

    def put(self, purpose: str, connection: StreamSocket) -> bool:
        widen(connection)
        return self._room.put(purpose, connection)


async def send_all(connection: StreamSocket, data: bytes) -> None:
    """Sends on the running loop, as `loop.sock_sendall`. Cancelled, it may have sent a part. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            await until_ready(connection, for_writing=True)


async def receive_some(connection: StreamSocket, size: int) -> bytes:
    """At least one byte and at most `size`, as `loop.sock_recv`; none at the end. Raises `OSError`."""
    while True:
        try:
            return connection.recv(size)
        except BlockingIOError:
            await until_ready(connection, for_writing=False)


def _check_purpose(purpose: str) -> str:
    if not purpose or not purpose.isprintable() or len(purpose.encode()) > MAX_PURPOSE_BYTES:
        raise ConfigError(f"a purpose is printable text of up to {MAX_PURPOSE_BYTES} bytes, not {purpose[:80]!r}")
    return purpose


def _close_result(future: concurrent.futures.Future[Any]) -> None:
    """A connection that was ready when nobody waited for it any more."""
    if not future.cancelled() and future.exception() is None and isinstance(result := future.result(), StreamSocket):
        result.close()


def _closed() -> TransportError:
    return TransportError("the socket hub is closed")
