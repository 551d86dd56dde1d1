"""Sleeping until a socket is ready or another thread calls: `poll` where the system has it, else `select`."""

from __future__ import annotations

import select
import socket
import sys
from typing import Final

__all__ = ["Alarm", "wait_ready"]

_HAS_POLL: Final = hasattr(select, "poll")


class Alarm:
    """Wakes a thread that sleeps in `wait_ready`."""

    def __init__(self) -> None:
        self._mine, self._others = socket.socketpair()
        self._mine.setblocking(False)
        self._others.setblocking(False)

    @property
    def sock(self) -> socket.socket:
        """Readable once `ring` was called."""
        return self._mine

    def ring(self) -> None:
        """Any thread may call it; never blocks."""
        try:
            self._others.send(b"!")
        except BlockingIOError:  # it rings already
            pass

    def silence(self) -> None:
        """Forgets all rings until now."""
        try:
            self._mine.recv(4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._mine.close()
        self._others.close()


def wait_ready(readers: list[socket.socket], writers: list[socket.socket], timeout_s: float | None) -> set[int]:
    """Sleeps until one of the sockets is readable or writable, or failed, or the time is over.

    Returns:
        The descriptors that are ready.
    """
    if not _HAS_POLL:
        ready_to_read, ready_to_write, failed = select.select(readers, writers, [*readers, *writers], timeout_s)
        return {sock.fileno() for ready in (ready_to_read, ready_to_write, failed) for sock in ready}
    poller = select.poll()
    for sock in readers:
        poller.register(sock, select.POLLIN)
    for sock in writers:
        poller.register(sock, select.POLLIN | select.POLLOUT if sock in readers else select.POLLOUT)
    timeout_ms = None if timeout_s is None else min(timeout_s * 1000, sys.maxsize >> 33)
    return {descriptor for descriptor, _ in poller.poll(timeout_ms)}
