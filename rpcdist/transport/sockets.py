"""Raw sockets between processes, authenticated before any data of the peer is used.

A `SocketHub` accepts connections on the raw listeners of its node: TCP and, on Linux, Unix. `connect` opens a
connection for a purpose, a string that both ends agree on; `announce` gives the connections that peers open for some
purposes, before or after the call, to a function, and `collect` waits for them. All give non-blocking sockets that have
carried only the handshake. Between hosts they use TLS, on the thread that uses them (`StreamSocket`).

Guarantees:

 1. The mutual proof of the job token (handshake.py) comes first on every socket, and covers the hub and the purpose. A
    Unix peer also belongs to this user.
 2. Unauthenticated peers can use only bounded resources (admission.py).
 3. At most `MAX_WAITING` proven connections wait for a call of `announce`, each for at most `ROLE_LIMIT_S`.
 4. Forked children get none of these sockets (fork.py).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import ConfigError, ConnectFailed, DeadlineExceeded, RpcdistError, TransportError, listed
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import CHECK_INTERVAL_S, ROLE_LIMIT_S, SLOW_ANSWER_LIMIT_S, THREAD_GRACE_S
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.hub_connector import HubAddress, connect_to_hub, widen
from rpcdist.transport.io_loop import Check
from rpcdist.transport.node import Node

MAX_WAITING: Final = 4096
"""At most a quarter of the process's descriptors: a peer that opens sockets for nothing must leave others to accept."""
MAX_PURPOSE_BYTES: Final = 512

