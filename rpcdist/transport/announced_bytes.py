"""Counts the bytes that a peer makes this process reserve: announced and not sent, parsed, in calls that have not
ended, or lent and mapped here."""

from __future__ import annotations

import os
import threading


def memory_of_machine_bytes() -> int:
    """The size of this machine's memory: no peer can send more than that at once."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class AnnouncedBytes:
    """The count for one peer, on all its sessions together. Any thread may use it.

    Args:
        limit_bytes: None for the memory of the machine.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = memory_of_machine_bytes() if limit_bytes is None else limit_bytes
        self._num_bytes = 0
        self._num_mapped = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<AnnouncedBytes {self._num_bytes} of {self._limit_bytes}, {self._num_mapped} mapped>"

    def add(self, num_bytes: int, what: str = "were announced") -> str | None:
        """Counts bytes. If they exceed the limit, counts nothing and returns the reason.

        Args:
            num_bytes: the number of bytes.
            what: a verb phrase of the reason, with these bytes as its subject.
        """
        with self._lock:
            under_way = self._num_bytes
            if under_way + num_bytes <= self._limit_bytes:
                self._num_bytes += num_bytes
                return None
        return (
            f"{num_bytes} bytes {what} while {under_way} are under way or in calls that have not ended; this worker "
            f"accepts {self._limit_bytes} from one peer at a time. Send less at once, or start it with a larger "
            "RpcOptions(max_incoming_bytes=...)"
        )

    def subtract(self, num_bytes: int) -> None:
        """Records that bytes have arrived, will not arrive, or were in a call that has ended."""
        with self._lock:
            self._num_bytes -= num_bytes

    def add_mapped(self, num_bytes: int) -> bool:
        """Counts memory that the peer lends; False, without counting it, if the total would exceed the limit.

        Memory that stays mapped for later messages does not keep the peer from announcing others.
        """
        with self._lock:
            if self._num_bytes + self._num_mapped + num_bytes > self._limit_bytes:
                return False
            self._num_mapped += num_bytes
            return True

    def subtract_mapped(self, num_bytes: int) -> None:
        """Records that memory of the peer is no longer mapped, or no longer counts for this peer."""
        with self._lock:
            self._num_mapped -= num_bytes
