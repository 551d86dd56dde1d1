"""The sockets of a process, which its groups share: the I/O loop, and the hub through which other ranks reach it."""

from __future__ import annotations

import os
import socket
import struct
import threading

from rpcdist.collectives._stores.store_base import Store
from rpcdist.errors import ConfigError
from rpcdist.transport import Node, acquire_node
from rpcdist.transport.addresses import pick_bind_host, split_address
from rpcdist.transport.sockets import SocketHub

__all__ = ["SharedSockets", "bind_host"]

HOST_VARIABLE = "RPCDIST_HOST"
INTERFACE_VARIABLES = ("RPCDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


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
    explicit = os.environ.get(HOST_VARIABLE) or next(
        (_interface_address(variable, name) for variable in INTERFACE_VARIABLES if (name := os.environ.get(variable))),
        None,
    )
    try:
        coordinator, _ = split_address(store.address)
    except ConfigError:
        coordinator = "127.0.0.1"  # a file, or memory: the processes share a machine
    return pick_bind_host(coordinator, explicit)


def _interface_address(variable: str, name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as exc:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ConfigError(f"{variable}={name!r}: no IPv4 address ({exc.strerror}); interfaces are {known}") from exc
