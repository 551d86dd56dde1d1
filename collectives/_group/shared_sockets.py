"""The sockets of a process, which its groups share: the I/O loop, and the hub through which other ranks reach it."""

from __future__ import annotations

import threading

from rpcdist.collectives._stores.store_base import Store
from rpcdist.errors import ConfigError
from rpcdist.transport import Node, acquire_node
from rpcdist.transport.addresses import host_from_environment, pick_bind_host, split_address
from rpcdist.transport.sockets import SocketHub


class SharedSockets:
    """A node and a socket hub, open as long as somebody has a share; whoever makes it has the first one.

    Args:
        host: the address that the hub listens on.

    Attributes:
        node: the I/O loop.
        hub: connects to the hubs of other ranks, and takes their connections.

    Raises (constructor):
        TransportError: the address cannot be bound.
    """

    def __init__(self, host: str) -> None:
        self.node: Node = acquire_node()
        self.hub = SocketHub(self.node)
        self._num_shares = 1
        self._lock = threading.Lock()
        try:
            self.hub.open(host)
        except BaseException:
            self._close()
            raise

    def acquire(self) -> bool:
        """Takes a share; returns False when the last one was released already."""
        with self._lock:
            if self._num_shares == 0:
                return False
            self._num_shares += 1
            return True

    def release(self) -> None:
        """Gives up a share; the last one closes the hub. Blocks, bounded."""
        with self._lock:
            self._num_shares -= 1
            if self._num_shares > 0:
                return
        self._close()

    def _close(self) -> None:
        self.hub.close()
        self.node.release()


def bind_host(store: Store) -> str:
    """The address on which this process listens for other ranks: never all interfaces unless told so.

    In this order: `RPCDIST_HOST` (an address); the address of the interface that `RPCDIST_SOCKET_IFNAME` or
    `GLOO_SOCKET_IFNAME` names; the address from which packets to the store leave; loopback where the store has no host.

    Raises:
        ConfigError: a variable is wrong, or no interface leads to the store.
    """
    try:
        coordinator, _ = split_address(store.address)
    except ConfigError:
        coordinator = "127.0.0.1"  # a file, or memory: the processes share a machine
    return pick_bind_host(coordinator, host_from_environment("GLOO_SOCKET_IFNAME"))
