"""Large buffers of a message to several processes of this host, which are copied into shared memory once for all.

[Note: common memory] The receivers map the memory privately: a receiver that writes to a page gets a copy of that page,
and nobody but this process may write to the memory itself. Such a segment is offered for one message, and is withdrawn
when it comes back; the memory is used again when all receivers have given it back. Where one of them may still read it,
since its session has ended or it has forked, the memory is freed by the last of them instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final, TypeVar

from rpcdist.at_end import AtEnd
from rpcdist.transport.lending import MAX_LENT_BYTES, Pack, offsets, packs, size_class
from rpcdist.transport.mapped_segments import MappedSegment
from rpcdist.transport.outgoing_buffer import OutgoingBuffer
from rpcdist.transport.shared_memory import Segment, SegmentError, unavailable

B = TypeVar("B", bound=OutgoingBuffer)

MAX_COMMON_BYTES: Final = MAX_LENT_BYTES // 2
"""A session lends no more than twice this; larger buffers are lent to each receiver, or travel in its socket."""

_MAX_KEPT: Final = 2


class CommonMemory:
    """Memory that several peers read.

    Attributes:
        segment: to be passed to them.
        mapped: the memory in this process.
        may_be_read: whether one of them may read it although its loan has ended: it is not used again.
    """

    __slots__ = ("mapped", "may_be_read", "segment")

    def __init__(self, size_bytes: int) -> None:
        self.segment = Segment.create(size_bytes, is_for_readers=True)
        self.mapped = MappedSegment(0, self.segment)
        self.segment.forbid_writing()
        self.may_be_read = False


class CommonMemoryPool:
    """The memory of one agent; any thread may use it."""

    def __init__(self) -> None:
        self._free: deque[CommonMemory] = deque(maxlen=_MAX_KEPT)

    def take(self, num_bytes: int) -> CommonMemory:
        """Memory for so many bytes, which nobody reads. Raises `SegmentError` if the system has none."""
        size_bytes = size_class(num_bytes)
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:  # another thread has it
                break
            if memory.mapped.size_bytes == size_bytes and not memory.may_be_read:
                return memory
        return CommonMemory(size_bytes)  # those of other sizes are freed

    def give_back(self, memory: CommonMemory) -> AtEnd:
        """An object at whose end the memory may be used again."""
        return AtEnd(self._free.append, memory)


class CommonPack:
    """Buffers that lie one after the other in memory that several peers read; see `packs`.

    Args:
        pack: the buffers.
        pool: has memory.
    """

    __slots__ = ("_at_end", "_lock", "_pack", "_pool", "memory")

    def __init__(self, pack: Pack, pool: CommonMemoryPool) -> None:
        self._pack = pack
        self._pool = pool
        self._lock = threading.Lock()
        self._at_end: AtEnd | None = None
        self.memory: CommonMemory | None = None

    def keep(self) -> None:
        """A receiver may go on reading the memory: it is never written to again."""
        if self.memory is not None:
            self.memory.may_be_read = True

    def filled(self) -> CommonMemory | None:
        """The memory with the buffers, copied at the first call; None if the system has none."""
        with self._lock:
            if self.memory is None:
                starts, num_bytes = offsets(buffer.size for _, buffer in self._pack)
                try:
                    memory = self._pool.take(num_bytes)
                except SegmentError:
                    return None
                for start, (_, buffer) in zip(starts, self._pack, strict=True):
                    buffer.copy_to(memory.mapped.address + start)
                self._at_end = self._pool.give_back(memory)
                self.memory = memory
            return self.memory


class CommonBuffers(list[B]):
    """The large buffers of a message that is sent to several peers.

    Args:
        buffers: of the message.
        pool: has memory for them.

    Attributes:
        packs: those that are lent, by the index of their first buffer.
    """

    def __init__(self, buffers: Iterable[B], pool: CommonMemoryPool) -> None:
        super().__init__(buffers)
        self.packs = {
            pack[0][0]: CommonPack(pack, pool)
            for pack in (packs(self) if unavailable() is None else ())
            if offsets(buffer.size for _, buffer in pack)[1] <= MAX_COMMON_BYTES
        }
