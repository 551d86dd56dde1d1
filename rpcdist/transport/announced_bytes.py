"""Counts the bytes that a peer makes this process reserve: announced and not sent, parsed, in calls that have not
ended, in answers that the peer has not read, or in memory that one of the two lends to the other."""

from __future__ import annotations

import os
import threading
from typing import Final

LEAST_OWED_BYTES: Final = 1 << 20
"""Small messages may wait for a peer up to twice that, however low its limit is."""


class AnnouncedBytes:
    """The count for one peer, on all its sessions together. Any thread may use it.

    Args:
        limit_bytes: None for the memory of the machine.
        refusal: the reason for each refusal; by default a text with the numbers.
    """

    def __init__(self, limit_bytes: int | None = None, refusal: str = "") -> None:
        self._refusal = refusal
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no peer can send more at once
        self._limit_bytes = memory_bytes if limit_bytes is None else limit_bytes
        self._num_bytes = 0
        self._num_mapped = 0
        self._num_owed = self._num_small = 0  # parts of `_num_bytes`; see `owe`
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<AnnouncedBytes {self._num_bytes} of {self._limit_bytes}, {self._num_mapped} mapped>"

    def add(self, num_bytes: int, what: str = "were announced") -> str | None:
        """Counts bytes. If they exceed the limit, counts nothing and returns the reason.

        Args:
            what: a verb phrase of the reason, with these bytes as its subject.
        """
        with self._lock:
            if self._num_bytes + num_bytes <= self._limit_bytes:
                self._num_bytes += num_bytes
                return None
        return self._reason(num_bytes, what)

    def refusal(self, num_bytes: int, what: str) -> str | None:
        """The reason to refuse an answer that would be counted later; None if it fits, or if no other answer waits."""
        if not self._num_owed or self._num_bytes + num_bytes <= self._limit_bytes:
            return None
        return self._reason(num_bytes, what)

    def _reason(self, num_bytes: int, what: str) -> str:
        return self._refusal or (
            f"{num_bytes} bytes {what} while {self._num_bytes} are in transit, in calls that have not ended or in "
            f"answers that were not read; this worker accepts {self._limit_bytes} from one peer at a time. Send less "
            "at once, or start this worker with a larger RpcOptions(max_incoming_bytes=...)"
        )

    def owe(self, num_bytes: int, is_small: bool = True) -> bool:
        """Counts bytes that wait until the peer reads them, even beyond the limit.

        Args:
            num_bytes: the number of bytes; negative when they are written.
            is_small: whether they are a small message, and not large buffers.

        Returns:
            Whether the small messages that wait stay below twice the limit.
        """
        with self._lock:
            self._num_bytes += num_bytes
            self._num_owed += num_bytes
            if is_small:
                self._num_small += num_bytes
            return self._num_small <= 2 * max(self._limit_bytes, LEAST_OWED_BYTES)

    def subtract(self, num_bytes: int) -> None:
        """Records that bytes have arrived, will not arrive, or were in a call that has ended."""
        with self._lock:
            self._num_bytes -= num_bytes

    def add_mapped(self, num_bytes: int) -> bool:
        """Counts memory that one process lends to the other; False, uncounted, if the total would exceed the limit.

        Memory that stays mapped for later messages does not reduce what the peer may announce.
        """
        with self._lock:
            if not self.may_map(num_bytes):
                return False
            self._num_mapped += num_bytes
            return True

    def may_map(self, num_bytes: int) -> bool:
        """Whether `add_mapped` would accept `num_bytes` now."""
        return self._num_bytes + self._num_mapped + num_bytes <= self._limit_bytes

    def subtract_mapped(self, num_bytes: int) -> None:
        """Records that lent memory is no longer mapped, or no longer counts for this peer."""
        with self._lock:
            self._num_mapped -= num_bytes
