"""Chunks of shared memory and how they are passed on."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from rpcdist.collectives._transports.shm.futex import unsupported_here
from rpcdist.collectives._transports.shm.routes import segment_size
from rpcdist.collectives._transports.shm.shm_transport import ShmTransport
from rpcdist.transport import shared_memory
from rpcdist.transport.shared_memory import Segment, SegmentError, accept, offer, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no shared memory: {unavailable()}")

LIMIT_S = 10.0
OFFER = struct.Struct("<8sQ")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_both_ends_see_the_same_memory(pair: tuple[socket.socket, socket.socket]) -> None:
    before = num_descriptors()
    with Segment.create(8192) as segment:
        offer(pair[0], segment)
        with accept(pair[1], LIMIT_S) as received:
            ours, theirs = segment.map(), received.map()
            assert received.size_bytes == 8192 and bytes(theirs) == bytes(8192)
    ours[5000] = 7  # the descriptors are closed; the maps stay
    assert theirs[5000] == 7
    ours.close()
    theirs.close()
    assert num_descriptors() == before
    assert pair[1].gettimeout() is None


def test_a_segment_has_no_name_and_a_fixed_size() -> None:
    before = set(os.listdir("/dev/shm"))
    with Segment.create(4096) as segment:
        assert set(os.listdir("/dev/shm")) == before
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fileno(), size)
        assert not os.get_inheritable(segment.fileno())


def test_a_closed_segment_cannot_be_mapped() -> None:
    segment = Segment.create(4096)
    segment.close()
    segment.close()
    assert segment.fileno() == -1 and "closed" in repr(segment)
    with pytest.raises(SegmentError, match="cannot map"):
        segment.map()


def test_the_wait_for_a_segment_has_a_limit(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].settimeout(3.0)
    with pytest.raises(SegmentError, match=r"within 0\.05 s"):
        accept(pair[1], 0.05)
    assert pair[1].gettimeout() == 3.0


def test_a_peer_that_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    with Segment.create(4096) as segment:
        pair[1].close()
        with pytest.raises(SegmentError, match="cannot pass"):
            offer(pair[0], segment)
    other, gone = socket.socketpair()
    gone.close()
    with other, pytest.raises(SegmentError, match="did not send exactly one descriptor"):
        accept(other, LIMIT_S)


def test_messages_that_are_no_offer(pair: tuple[socket.socket, socket.socket]) -> None:
    before = num_descriptors()
    with Segment.create(4096) as segment:
        fd = segment.fileno()
        good = OFFER.pack(b"rpcdshm1", 4096)
        wrong = [(good, []), (good, [fd, fd]), (b"x" * OFFER.size, [fd]), (good, [fd] * 4), (good[:5], [fd])]
        for message, descriptors in wrong:
            socket.send_fds(pair[0], [message], descriptors)
            with pytest.raises(SegmentError, match="did not send exactly one descriptor"):
                accept(pair[1], LIMIT_S)
        socket.send_fds(pair[0], [good], [fd])
        accept(pair[1], LIMIT_S).close()
    assert num_descriptors() == before


def test_memory_that_is_not_what_was_offered(pair: tuple[socket.socket, socket.socket]) -> None:
    before = num_descriptors()
    bare = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(bare, 4096)
    read_end, write_end = os.pipe()
    with Segment.create(8192) as segment:
        tries = [(bare, "not sealed"), (segment.fileno(), "has 8192 bytes"), (read_end, "not shared memory")]
        for descriptor, problem in tries:
            socket.send_fds(pair[0], [OFFER.pack(b"rpcdshm1", 4096)], [descriptor])
            with pytest.raises(SegmentError, match=problem):
                accept(pair[1], LIMIT_S)
    for descriptor in (bare, read_end, write_end):
        os.close(descriptor)
    assert num_descriptors() == before


def test_huge_pages_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    """The peer frees them and uses up those of the system; then a read of this process would end it by SIGBUS."""
    size = 2 << 20
    try:
        huge = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as exc:
        pytest.skip(f"this kernel has no huge pages: {exc}")
    os.ftruncate(huge, size)
    fcntl.fcntl(huge, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    socket.send_fds(pair[0], [OFFER.pack(b"rpcdshm1", size)], [huge])
    os.close(huge)
    with pytest.raises(SegmentError, match="its pages have 2097152 bytes"):
        accept(pair[1], LIMIT_S)
    with Segment.create(size) as ordinary:
        offer(pair[0], ordinary)
        accept(pair[1], LIMIT_S).close()


def test_a_transport_refuses_a_segment_that_is_too_small() -> None:
    with Segment.create(segment_size(2)) as segment, pytest.raises(SegmentError, match="too small"):
        ShmTransport(0, 3, segment)


def test_other_processors_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in str(unsupported_here())
    monkeypatch.undo()
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    assert "memfd_create" in str(shared_memory.unavailable())
    with pytest.raises(SegmentError, match="memfd_create"):
        Segment.create(4096)
