"""Waiting for sockets: the same few sets of descriptors are waited for again and again."""

from __future__ import annotations

import select
from typing import Final

__all__ = ["Pollers"]

_MAX_POLLERS: Final = 64


class Pollers:
    """Keeps `select.poll` objects."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], select.poll] = {}

    def get(self, masks: dict[int, int], wakeup_fd: int) -> select.poll:
        """One for these descriptors and events, and for `wakeup_fd` to be readable unless that is -1."""
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
