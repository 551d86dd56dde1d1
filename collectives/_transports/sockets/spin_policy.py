"""How long to spin for a message before sleeping until the kernel reports one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from rpcdist.time_limits import CROWDED_SPIN_S, MESSAGE_SPIN_S
from rpcdist.transport.sockets import HubAddress

MAX_SPINS: Final = 64
"""About 80 us: the cost of a sleep and the wake-up after it on a processor that was otherwise idle."""
MIN_SPINS: Final = 2


class SpinPolicy:
    """Learns from the last waits whether spinning is worth it.

    Spinning keeps a core busy, so there is none of it where a host has more ranks than cores.

    Attributes:
        spins: how often to try the socket, with `os.sched_yield` in between.
    """

    __slots__ = ("_crowded", "spins")

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self._crowded = _is_crowded(rank, addresses)
        self.spins = 0 if self._crowded else MAX_SPINS

    def message_came(self) -> None:
        """Reports that a message came while spinning."""
        if not self._crowded and self.spins < MAX_SPINS:
            self.spins = min(2 * self.spins, MAX_SPINS)

    def slept(self, waited_s: float) -> None:
        """Reports that spinning was not enough, and how much longer the message took."""
        if self._crowded:
            return
        if waited_s < 100e-6:
            self.spins = min(2 * self.spins, MAX_SPINS)
        else:
            self.spins = max(self.spins // 2, MIN_SPINS)


def message_spin_s(rank: int, addresses: Sequence[str]) -> float:
    """How long a thread that waits for a message tries its socket before it sleeps, in seconds; for a `SpinPolicy`'s
    arguments."""
    return CROWDED_SPIN_S if _is_crowded(rank, addresses) else MESSAGE_SPIN_S


def _is_crowded(rank: int, addresses: Sequence[str]) -> bool:
    """Whether the rank's host has more ranks of the group than cores."""
    hosts = [HubAddress.parse(address).host for address in addresses]
    return bool(hosts) and hosts.count(hosts[rank]) > _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
