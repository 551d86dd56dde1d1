"""The store that rank 0 serves and all other ranks call: the default of a job."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from typing import Final

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores.store_base import DEFAULT_TIMEOUT, Store, Timeout, close_dropped, close_later, seconds
from rpcdist.collectives._stores.store_operations import Missing, NumKeys, QueuePop, StoreOperation
from rpcdist.collectives._stores.store_service import CLOSED, ServedTable, request_for, result_of, share_table
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    DistNetworkError,
    DistStoreError,
    RpcdistError,
    StoreTimeout,
    TransportError,
    on_error,
    refuse_pickling,
)
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import (
    FIRST_PAUSE_S,
    IDLE_LIMIT_S,
    INIT_NOTICE_S,
    LONGEST_PAUSE_S,
    MIN_ATTEMPT_S,
    SIDE_ATTEMPT_LIMIT_S,
    SLOW_WORK_LIMIT_S,
    STORE_GRACE_S,
)
from rpcdist.transport import LARGEST_UNCUT_BYTES, Link, Node, acquire_node
from rpcdist.transport.addresses import split_address
from rpcdist.transport.fork import check_not_forked, in_forked_child
from rpcdist.transport.keys import REFUSED
from rpcdist.waiters import noticed

__all__ = ["TCPStore"]

logger = logging.getLogger(__name__)

CHECK_RANK_0: Final = "Is rank 0 running there, and do all processes have the same MASTER_ADDR and MASTER_PORT?"
COMPLETE: Final = b"complete"
JOIN_KEY: Final = "init/"  # counts those who connected, as in torch


class _RemoteTable:
    """A table in another process, behind an authenticated link that is opened again after it broke or was idle.

    The clones of a store share it. It has the methods of `ServedTable`.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._node: Node = acquire_node()
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._num_calls = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._num_users = 1
        self._lock = threading.Lock()
        with on_error(self.close):
            finding = noticed(self._find(), INIT_NOTICE_S, self._log_waiting)
            self._node.run(finding, timeout_s + STORE_GRACE_S, may_give_up=True)

    async def _find(self) -> None:
        """Connects, and checks that the process serves a store, as it may listen before it does."""
        deadline = Deadline.after(self._timeout_s)
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
        earlier: TransportError | TimeoutError | None = None
        while True:
            began = time.monotonic()
            try:
                link = await self._connected(max(deadline.remaining_s(), MIN_ATTEMPT_S))
                async with asyncio.timeout(max(deadline.remaining_s(), MIN_ATTEMPT_S)):
                    await _ask(link, NumKeys(), 0.0)
                self._close_link_when_idle()
                return
            except AuthenticationFailed:
                raise
            except (TransportError, TimeoutError) as exc:  # no process listens yet, or the process is busy
                timed_out = TimeoutError in (type(exc), type(exc.__cause__))
                # An attempt that the deadline leaves no time hides why the one before it failed.
                if earlier is None or not timed_out or time.monotonic() - began >= LONGEST_PAUSE_S:
                    earlier = exc
                if deadline.expired():
                    raise ConnectFailed(self.address, await self._why_not(earlier), self._timeout_s) from earlier
            await asyncio.sleep(next(pauses))

    async def _log_waiting(self) -> None:
        logger.warning(
            "no process has answered for %g s at %s, where rank 0 should serve the store; this process tries for %g "
            "s. %s",
            INIT_NOTICE_S, self.address, self._timeout_s, CHECK_RANK_0,
        )  # fmt: skip

    async def _why_not(self, exc: TransportError | TimeoutError) -> str:
        if (shortage := own_shortage(exc)) is not None:
            return shortage
        if isinstance(exc, TimeoutError):
            return "a process accepts connections there, but does not answer. Is rank 0 stopped or busy?"
        if not isinstance(exc, ConnectFailed):
            return f"a process answers there, but it serves no store ({exc})"
        host = split_address(self.address)[0]
        try:
            async with asyncio.timeout(SIDE_ATTEMPT_LIMIT_S):
                await asyncio.get_running_loop().getaddrinfo(host, None)
        except socket.gaierror as why:
            return f"this host cannot resolve the name {host!r} ({why.strerror}). Check MASTER_ADDR or the init_method"
        except TimeoutError:
            return f"no name server resolved {host!r} within {SIDE_ATTEMPT_LIMIT_S:g} s. Check MASTER_ADDR"
        if "refused" in exc.reason.lower():
            return f"no process listens there. {CHECK_RANK_0}"
        return f"{exc.reason.rstrip('.?')}. {CHECK_RANK_0}"

    async def _connected(self, timeout_s: float) -> Link:
        async with self._connecting:  # used on the I/O loop only
            if self._link is None or self._link.session.closed_reason is not None:
                self._link = await self._node.connect(self.address, role="store", timeout_s=timeout_s)
            return self._link

    def run(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        wait_s = deadline.remaining_s()

        async def ask() -> store_pb2.StoreReply:
            if self._idle_timer is not None:
                self._idle_timer.cancel()
                self._idle_timer = None
            self._num_calls += 1
            try:
                return await _ask(await self._connected(self._timeout_s), operation, wait_s)
            finally:
                self._num_calls -= 1
                self._close_link_when_idle()

        limit_s = wait_s + self._timeout_s + 2 * STORE_GRACE_S + SLOW_WORK_LIMIT_S
        return result_of(self._node.run(ask(), limit_s, may_give_up=True))

    def _close_link_when_idle(self) -> None:
        """Ends an unused link, because each link costs rank 0 a descriptor. On the I/O loop."""
        if not self._num_calls and self._num_users > 0:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_LIMIT_S, self._close_link)

    async def _end(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._link is not None:
            await self._link.close()

    def _close_link(self) -> None:
        self._idle_timer = None
        link, self._link = self._link, None
        if link is not None:
            self._node.io.spawn(link.close(), "rpcdist close an idle link to the store")

    def share(self) -> _RemoteTable:
        with self._lock:
            self._num_users += 1
        return self

    def close(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users > 0 or in_forked_child():
                return
        with suppress(RpcdistError, RuntimeError):  # the loop has ended, and the link with it
            self._node.io.finish(self._end(), STORE_GRACE_S)
        self._node.release()


class TCPStore(Store):
    """A store that one process serves over gRPC on its port; other processes are clients. All prove the job token.

    Args:
        host_name: the server's address, which the master binds.
        port: the server's port; the master may pass 0 to have one chosen, see `port`.
        world_size: how many processes will use the store, the master included; None if unknown.
        is_master: whether this process serves the store. The master uses the table without the network.
        timeout: the limit of connecting, of waiting for the workers, and of waits without a timeout of their own.
        wait_for_workers: whether the master waits until `world_size` processes have connected.
        multi_tenant: whether to share a store that this process already serves there, instead of raising.
        master_listen_fd: not supported.
        use_libuv: accepted for compatibility with torch and ignored.

    Raises:
        ConnectFailed: no process answered within `timeout`, although the store tried repeatedly.
        AuthenticationFailed: the tokens differ.
        DistNetworkError: the master's port is in use.
        StoreTimeout: not all workers connected.
    """

    libuvBackend: Final = False
    __reduce_ex__ = refuse_pickling

    def __init__(  # torch's signature
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        super().__init__(timeout)
        close_dropped()
        self.host = host_name
        self._world_size = world_size
        if master_listen_fd is not None:
            text = "master_listen_fd is not supported, as gRPC opens its own socket. Pass port=0 to have a port chosen."
            raise ConfigError(text)
        if not 0 <= port < 2**16:
            raise ConfigError(f"port must have value from 0 to 65535 but was {port}.")
        if world_size == 0:
            raise ConfigError("TCPStore world size cannot be 0; pass None if it is not known")
        if world_size is not None and world_size < 1:
            world_size = self._world_size = None  # torch's -1: unknown
        self._attach(_open(host_name, port, is_master, multi_tenant, seconds(timeout)))
        if wait_for_workers and world_size is not None:
            with on_error(self.close):
                self._join(world_size, is_master)

    def _attach(self, access: ServedTable | _RemoteTable) -> None:
        self._access = access
        self._closer = weakref.finalize(self, close_later, os.getpid(), access.close)
        self._closer.atexit = False  # at exit the transport stops by itself

    def _join(self, world_size: int, is_master: bool) -> None:
        came = self.add(JOIN_KEY, 1)
        if not is_master:
            # Every process pushes, whatever world size it expects; a later check names a process that expects another.
            self.queue_push(JOIN_KEY, COMPLETE if came == world_size else b"came")
            return
        deadline = Deadline.after(self._timeout_s)
        popped: object = b""
        while came < world_size and popped != COMPLETE:
            popped = self.execute(QueuePop(JOIN_KEY), deadline)
            came = self.add(JOIN_KEY, 0)
            if isinstance(popped, Missing):
                raise _timed_out_join(self._timeout_s, came, world_size, self.address)

    @property
    def port(self) -> int:
        """The port at which the store is served."""
        return int(self.address.rpartition(":")[2])

    @property
    def address(self) -> str:
        return self._access.address

    def clone(self) -> TCPStore:
        """Returns another store object on the same connection."""
        twin = TCPStore.__new__(TCPStore)
        Store.__init__(twin, self._timeout_s)
        twin.host, twin._world_size = self.host, self._world_size
        twin._attach(self._access.share())
        return twin

    @property
    def is_served_here(self) -> bool:
        return isinstance(self._access, ServedTable)

    def note_failure(self, reason: str) -> None:
        if isinstance(self._access, ServedTable):
            self._access.table.failure = reason

    def close(self) -> None:
        """Ends the connection, or the service if this is its last user in this process. Idempotent, bounded."""
        if self._closer.detach() is not None:
            self._access.close()

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        check_not_forked()
        if not self._closer.alive:
            raise DistStoreError(f"the store at {self.address} was closed by this process")
        try:
            return self._access.run(operation, deadline)
        except (AuthenticationFailed, DistStoreError):
            raise
        except ConnectFailed as exc:
            if exc.waited_s is not None:  # the connection was lost before the call, and could not be opened again
                raise
            raise _lost(self.address, operation, exc) from exc
        except DeadlineExceeded as exc:
            if operation.read_only:  # it has no effect, so the caller may repeat it
                text = f"the store at {self.address} has not answered {type(operation).__name__} in time"
                raise StoreTimeout(f"{text} ({exc}); is the process that serves it (rank 0) stopped or busy?") from exc
            raise _lost(self.address, operation, exc) from exc
        except TransportError as exc:
            raise _lost(self.address, operation, exc) from exc


async def _ask(link: Link, operation: StoreOperation[object], wait_s: float) -> store_pb2.StoreReply:
    request = request_for(operation, wait_s)
    if request.ByteSize() <= LARGEST_UNCUT_BYTES:
        reply = await link.unary("Store", "Execute", request, store_pb2.StoreReply, wait_s + STORE_GRACE_S)
        if not reply.too_large:
            return reply
    limit_s = wait_s + SLOW_WORK_LIMIT_S
    return await link.in_pieces("Store", "ExecuteLarge", request, store_pb2.StoreReply, store_pb2.Piece, limit_s)


def _open(host: str, port: int, is_master: bool, share: bool, timeout_s: float) -> ServedTable | _RemoteTable:
    if is_master:
        return share_table(host, port, share, max(timeout_s, STORE_GRACE_S))
    if port == 0:
        raise ConfigError(f"the port of the store at {host} is unknown; pass the master's (its `port` attribute).")
    return _RemoteTable(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", timeout_s)


def _timed_out_join(timeout_s: float, came: int, world_size: int, address: str) -> StoreTimeout:
    return StoreTimeout(
        f"Timed out after {timeout_s:g} seconds waiting for clients. {came}/{world_size} clients joined the store at "
        f"{address}. Check the missing processes, and that all have the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."
    )


def _lost(address: str, operation: StoreOperation[object], reason: Exception) -> DistNetworkError:
    was_refused = REFUSED in str(reason)
    what = "did not answer" if was_refused else "was lost during"
    text = f"the store at {address} {what} {type(operation).__name__}: {str(reason).removesuffix('.')}. "
    if CLOSED not in text and not was_refused:
        text += "The process that serves it (rank 0) has ended, or the network is broken. "
    return DistNetworkError(f"{text}It is unknown whether the operation took place.")
