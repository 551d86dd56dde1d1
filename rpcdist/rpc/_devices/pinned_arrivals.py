"""Tensors that arrive for a GPU through host memory: each chunk is copied up while the next one arrives.

    reader      receives a chunk of `STAGED_BYTES` into a part of a ring of pinned memory
    pool        starts the copy of each chunk that is complete, in a stream that only these copies use
    decoder     starts the copies that are left; its current stream waits for them

No thread waits for a GPU. The next chunk is received into a part when the GPU has copied the last one. If no part is
free, a chunk is received into other memory, and goes up through pinned memory that torch's allocator keeps.

Calls may wait for their handlers for long, and an actor may have many of them. So the tensors that are not decoded take
only a part of a GPU's memory; others stay in memory of the host until then.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.at_exit import AtEnd
from rpcdist.errors import SerializationError, described_error
from rpcdist.rpc._devices.lent_gpu_memory import MOST_OF_DEVICE
from rpcdist.rpc._values.buffers import STAGED_BYTES, ReceiveBuffer, pinned_memory, staging_memory
from rpcdist.transport.memory_copies import memory_view
from rpcdist.transport.wire_messages import CompactPass, ReplyMessage, WireMessage

logger = logging.getLogger(__name__)

RING_BYTES: Final = 16 * STAGED_BYTES

STAGED_FROM_BYTES: Final = 1 << 18
"""A smaller tensor is copied when its message has arrived: what a copy of its own costs may be more than it hides."""

_BEFORE_OTHERS: Final = -1
"""The priority of streams that are not in the pool of those for handlers, which may wait for other GPUs."""


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, size: int) -> torch.Tensor:
    """A tensor on a GPU. Raises `SerializationError`, with the free bytes, if it does not fit."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as exc:
        free, total = torch.cuda.mem_get_info(device)
        raise SerializationError(
            f"a tensor of {size} bytes arrived for {device}, where {free} of {total} bytes are free"
        ) from exc


