"""The connections of a group: one for each pair of ranks that has something to say to each other, opened when needed.

The lower rank connects. The higher one takes what arrives, on the I/O loop, and wakes the thread that waits for it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

from rpcdist.collectives._plane import Control, PlanePeerLost, PlaneTimeout
from rpcdist.errors import TransportError
from rpcdist.transport.sockets import SocketHub

__all__ = ["Links"]


class Links:
    """The sockets of one rank of a group. `get` is for one thread at a time.

    Args:
        rank: of this process in the group.
        hub: opens and accepts connections.
        name: of the group; random enough that no other group has it.
        addresses: of the hubs, by rank.
        unix: as in `SocketHub.connect`.
    """

    def __init__(self, rank: int, hub: SocketHub, name: str, addresses: Sequence[str], unix: bool | None) -> None:
        self._rank = rank
        self._hub = hub
        self._prefix = f"{name}/link/"
        self._addresses = tuple(addresses)
        self._unix = unix
        self._open: dict[int, socket.socket] = {}
        self._arrived: dict[int, socket.socket] = {}
        self._closed = False
        self._lock = threading.Lock()
        self.wakeup_fd, self._wakeup_write_fd = os.pipe()  # readable when a connection has arrived
        os.set_blocking(self.wakeup_fd, False)
        os.set_blocking(self._wakeup_write_fd, False)
        hub.announce(self._prefix, self._arrive)

    def __repr__(self) -> str:
        return f"<Links of {self._prefix}, rank {self._rank}: to {sorted(self._open)}>"

    def get(self, peer: int, control: Control) -> socket.socket | None:
        """The connection with a rank; None if the peer, who has to open it, has not done so yet.

        Raises:
            PlanePeerLost: the peer cannot be reached.
            PlaneTimeout: not in time.
        """
        link = self._open.get(peer)
        if link is None:
            link = self._connect(peer, control) if self._rank < peer else self._take_arrived(peer)
            if link is not None:
                self._open[peer] = link
        return link

    def _connect(self, peer: int, control: Control) -> socket.socket:
        purpose = f"{self._prefix}{self._rank}"
        try:
            return self._hub.connect(
                self._addresses[peer], purpose, control.deadline.remaining_s(), self._unix, control.check
            )
        except TransportError as exc:
            if control.deadline.expired():
                raise PlaneTimeout(frozenset([peer])) from exc
            raise PlanePeerLost(peer, str(exc)) from exc

    def _take_arrived(self, peer: int) -> socket.socket | None:
        with self._lock:
            return self._arrived.pop(peer, None)

    def drain_wakeups(self) -> None:
        """Makes `wakeup_fd` unreadable until the next connection arrives."""
        try:
            os.read(self.wakeup_fd, 4096)
        except BlockingIOError:
            pass  # somebody was faster

    def _arrive(self, purpose: str, connection: socket.socket) -> None:
        """On the I/O loop: takes a connection that a lower rank opened."""
        text = purpose.removeprefix(self._prefix)
        peer = int(text) if text.isascii() and text.isdigit() else self._rank
        with self._lock:
            wanted = peer < self._rank and peer not in self._arrived and peer not in self._open and not self._closed
            if wanted:
                self._arrived[peer] = connection
                os.write(self._wakeup_write_fd, b"x")  # under the lock: `close` gives the descriptor back
        if not wanted:
            connection.close()

    def close(self) -> None:
        """Closes everything; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = [*self._open.values(), *self._arrived.values()]
            self._arrived.clear()
            os.close(self.wakeup_fd)
            os.close(self._wakeup_write_fd)
        self._hub.withdraw(self._prefix)
        for link in links:
            link.close()
