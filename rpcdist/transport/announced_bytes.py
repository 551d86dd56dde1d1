"""What a peer makes this process set aside, in bytes: announced and not sent yet, parsed, in calls that have not ended,
or lent and mapped here."""

from __future__ import annotations

import os
import threading


def memory_of_machine_bytes() -> int:
    """The size of this machine's memory: nobody can send more than that at once."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class AnnouncedBytes:
    """Of one peer, on all its sessions together. Any thread may use it.

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
        """More of it. Where that is too much, nothing is counted, and the answer says why.

        Args:
            num_bytes: how much.
            what: happened to so many bytes, for the answer.
        """
        with self._lock:
            under_way = self._num_bytes
            if under_way + num_bytes <= self._limit_bytes:
                self._num_bytes += num_bytes
                return None
        return (
            f"{num_bytes} bytes {what} while {under_way} are under way or in calls that have not ended, and this "
            f"worker takes {self._limit_bytes} from one peer at a time. Send less at once, or start it with "
            "RpcOptions(max_incoming_bytes=...)"
        )

    def subtract(self, num_bytes: int) -> None:
        """So much has arrived, will not come, or was in a call that has ended."""
        with self._lock:
            self._num_bytes -= num_bytes

    def add_mapped(self, num_bytes: int) -> bool:
        """The peer lends memory; False, and nothing is counted, where that is too much beside all else.

        What stays mapped for later messages does not keep the peer from announcing others.
        """
        with self._lock:
            if self._num_bytes + self._num_mapped + num_bytes > self._limit_bytes:
                return False
            self._num_mapped += num_bytes
            return True

    def subtract_mapped(self, num_bytes: int) -> None:
        """So much memory of the peer is not mapped any more, or not for this peer's sake."""
        with self._lock:
            self._num_mapped -= num_bytes
