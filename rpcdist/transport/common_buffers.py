"""Large buffers of a message to several processes of this host, which are copied into shared memory only once.

[Note: common memory] The receivers map the memory privately: a receiver that writes to a page gets a copy of that page,
and only this process may write to the memory itself. A receiver that returns it drops its private pages first, and
keeps the map for the next message. The memory is used again when all receivers have returned it, and only for the same
receivers: it stays mapped, so other receivers could read data there that was not sent to them. If a receiver may still
read it, because its session has ended or it has forked, the memory is not used again, and the last process frees it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final, TypeVar

from rpcdist.at_exit import AtEnd
from rpcdist.transport.lending import MAX_FREE_COMMON, MAX_LENT_BYTES, Pack, offsets, packs, size_class
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.shared_memory import MappedSegment, Segment, SegmentError

B = TypeVar("B", bound=LargeBuffer)

MAX_COMMON_BYTES: Final = MAX_LENT_BYTES // 2
"""A session lends at most twice this. Larger buffers are lent to each receiver separately, or sent on its socket."""


class CommonMemory:
    """Memory that several peers map.

    Attributes:
        readers: the ids of all workers that may have it mapped.
        may_be_read: whether a peer may still read it after its loan; then it is not used again.
    """

    def __init__(self, size_bytes: int, readers: frozenset[int]) -> None:
        self.readers = readers
        self.segment = Segment.create(size_bytes, is_for_readers=True)
        self.mapped = MappedSegment(0, self.segment)
        self.segment.forbid_writing()
        self.may_be_read = False


FreeMemory = deque[CommonMemory]
"""The memory of one agent that no peer reads now; any thread may use it."""


def free_memory() -> FreeMemory:
    """A new `FreeMemory`, which drops the oldest memory when it is full."""
    return deque(maxlen=MAX_FREE_COMMON)


def _take(free: FreeMemory, num_bytes: int, readers: frozenset[int]) -> CommonMemory:
    """Memory for `num_bytes`, free or new. Raises `SegmentError` if the system has none."""
    size_bytes = size_class(num_bytes)
    for _ in range(len(free)):
        try:
            memory = free.pop()  # the last one is still in the cache
        except IndexError:  # another thread has taken it
            break
        if memory.mapped.size_bytes == size_bytes and not memory.may_be_read:
            if memory.readers == readers:
                return memory
            free.appendleft(memory)
    return CommonMemory(size_bytes, readers)  # memory of other sizes is freed


class CommonPack:
    """Buffers that share memory which several peers read; see `packs`."""

    def __init__(self, pack: Pack, free: FreeMemory, readers: frozenset[int]) -> None:
        self._pack = pack
        self._readers = readers
        self._free = free
        self._lock = threading.Lock()
        self._at_end: AtEnd | None = None
        self.memory: CommonMemory | None = None

    def keep(self) -> None:
        """Records that a receiver may continue to read the memory, so that it is never written to again."""
        if self.memory is not None:
            self.memory.may_be_read = True

    def filled(self) -> CommonMemory | None:
        """The memory with the buffers, copied there at the first call; None if the system has no memory."""
        with self._lock:
            if self.memory is None:
                starts, num_bytes = offsets(buffer.size for _, buffer in self._pack)
                try:
                    memory = _take(self._free, num_bytes, self._readers)
                except SegmentError:
                    return None
                for start, (_, buffer) in zip(starts, self._pack, strict=True):
                    buffer.copy_to(memory.mapped.address + start)
                self._at_end = AtEnd(self._free.append, memory)
                self.memory = memory
            return self.memory


class CommonBuffers(list[B]):
    """The large buffers of a message that is sent to several peers.

    Attributes:
        packs: the packs to lend, by the index of their first buffer.
    """

    def __init__(self, buffers: Iterable[B], free: FreeMemory, readers: frozenset[int]) -> None:
        super().__init__(buffers)
        self.packs = {
            pack[0][0]: CommonPack(pack, free, readers)
            for pack in packs(self)
            if offsets(buffer.size for _, buffer in pack)[1] <= MAX_COMMON_BYTES
        }
