"""How long to look for a message before sleeping until the kernel says that there is one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from rpcdist.transport.sockets import HubAddress

__all__ = ["SpinPolicy"]

MAX_LOOKS: Final = 64
"""About 80 us: what a sleep and the wake-up after it cost on a processor that had nothing else to do."""
MIN_LOOKS: Final = 2


class SpinPolicy:
    """Learns from what it saw whether looking again and again is worth it.

    Looking keeps a core busy, so there is none of it where this host's ranks are more than its cores.

    Args:
        rank: this process's rank in the group.
        addresses: each rank's hub address, by rank.

    Attributes:
        looks: how often to look, with `os.sched_yield` in between.
    """

    __slots__ = ("_crowded", "looks")

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        hosts = [HubAddress.parse(address).host for address in addresses]
        self._crowded = hosts.count(hosts[rank]) > _num_cores()
        self.looks = 0 if self._crowded else MAX_LOOKS

    def came(self) -> None:
        """Looking was enough."""
        if not self._crowded and self.looks < MAX_LOOKS:
            self.looks = min(2 * self.looks, MAX_LOOKS)

    def slept(self, waited_s: float) -> None:
        """It was not; the message came so much later."""
        if self._crowded:
            return
        if waited_s < 100e-6:
            self.looks = min(2 * self.looks, MAX_LOOKS)
        else:
            self.looks = max(self.looks // 2, MIN_LOOKS)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
