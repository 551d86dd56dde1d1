"""Sleeping until a socket is ready or another thread wakes the sleeper."""

from __future__ import annotations

import select
import socket
from typing import Final

_MAX_POLLERS: Final = 64


class Waker:
    """Wakes a thread that sleeps in `poll`: poll `fileno()` for reading."""

    def __init__(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)

    def fileno(self) -> int:
        """The descriptor that is readable once `wake` was called."""
        return self._read_end.fileno()

    def wake(self) -> None:
        """Wakes the sleeper; any thread may call it, and it never blocks."""
        try:
            self._write_end.send(b"!")
        except OSError:  # full: readable already; closed: nobody polls any more
            pass

    def drain(self) -> None:
        """Makes the descriptor unreadable until the next `wake`."""
        try:
            self._read_end.recv(4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._read_end.close()
        self._write_end.close()


class Pollers:
    """Keeps `select.poll` objects, since the same few sets of descriptors are waited for again and again.

    Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], select.poll] = {}

    def get(self, masks: dict[int, int], wakeup_fd: int) -> select.poll:
        """Returns a poller for these descriptors and events, and for `wakeup_fd` to be readable unless that is -1."""
        key = (wakeup_fd, *masks, *masks.values())
        poller = self._kept.get(key)
        if poller is None:
            poller = select.poll()
            for descriptor, mask in masks.items():
                poller.register(descriptor, mask)
            if wakeup_fd >= 0:
                poller.register(wakeup_fd, select.POLLIN)
            if len(self._kept) >= _MAX_POLLERS:
                self._kept.clear()
            self._kept[key] = poller
        return poller