def copy_up(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies bytes of the host to a GPU, in its current stream: one chunk goes up while the next is copied into pinned
    memory, which torch's allocator keeps for later copies. The driver's own copy takes twice as long.
    """
    pinned = staging_memory(source.nbytes)
    for part, staged, there in zip(
        source.split(STAGED_BYTES), pinned.split(STAGED_BYTES), target.split(STAGED_BYTES), strict=True
    ):
        there.copy_(staged.copy_(part), non_blocking=True)


class CopyStream:
    """The stream of a device for the copies of arriving chunks. Any thread may use it.

    Args:
        limit_bytes: limit on the memory of the device for tensors that are not decoded.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self._limit_bytes = limit_bytes
        self._num_held = 0  # bytes, apart from those in `_returned`
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()  # which the I/O loop takes: no function of CUDA is called with it
        self._making = threading.Lock()
        self._stream: torch.cuda.Stream | None = None  # made on demand: it takes memory of the device

    def _made(self) -> torch.cuda.Stream:
        with self._making:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device, priority=_BEFORE_OTHERS)
            return self._stream

    def hold(self, size: int) -> AtEnd | None:
        """Counts bytes of a tensor that is not decoded, until the end of the returned object; None if they are too
        many.
        """
        with self._lock:
            while self._returned:
                self._num_held -= self._returned.popleft()
            if self._num_held + size > self._limit_bytes:
                return None
            self._num_held += size
        return AtEnd(self._returned.append, size)

    def allocate(self, size: int) -> torch.Tensor:
        """Bytes on the device. Raises `SerializationError` if they do not fit."""
        with torch.cuda.stream(self._made()):
            return new_tensor((size,), torch.uint8, self.device, size)

    def copy(self, target: torch.Tensor, source: torch.Tensor, is_pinned: bool) -> torch.cuda.Event:
        """Starts a copy; the event occurs when it is done."""
        stream = self._made()
        with torch.cuda.stream(stream):
            if is_pinned:
                target.copy_(source, non_blocking=True)
            else:
                copy_up(source, target)
            event: torch.cuda.Event = stream.record_event()
            return event

    def join(self, copied: torch.cuda.Event, target: torch.Tensor) -> None:
        """Makes the current stream of this thread wait for a copy, and keeps the memory until that stream is done."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        target.record_stream(current)


@dataclass(slots=True, eq=False)
class ChunkMemory:
    """Memory for one chunk at a time.

    Attributes:
        size, missing: the bytes of the chunk, and those that have not arrived.
        copied: the event after the last copy from this memory.
    """

    memory: torch.Tensor
    size: int = 0
    missing: int = 0
    copied: torch.cuda.Event | None = None

    def view(self, start: int, end: int, owner: object) -> memoryview:
        """A part of the chunk; it keeps `owner` alive."""
        return memory_view(self.memory.data_ptr(), self.size, owner)[start:end]


Lease = tuple[ChunkMemory, AtEnd | None]
"""Memory, and an object whose end gives it back to the ring; None for memory that is not of the ring."""


class PinnedRing:
    """Pinned memory of a process, allocated once, that arriving chunks use in turn. Any thread may use it.

    Args:
        streams: copy to the GPUs, by name.
    """

    def __init__(self, memory: torch.Tensor, streams: Mapping[str, CopyStream]) -> None:
        self._free = deque(ChunkMemory(part) for part in memory.split(STAGED_BYTES))
        self._streams = streams

    @property
    def num_free(self) -> int:
        """The parts that no chunk has, including those that are still copied."""
        return len(self._free)

    def take(self) -> Lease | None:
        """A part that no GPU reads; None if there is none now."""
        for _ in range(len(self._free)):
            try:
                part = self._free.popleft()
            except IndexError:  # another thread has taken it
                break
            try:
                if part.copied is None or part.copied.query():
                    return part, AtEnd(self._free.append, part)
            except RuntimeError as exc:  # the GPU may still read the part, so it is not used again
                logger.warning("pinned memory is lost, because its GPU has failed: %s", exc)
                continue
            self._free.append(part)
        return None

    def buffers(
        self, value: value_pb2.Value, large: Sequence[int], submit: Callable[[Callable[[], None]], None]
    ) -> Mapping[int, GpuReceiveBuffer]:
        """Memory for those large buffers of an announced value, of sizes `large`, that go to one GPU; by index."""
        devices: dict[int, set[str]] = {}
        for tensor in value.tensors:
            if 0 not in tensor.shape and tensor.device != "meta" and not tensor.HasField("sparse"):
                devices.setdefault(tensor.buffer, set()).add(tensor.device)
        numbers = [number for number, buffer in enumerate(value.buffers) if buffer.size and not buffer.gpu_loan]
        if [value.buffers[number].size for number in numbers] != list(large):
            return {}  # decoding refuses it
        found: dict[int, GpuReceiveBuffer] = {}
        for index, (number, size) in enumerate(zip(numbers, large, strict=True)):
            of_buffer = devices.get(number, set())
            stream = self._streams.get(next(iter(of_buffer))) if len(of_buffer) == 1 else None
            if stream is None or size < STAGED_FROM_BYTES or number == value.body_buffer - 1:
                continue
            if (held := stream.hold(size)) is not None:
                found[index] = GpuReceiveBuffer(size, held, self, stream, submit)
        return found


def value_for_gpus(
    message: WireMessage, gradients_of: Callable[[CompactPass], value_pb2.Value | None]
) -> value_pb2.Value | None:
    """The value of an announced message, if it has tensors for GPUs and a buffer of at least `STAGED_FROM_BYTES`."""
    if max(message.large) < STAGED_FROM_BYTES:
        return None
    if isinstance(message, CompactPass):
        value = gradients_of(message)
    elif isinstance(message, rpc_pb2.Message):
        is_item = message.HasField("stream_item")
        value = message.stream_item.value if is_item else message.stream_end.failure.exception
    elif isinstance(message, ReplyMessage) and message.failure is not None:
        value = message.failure.exception
    else:
        value = message.value
    return value if value is not None and value.gpus else None


class GpuReceiveBuffer(ReceiveBuffer):
    """Memory of a GPU for one large buffer that is about to arrive. Implements `StagedBuffer`.

    If a copy fails, decoding raises the reason, and the chunks that still arrive are dropped.

    Args:
        held: see `CopyStream.hold`.
        stream: copies to the GPU.
        submit: runs a function on the pool.
    """

    def __init__(
        self,
        size: int,
        held: AtEnd,
        ring: PinnedRing,
        stream: CopyStream,
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(size, None, None)
        self._held: AtEnd | None = held
        self._ring = ring
        self._stream = stream
        self._submit = submit
        self._chunks: dict[int, Lease] = {}  # that have begun to arrive, by number
        self._complete: deque[tuple[int, Lease]] = deque()
        self._copying = threading.Lock()  # protects the rest; held while memory of the GPU is allocated
        self._num_left = size  # bytes that are not copied
        self._target: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._failure = ""

    @property
    def view(self) -> memoryview:
        raise SerializationError(f"a part of a value that is not a tensor arrived in memory of {self._stream.device}")

    @property
    def memory(self) -> torch.Tensor:
        raise SerializationError(f"a tensor on the CPU arrived in memory of {self._stream.device}")

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The chunks in which a range lies, by number, with the start and the end of its part there."""
        while start < end:
            number, offset = divmod(start, STAGED_BYTES)
            size = min(end - start, STAGED_BYTES - offset)
            yield number, offset, offset + size
            start += size

    def parts(self, start: int, end: int) -> list[memoryview]:
        """See `StagedBuffer`."""
        found: list[memoryview] = []
        for number, first, last in self._pieces(start, end):
            lease = self._chunks.get(number)
            if lease is None:
                lease = self._chunks[number] = self._new_chunk(min(STAGED_BYTES, self.size - number * STAGED_BYTES))
            chunk, at_end = lease
            found.append(chunk.view(first, last, at_end or chunk.memory))
        return found

    def _new_chunk(self, size: int) -> Lease:
        lease = self._ring.take()
        if lease is None:
            try:
                lease = ChunkMemory(ReceiveBuffer.allocate(size).memory), None
            except SerializationError as exc:
                raise MemoryError(str(exc)) from exc
        lease[0].size = lease[0].missing = size
        return lease

    def arrived(self, start: int, end: int) -> None:
        """See `StagedBuffer`."""
        has_complete = False
        for number, first, last in self._pieces(start, end):
            memory, _ = self._chunks[number]
            memory.missing -= last - first
            if not memory.missing:
                self._complete.append((number, self._chunks.pop(number)))
                has_complete = True
        if has_complete:
            self._submit(self._start_copies)

    def _start_copies(self) -> None:
        """Starts the copies of the chunks that are complete; raises nothing."""
        with self._copying:
            while self._complete:
                number, lease = self._complete.popleft()
                self._num_left -= lease[0].size
                if not self._failure:
                    try:
                        self._copy(number * STAGED_BYTES, *lease)
                    except SerializationError as exc:
                        self._failure = str(exc)
                    except Exception as exc:  # not kept itself: it would keep the part of the ring
                        self._failure = (
                            f"a tensor that arrived cannot be copied to {self._stream.device}: {described_error(exc)}"
                        )

    def _copy(self, start: int, chunk: ChunkMemory, at_end: AtEnd | None) -> None:
        if self._target is None:
            self._target = self._stream.allocate(self.size)
        target, source = self._target[start : start + chunk.size], chunk.memory[: chunk.size]
        self._copied = chunk.copied = self._stream.copy(target, source, at_end is not None)

    def on_gpu(self, device: torch.device) -> torch.Tensor:
        """The bytes on the GPU when all have arrived, for the current stream of this thread.

        Raises:
            SerializationError: the GPU has no memory for them, or has failed, or is another one.
        """
        self._start_copies()
        if self._failure:
            raise SerializationError(self._failure)
        if device != self._stream.device or self._num_left or self._target is None or self._copied is None:
            raise SerializationError(f"a tensor for {device} arrived in memory of {self._stream.device} or incomplete")
        self._stream.join(self._copied, self._target)
        self._held = None
        return self._target


@cache
def pinned_ring() -> PinnedRing | None:
    """The ring of this process, made at the first call, which takes long; None without a GPU. Raises `RuntimeError`."""
    if not torch.cuda.is_available():
        return None
    streams: dict[str, CopyStream] = {}
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        limit_bytes = torch.cuda.get_device_properties(device).total_memory // MOST_OF_DEVICE
        streams[str(device)] = CopyStream(device, limit_bytes)
    return PinnedRing(pinned_memory(RING_BYTES), streams)


os.register_at_fork(after_in_child=pinned_ring.cache_clear)  # a child of this process has no such memory
