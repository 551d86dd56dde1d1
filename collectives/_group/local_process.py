"""What the groups of one process share: its node, and the socket hub through which other ranks reach it."""

from __future__ import annotations

import os
import socket
import struct
import threading

from rpcdist.collectives._stores.base import Store
from rpcdist.errors import ConfigError
from rpcdist.transport import Node, acquire_node
from rpcdist.transport.addresses import pick_bind_host, split_address, warn_if_plaintext
from rpcdist.transport.sockets import SocketHub

__all__ = ["LocalProcess", "acquire_local_process", "bind_host"]

HOST_VARIABLE = "RPCDIST_HOST"
INTERFACE_VARIABLES = ("RPCDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


class LocalProcess:
    """One share of the process's sockets; `release` each share once."""

    def __init__(self, node: Node, hub: SocketHub) -> None:
        self.node = node
        self.hub = hub
        self.num_users = 0

    def release(self) -> None:
        """Gives up a share; the last one closes the hub. Blocks, bounded."""
        global _current
        with _lock:
            self.num_users -= 1
            if self.num_users > 0:
                return
            if _current is self:
                _current = None
        self.hub.close()
        self.node.release()


_current: LocalProcess | None = None
_lock = threading.Lock()


def acquire_local_process(host: str) -> LocalProcess:
    """A share of this process's sockets, opened on `host` if none are open yet.

    Raises:
        TransportError: the address cannot be bound.
    """
    global _current
    with _lock:
        if _current is None:
            node = acquire_node()
            hub = SocketHub(node.io, node.credentials)
            try:
                hub.open(host)
            except BaseException:
                hub.close()
                node.release()
                raise
            _current = LocalProcess(node, hub)
        _current.num_users += 1
        return _current


def bind_host(store: Store) -> str:
    """Where this process listens for other ranks: never on all interfaces unless told so.

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
    host = pick_bind_host(coordinator, explicit)
    warn_if_plaintext(host)
    return host


def _interface_address(variable: str, name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as exc:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ConfigError(f"{variable}={name!r}: no IPv4 address ({exc.strerror}); interfaces are {known}") from exc
