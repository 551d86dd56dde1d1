"""Keeps a forked child from harming its parent's connections and from hiding the parent's death.

`DataLoader(num_workers=2)` forks. The child inherits every socket, so if the parent is killed, its peers do not see the
connection end while the child lives. Therefore, in the child of a process that communicates:

 1. /dev/null replaces the sockets of our server, those to our peers, and those that were noted one by one, under the
    same descriptor numbers: gRPC's state in the child still has these numbers, and must not touch a file that the child
    opens later;
 2. `check_not_forked` raises from then on, so no call waits for threads that exist only in the parent;
 3. registered objects are notified, and kept alive: their finalizers would use those threads.

A process that does not communicate (before `init_rpc`, after `shutdown`) forks as if this module did not exist, except
that it first collects the garbage of ended nodes: objects of gRPC refer to each other in cycles, and the finalizer of
the last one would wait forever in the child for a thread that exists only in the parent. The child takes no lock, since
another thread of the parent may have held it. Sets that the child reads are replaced as a whole and never changed in
place.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import weakref
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from rpcdist.errors import ForkedProcess
from rpcdist.transport.addresses import literal

_DESCRIPTORS = "/proc/self/fd"

Peer = tuple[IPv4Address | IPv6Address | None, int]  # host, None for any; port


class ForkParticipant(Protocol):
    """An object that is notified in a forked child."""

    def after_fork_in_child(self) -> None:
        """Runs in the child, on its only thread. Drop finalizers and queues; take no lock, close no connection."""


class ForkGuard:
    """The ports, sockets and objects that matter when the process forks. Any thread may add some."""

    def __init__(self) -> None:
        self.in_child = False
        self._num_running = 0  # nodes
        self._has_garbage = False
        self._server_ports: set[int] = set()
        self._peers: set[Peer] = set()
        self._sockets = weakref.WeakSet[socket.socket]()
        self._participants = weakref.WeakKeyDictionary[ForkParticipant, None]()  # in the order of registration
        self._kept: list[ForkParticipant] = []
        self._lock = threading.Lock()  # for writers in the parent

    def mark_running(self) -> None:
        """Records that a node started: from now on a forked child must not use rpcdist."""
        with self._lock:
            self._num_running += 1

    def mark_stopped(self) -> None:
        """Records that a node ended. After the last one, forgets all ports, and later children may use rpcdist."""
        with self._lock:
            self._num_running -= 1
            if self._num_running == 0:
                self._server_ports = set()
                self._peers = set()
                self._has_garbage = True

    def note_server_port(self, port: int) -> None:
        """Remembers a port that this process listens on, which identifies the connections accepted there."""
        with self._lock:
            self._server_ports.add(port)

    def note_peer_port(self, port: int, host: str | None = None) -> None:
        """Remembers a port to which this process connects. If the host is a name or None, it matches every host."""
        with self._lock:
            self._peers.add((None if host is None else literal(host), port))

    def note_socket(self, noted: socket.socket) -> None:
        """Remembers a socket of any family while it is open. Call it right after the socket is made."""
        with self._lock:
            self._sockets.add(noted)

    def register(self, participant: ForkParticipant) -> None:
        """Calls `participant.after_fork_in_child()` in children, as long as something else keeps it alive."""
        with self._lock:
            self._participants[participant] = None

    def before_fork(self) -> None:
        """Runs in the parent. Collects what ended nodes left. (While a node runs, the child keeps gRPC's objects.)"""
        if self._has_garbage and not self._num_running:
            self._has_garbage = False
            gc.collect()

    def after_fork_in_child(self) -> None:
        """Runs first in the child. Calls every participant, even if one fails."""
        if not self._num_running:
            return
        self.in_child = True
        self._lock = threading.Lock()
        close_inherited_sockets(self._server_ports, self._peers)
        _replace([noted.fileno() for noted in self._sockets if noted.fileno() >= 0])
        failures: list[Exception] = []
        self._kept = list(self._participants)
        for participant in self._kept:
            try:
                participant.after_fork_in_child()
            except Exception as exc:
                failures.append(exc)
        if failures:  # Python prints the exception of an at-fork hook, and continues
            raise ExceptionGroup("rpcdist could not prepare this forked process", failures)

    def check_not_forked(self) -> None:
        """Raises `ForkedProcess` in a child that was forked while its parent communicated."""
        if self.in_child:
            raise ForkedProcess()


def close_inherited_sockets(server_ports: Collection[int], peers: Collection[Peer] = ()) -> int:
    """Replaces every socket of our connections by /dev/null. Only for forked children.

    Args:
        server_ports: sockets with one of these local ports are ours (listening or accepted).
        peers: sockets connected to one of these (host, port) are ours; host None matches any host.

    Returns:
        The number of replaced sockets; 0 if /proc is missing.

    A socket that is still connecting has no peer yet, and stays unchanged.
    """
    try:
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]
    except FileNotFoundError:
        return 0
    ours = [descriptor for descriptor in descriptors if _is_ours(descriptor, server_ports, peers)]
    _replace(ours)
    return len(ours)


def _replace(descriptors: Collection[int]) -> None:
    """Puts /dev/null under these numbers."""
    if descriptors:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in descriptors:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def _is_ours(descriptor: int, server_ports: Collection[int], peers: Collection[Peer]) -> bool:
    try:
        if not os.readlink(f"{_DESCRIPTORS}/{descriptor}").startswith("socket:"):
            return False
        inherited = socket.socket(fileno=descriptor)
    except OSError:  # the listing's own descriptor is closed by now
        return False
    try:
        if inherited.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if inherited.getsockname()[1] in server_ports:
            return True
        host, port = inherited.getpeername()[:2]
        return (None, port) in peers or (literal(host), port) in peers
    except OSError:  # not connected
        return False
    finally:
        inherited.detach()


_guard = ForkGuard()

mark_running = _guard.mark_running
mark_stopped = _guard.mark_stopped
note_server_port = _guard.note_server_port
note_peer_port = _guard.note_peer_port
note_socket = _guard.note_socket
register = _guard.register
check_not_forked = _guard.check_not_forked


def in_forked_child() -> bool:
    """True in a child that was forked while its parent communicated."""
    return _guard.in_child


os.register_at_fork(before=_guard.before_fork, after_in_child=_guard.after_fork_in_child)
