"""`LocalProcess`: the sockets and other state that the groups of one process share."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcdist._launch.placement import launcher_variable
from rpcdist.at_exit import register_at_exit, unregister_at_exit
from rpcdist.collectives._group.flight_records import FlightRecorder
from rpcdist.collectives._stores.store_base import Store
from rpcdist.errors import ConfigError, on_error
from rpcdist.time_limits import CLOSE_STEP_LIMIT_S

if TYPE_CHECKING:
    from rpcdist.transport import Node
    from rpcdist.transport.credentials import Credentials
    from rpcdist.transport.sockets import SocketHub


_LOOPBACK: Final = "127.0.0.1"


class LocalProcess:
    """The sockets through which other ranks reach this process, its flight recorder, and its open backends.

    Attributes:
        node, hub: the sockets, between `acquire_sockets` and `release_sockets`; the hub connects to those of other
            ranks, and accepts their connections.
        counts: the counters of `rpcdist.metrics`, once they are enabled.
    """

    node: Node
    hub: SocketHub

    def __init__(self) -> None:
        self.recorder = FlightRecorder()
        self.counts: Any = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._num_shares = 0  # of the sockets
        self._open_backends: weakref.WeakSet[Any] = weakref.WeakSet()
        self._at_exit = partial(_close_all, weakref.ref(self))

    def acquire_sockets(self, host: str) -> None:
        """Takes a share of this process's sockets, opened on `host` if necessary; release each share once."""
        with self._lock:
            if self._num_shares == 0:
                self.node, self.hub = _open_sockets(host)
            self._num_shares += 1

    def release_sockets(self) -> None:
        """Releases a share; the last one closes the sockets. Blocks for a limited time."""
        with self._lock:
            node, hub = self.node, self.hub
            self._num_shares -= 1
            if self._num_shares > 0:
                return
        _close_sockets(node, hub)

    def credentials(self) -> Credentials:
        """Returns the credentials with which this process signs the records that it writes to a store."""
        from rpcdist.transport import acquire_node  # loads gRPC

        node = acquire_node()
        try:
            return node.credentials
        finally:
            node.release()

    def close_at_exit(self, backend: Any) -> None:
        """Closes a backend that is still open at exit, so that its peers see a rank that left, not one that died.

        Call it after the backend has begun to use the transport: exit handlers run in reverse order, and closing the
        backend needs the transport.
        """
        with self._lock:
            unregister_at_exit(self._at_exit)
            register_at_exit(self._at_exit)
            self._open_backends.add(backend)


def _open_sockets(host: str) -> tuple[Node, SocketHub]:
    from rpcdist.transport import acquire_node  # loads gRPC
    from rpcdist.transport.sockets import SocketHub

    node = acquire_node()
    hub = SocketHub(node)
    with on_error(partial(_close_sockets, node, hub)):
        hub.open(host)
    return node, hub


def _close_sockets(node: Node, hub: SocketHub) -> None:
    hub.close()
    node.release()


def _close_all(process: weakref.ref[LocalProcess]) -> None:
    living = process()
    if living is not None and os.getpid() == living._pid:  # after a fork the backends belong to the parent
        for backend in list(living._open_backends):
            backend.close(CLOSE_STEP_LIMIT_S)


def bind_host(store: Store) -> str:
    """Returns the address on which this process listens for other ranks: all interfaces only if the user asks for it.

    In this order: `RPCDIST_HOST` (an address or an interface); the interface in `GLOO_SOCKET_IFNAME`; the source
    address of packets to the store, or to MASTER_ADDR if the store has no host; loopback if that is not set.

    Raises:
        ConfigError: a variable is invalid, or no interface has a route to the store.
    """
    from rpcdist.transport.addresses import host_from_environment, pick_bind_host, split_address

    try:
        coordinator, _ = split_address(store.address)
    except ConfigError:
        coordinator = launcher_variable("MASTER_ADDR") or _LOOPBACK  # a file, or memory
    chosen = host_from_environment("GLOO_SOCKET_IFNAME")
    if not chosen and coordinator == _LOOPBACK:
        return coordinator  # all that `pick_bind_host` could find
    return pick_bind_host(coordinator, chosen)
