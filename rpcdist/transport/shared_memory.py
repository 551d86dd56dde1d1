"""Memory that processes of one host share, without a name in the file system.

A `Segment` is an anonymous file in memory (`memfd_create`), whose descriptor is sent to the other processes over a Unix
socket (`SCM_RIGHTS`). No memory can be left behind: the kernel frees it when the last process that holds it ends, even
by a crash. The size is sealed, so no process can truncate the file while another has it mapped (SIGBUS), and its pages
are ordinary ones, which the system provides again if a process frees them. The memory does not count against /dev/shm,
which containers limit to 64 MiB.

The sockets belong to the caller, who has connected and authenticated them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
from functools import partial
from typing import Final

from rpcdist.at_exit import AtEnd
from rpcdist.errors import on_error, raised_as
from rpcdist.time_limits import MIN_WAIT_S
from rpcdist.transport.memory_copies import declare

_OFFER: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"rpcdshm1"
_NEEDED_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE: Final = 0x10  # in Python's fcntl from 3.13 on
_MAX_DESCRIPTORS: Final = 4  # more than one is refused, but must be received to be closed


class SegmentError(OSError):
    """A segment could not be created, or the peer sent an invalid one."""


def unavailable() -> str | None:
    """The reason why processes cannot share memory on this system, as a clause for a message; None if they can."""
    try:
        os.close(os.memfd_create("rpcdist probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as exc:
        return f"memfd_create failed: {exc.strerror}"
    return None


class Segment:
    """Shared memory of fixed size, initially zero. Free it with `close`, or use it in a `with` block.

    Args:
        descriptor: descriptor of the memory file; the segment closes it.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = size_bytes

    @classmethod
    def create(cls, size_bytes: int, *, is_for_readers: bool = False) -> Segment:
        """Creates new memory; the system provides its pages when they are first touched.

        Args:
            is_for_readers: only this process will write to it. Map it, then call `forbid_writing`, then offer it.

        Raises:
            SegmentError: the system refuses.
        """
        with raised_as(SegmentError, "cannot create shared memory: memfd_create failed", OSError):
            descriptor = os.memfd_create("rpcdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        failed = f"cannot create {size_bytes} bytes of shared memory"
        with on_error(partial(os.close, descriptor)), raised_as(SegmentError, failed, OSError):
            os.ftruncate(descriptor, size_bytes)
            if not is_for_readers:
                _seal(descriptor)
        return cls(descriptor, size_bytes)

    @classmethod
    def received(cls, descriptor: int, size_bytes: int) -> Segment:
        """A segment of `size_bytes` that another process offers; owns the descriptor, even if it raises.

        Raises:
            SegmentError: it has another size or huge pages, or its size is not sealed.
        """
        try:
            actual_bytes, page_bytes = os.fstat(descriptor).st_size, os.fstatvfs(descriptor).f_bsize
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _NEEDED_SEALS == _NEEDED_SEALS
        except OSError as exc:
            os.close(descriptor)
            raise SegmentError(f"the received descriptor is not shared memory: {exc.strerror}") from exc
        # The system may have no huge page left when this process touches one that the peer has freed again (SIGBUS).
        if actual_bytes != size_bytes or not sealed or page_bytes != mmap.PAGESIZE:
            os.close(descriptor)
            problem = f"it has {actual_bytes} bytes" if sealed else "its size is not sealed"
            if page_bytes != mmap.PAGESIZE:
                problem = f"its pages have {page_bytes} bytes"
            raise SegmentError(f"the received shared memory is not the offered one ({size_bytes} bytes): {problem}")
        return cls(descriptor, size_bytes)

    def __repr__(self) -> str:
        return f"<Segment {self.size_bytes} bytes, {'closed' if self._descriptor < 0 else self._descriptor}>"

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self._descriptor

    def forbid_writing(self) -> None:
        """Prevents all further maps for writing, through any descriptor; existing maps stay.

        Raises:
            SegmentError: the kernel is older than Linux 5.1, or the segment was not created for readers.
        """
        with raised_as(SegmentError, f"cannot seal {self!r} against writing", OSError):
            _seal(self._descriptor, _F_SEAL_FUTURE_WRITE)

    def map(self, is_writable: bool = True) -> mmap.mmap:
        """Maps the memory for reading, or for reading and writing. The map outlives the segment's descriptor.

        Raises:
            SegmentError: the system refuses, or the segment is closed.
        """
        if self._descriptor < 0:  # mmap would take -1 as new memory
            raise SegmentError(f"cannot map {self!r}")
        protection = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
        with raised_as(SegmentError, f"cannot map {self!r}", OSError, ValueError):
            return mmap.mmap(self._descriptor, self.size_bytes, mmap.MAP_SHARED, protection)

    def close(self) -> None:
        """Closes the descriptor; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def offer(sock: socket.socket, segment: Segment) -> None:
    """Passes a segment to the process at the other end of a Unix socket. The segment stays open here.

    Raises:
        SegmentError: the peer has ended, or does not read.
    """
    message = _OFFER.pack(_MAGIC, segment.size_bytes)
    with raised_as(SegmentError, "cannot pass shared memory to the peer", OSError):
        sent = socket.send_fds(sock, [message], [segment.fileno()])
    if sent != len(message):
        raise SegmentError("cannot pass shared memory to the peer, which does not read its socket")


def accept(sock: socket.socket, timeout_s: float) -> Segment:
    """Receives the segment that the process at the other end of a Unix socket offers.

    Args:
        sock: its own timeout is unchanged afterwards.
        timeout_s: limit for the message, which arrives in one piece.

    Raises:
        SegmentError: nothing arrived in time, the peer has ended, or it sent something else.
    """
    before = sock.gettimeout()
    sock.settimeout(max(MIN_WAIT_S, timeout_s))
    try:
        with raised_as(SegmentError, f"no shared memory could be received within {timeout_s:.3g} s", OSError):
            message, descriptors, *_ = socket.recv_fds(sock, _OFFER.size, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    finally:
        sock.settimeout(before)
    if len(message) != _OFFER.size or message[: len(_MAGIC)] != _MAGIC or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise SegmentError("the peer did not send exactly one descriptor of shared memory")
    return Segment.received(descriptors[0], _OFFER.unpack(message)[1])


def _seal(descriptor: int, further: int = 0) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _NEEDED_SEALS | fcntl.F_SEAL_SEAL | further)


_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; older kernels refuse it, and provide pages when they are touched
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_madvise: Final = declare("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_munmap: Final = declare("munmap", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_mmap: Final = declare("mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)


class MappedSegment:
    """A segment that is mapped in this process until this object is freed.

    Python's own `mmap` keeps a descriptor open for each map, and a process may often have only a thousand.

    Args:
        number: number of the segment, in its session and direction.
        is_writable: whether this process may write; if not, a write ends the process by SIGSEGV.
        is_private: whether writes stay private, so that other processes with the segment do not see them.
        is_filled: whether the system provides all pages at once; otherwise at `fill`, or when they are touched.

    Attributes:
        number: number of the segment, in its session and direction.
        address: address of its first byte.

    Raises:
        SegmentError: the system refuses to map it.
    """

    __slots__ = ("_at_end", "_is_private", "address", "number", "size_bytes")

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
        self._is_private = is_private
        protection = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
        kind = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
        self.address = _mmap(None, self.size_bytes, protection, kind, segment.fileno(), 0) or 0
        if self.address in (0, _MAP_FAILED):
            raise SegmentError(f"cannot map {segment!r}: {os.strerror(ctypes.get_errno())}")
        self._at_end = AtEnd(_munmap, self.address, self.size_bytes)
        if is_filled:
            self.fill()

    def fill(self) -> None:
        """Makes the system provide all missing pages; the memory must be writable."""
        _madvise(self.address, self.size_bytes, _MADV_POPULATE_WRITE)

    def forget_changes(self) -> bool:
        """Drops the pages that this process has changed privately; False if the system refuses, as for locked pages."""
        return not self._is_private or _madvise(self.address, self.size_bytes, mmap.MADV_DONTNEED) == 0
