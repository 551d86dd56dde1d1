"""How long a thread that waits for another rank tries again before it sleeps: for flags, plans and messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from rpcdist.time_limits import SPIN_LIMIT_S
from rpcdist.transport.sockets import HubAddress

_LEAST_PART: Final = 1 / 32  # of the longest time


class SpinPolicy:
    """Learns from the last waits whether spinning is worth it. One thread at a time uses it.

    A sleep costs a wake-up, which takes long on a core that has gone idle meanwhile. Spinning keeps a core from others,
    also with a `sched_yield` after each attempt, so there is none of it where a host has more ranks than cores, and
    little where other programs keep the cores busy: there the waits are long.

    Args:
        num_ranks: ranks of the group on this host.

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
