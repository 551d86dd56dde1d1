"""How threads wait for other ranks: sleeps on descriptors, wakers, and spins before a sleep."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from typing import Final

from rpcdist.time_limits import SPIN_LIMIT_S
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE
from rpcdist.transport.hub_connector import HubAddress

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
            self._write_end.send(b"!", NO_SIGPIPE)
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


_LEAST_PART: Final = 1 / 32  # of the longest time


class SpinPolicy:
    """Learns from the last waits whether spinning is worth it. One thread at a time uses it.

    A sleep costs a wake-up, which takes long on a core that has gone idle meanwhile. Spinning keeps a core from others,
    also with a `sched_yield` after each attempt, so there is none of it where a host has more ranks than cores, and
    little where other programs keep the cores busy: there the waits are long.

    Attributes:
        spin_s: how long to try before the next sleep, in seconds.
    """

    __slots__ = ("_longest_s", "spin_s")

    def __init__(self, num_ranks: int) -> None:
        self._longest_s = self.spin_s = SPIN_LIMIT_S if num_ranks <= num_cores() else 0.0

    def came(self) -> None:
        """Reports that the wait ended while spinning."""
        if self.spin_s < self._longest_s:
            self.spin_s = min(2 * self.spin_s, self._longest_s)

    def slept(self, waited_s: float) -> None:
        """Reports that spinning was not enough, and how much longer the wait was."""
        if self._longest_s:
            waited_long = waited_s > self._longest_s
            self.spin_s = (
                max(self.spin_s / 2, self._longest_s * _LEAST_PART)
                if waited_long
                else min(2 * self.spin_s, self._longest_s)
            )


def ranks_here(rank: int, addresses: Sequence[str]) -> int:
    """How many ranks are on the host of a rank, by the addresses of all ranks' hubs; 0 if there are no addresses."""
    hosts = [HubAddress.parse(address).host for address in addresses]
    return hosts.count(hosts[rank]) if hosts else 0


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
