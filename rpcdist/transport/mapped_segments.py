"""Segments of shared memory that are mapped in this process."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from rpcdist.at_end import AtEnd
from rpcdist.transport.memory_copies import declare
from rpcdist.transport.shared_memory import Segment, SegmentError

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; an older kernel refuses it, and pages come when they are touched
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_madvise: Final = declare("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_munmap: Final = declare("munmap", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_mmap: Final = declare("mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)


class MappedSegment:
    """A segment that is mapped here, until this object is freed.

    Python's own `mmap` keeps a descriptor open for each map, and a process may have a thousand.

    Args:
        number: number of the segment, in its session and direction.
        segment: the memory.
        is_writable: whether this process may write; one that may not, and does, is ended by SIGSEGV.
        is_private: whether what is written stays here, and others who have the segment do not see it.
        is_filled: whether all pages are taken from the system at once; else `fill` does that, or the first touch.

    Attributes:
        number: number of the segment, in its session and direction.
        address: where it begins.
        size_bytes: its size.

    Raises:
        SegmentError: the system refuses to map it.
    """

    __slots__ = ("_at_end", "address", "number", "size_bytes")

    def __init__(
        self,
        number: int,
        segment: Segment,
        *,
        is_writable: bool = True,
        is_private: bool = False,
        is_filled: bool = True,
    ) -> None:
        self.number = number
        self.size_bytes = segment.size_bytes
        protection = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
        kind = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
        self.address = _mmap(None, self.size_bytes, protection, kind, segment.fileno(), 0) or 0
        if self.address in (0, _MAP_FAILED):
            raise SegmentError(f"cannot map {segment!r}: {os.strerror(ctypes.get_errno())}")
        self._at_end = AtEnd(_munmap, self.address, self.size_bytes)
        if is_filled:
            self.fill()

    def fill(self) -> None:
        """Takes all pages from the system that are not there yet; the memory has to be writable."""
        _madvise(self.address, self.size_bytes, _MADV_POPULATE_WRITE)