Taker = Callable[[str, StreamSocket], None]
Refusal = Callable[[str, Identity], str]

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
        self._waiting: dict[str, list[StreamSocket]] = {}  # proven connections that nothing has announced, by purpose
        self._announced: dict[str, Taker] = {}
        self._refusals: dict[str, Refusal] = {}
        self._collecting: set[threading.Event] = set()  # each wakes a thread in `collect`
        self._arrived = threading.Lock()  # protects these four

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

    def connect(
        self, address: str, purpose: str, timeout_s: float, unix: bool | None = None, check: Check = None
    ) -> StreamSocket:
        """Opens a connection and proves both ends; blocks. Do not call it on an event loop's thread.

        Args:
            address: `SocketHub.address` of the peer.
            purpose: the purpose of the connection, which the peer announces.
            timeout_s: limit of the whole operation, in seconds.
            unix: True for the Unix socket, False for TCP; None tries the Unix socket first.
            check: called about every 50 ms; an exception that it raises ends the wait.

        Returns:
            A non-blocking socket; the caller closes it. The peer may not have announced the purpose yet.

        Raises:
            ConnectFailed: the peer did not answer in time.
            AuthenticationFailed: one side did not prove the token.
            ProtocolViolation: the peer refused the purpose, or is not a hub.
        """
        opening = self.open_connection(address, purpose, timeout_s, unix)
        return self._io.run(opening, timeout_s + THREAD_GRACE_S, check=check)

    def collect(
        self, prefix: str, names: Iterable[str], found: dict[str, StreamSocket], timeout_s: float, check: Check = None
    ) -> None:
        """Waits until a peer has connected for each purpose that consists of `prefix` and one of the names; blocks.

        Other connections whose purpose begins with `prefix` are closed meanwhile.

        Args:
            found: gets the non-blocking sockets by name. The caller closes them, also those that came before an error.
            check: called about every 50 ms; an exception that it raises ends the wait.

        Raises:
            DeadlineExceeded: a peer did not connect in time.
            TransportError: the hub was closed.
        """
        missing, lock, is_over = set(names), threading.Lock(), threading.Event()

        def take(purpose: str, connection: StreamSocket) -> None:
            name = purpose.removeprefix(prefix)
            with lock:
                is_expected = name in missing  # otherwise it is a stranger's, a second one, or late
                if is_expected:
                    missing.remove(name)
                    found[name] = connection
            if not is_expected:
                connection.close()
            elif not missing:
                is_over.set()

        with self._arrived:
            self._collecting.add(is_over)
        self.announce(prefix, take)
        try:
            deadline, slice_s = Deadline.after(timeout_s), longest_sleep_s() if check is None else CHECK_INTERVAL_S
            while missing:
                if self._closed:
                    raise _closed()
                if is_over.wait(min(slice_s, deadline.remaining_s())):
                    continue
                if check is not None:
                    check()
                if deadline.expired():
                    raise DeadlineExceeded(f"no peer connected for {prefix!r} and {listed(sorted(missing))} in time")
        finally:
            self.withdraw(prefix)
            with self._arrived:
                self._collecting.discard(is_over)
            with lock:
                missing.clear()

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
            for is_over in self._collecting:
                is_over.set()
        for connection in dropped:
            connection.close()

    def announce(self, prefix: str, taker: Taker, refusal: Refusal | None = None) -> None:
        """Gives connections whose purpose begins with `prefix` to a function from now on.

        Args:
            taker: called with purpose and socket, on the I/O loop; it must not block. It gets connections that already
                wait at once, on the caller's thread.
            refusal: called with purpose and peer before; returns the reason to refuse the connection, or nothing.
        """
        with self._arrived:
            self._announced[prefix] = taker
            if refusal is not None:
                self._refusals[prefix] = refusal
            purposes = [purpose for purpose in self._waiting if purpose.startswith(prefix)]
            found = [(purpose, connection) for purpose in purposes for connection in self._waiting.pop(purpose)]
        for purpose, connection in found:
            taker(purpose, connection)

    def withdraw(self, prefix: str) -> None:
        """Ends `announce`."""
        with self._arrived:
            self._announced.pop(prefix, None)
            self._refusals.pop(prefix, None)

    # ------------------------------------------------------------ a `SocketTaker`

    def refusal(self, purpose: str, peer: Identity) -> str:
        """See `SocketTaker`."""
        with self._arrived:
            if self._closed:
                return "the socket hub is closed"
            if (waiting := self._num_waiting()) >= _most_waiting() and self._taker_of(purpose) is None:
                return f"{waiting} connections already wait here that no thread expects"
            refuse = next((one for prefix, one in self._refusals.items() if purpose.startswith(prefix)), None)
        return "" if refuse is None else refuse(purpose, peer)

    def put(self, purpose: str, connection: StreamSocket) -> bool:
        """See `SocketTaker`."""
        widen(connection)
        with self._arrived:
            if self._closed:
                return False
            taker = self._taker_of(purpose)
            if taker is None:
                self._waiting.setdefault(purpose, []).append(connection)
        if taker is not None:
            taker(purpose, connection)
        else:
            self._io.loop.call_later(ROLE_LIMIT_S, self._expire, purpose, connection)
        return True

    # ------------------------------------------------------------ any thread

    def _taker_of(self, purpose: str) -> Taker | None:
        return next((taker for prefix, taker in self._announced.items() if purpose.startswith(prefix)), None)

    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _expire(self, purpose: str, connection: StreamSocket) -> None:
        with self._arrived:
            waiting = self._waiting.get(purpose, [])
            if connection not in waiting:
                return
            waiting.remove(connection)
            if not waiting:
                del self._waiting[purpose]
        logger.warning("a connection for %r was closed: no thread expected it within %s s", purpose, ROLE_LIMIT_S)
        connection.close()


def _most_waiting() -> int:
    num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_WAITING if num_descriptors == resource.RLIM_INFINITY else min(num_descriptors // 4, MAX_WAITING)


def _check_purpose(purpose: str) -> str:
    if not purpose or not purpose.isprintable() or len(purpose.encode()) > MAX_PURPOSE_BYTES:
        raise ConfigError(f"a purpose is printable text of up to {MAX_PURPOSE_BYTES} bytes, not {purpose[:80]!r}")
    return purpose


def _closed() -> TransportError:
    return TransportError("the socket hub is closed")
