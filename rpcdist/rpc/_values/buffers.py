"""Byte buffers beside a value: they are sent without a copy, and received into their final memory.

Small buffers travel inside the message. For a large one, the message carries only the size; its bytes follow in chunks,
which are read directly from the sender's memory, and written directly into the memory that the received tensor will
use.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError, TransportError
from rpcdist.freed_memory import LARGE_BYTES, stock_small_blocks
from rpcdist.own_shortage import free_memory
from rpcdist.transport.memory_copies import (
    TWO_THREADS_FROM_BYTES,
    LargeBuffer,
    copy_memory,
    copy_view,
    declare,
    memory_view,
)

INLINE_LIMIT: Final = 32 * 1024
"""Buffers up to this many bytes travel inside the message. Copying 32 KiB costs 2 us; a transfer costs more."""

TAKES_LONG_FROM_BYTES: Final = 4 << 20

MAX_BUFFER_SIZE: Final = 1 << 47
"""More bytes than a process can address: an announcement beyond it is damaged."""

HUGE_PAGES_FROM: Final = 32 << 20
"""Receive buffers of this size request huge pages. The C library maps such buffers again each time, and the first touch
of many small pages costs more than the transfer: an echo of 64 MiB takes half as long with huge pages."""

STAGED_BYTES: Final = 4 << 20
"""Copies between a GPU and pinned memory are divided into chunks of this size, which other stages handle meanwhile."""

_CPU: Final = torch.device("cpu")
_madvise: Final = declare("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class TensorBuffer(LargeBuffer):
    """Memory of tensors. Other code may resize a storage, which frees its memory, so every access checks that."""

    __slots__ = ("_start", "_storages", "_tensors", "_viewed")

    def __init__(self, start: int, size: int, tensors: Sequence[torch.Tensor]) -> None:
        self.size = size
        self._start = start
        self._tensors = tensors
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages = [(storage, storage.data_ptr(), storage.nbytes()) for storage in storages]
        self._viewed: memoryview | None = None  # made on demand: lent memory is copied without it

    @property
    def view(self) -> memoryview:
        """The bytes. Raises `TransportError` if the memory was freed."""
        self._check()
        view = self._viewed
        if view is None:
            view = self._viewed = memory_view(self._start, self.size, (self._tensors, self._storages))
        return view

    def copy_to(self, address: int) -> None:
        """Copies the bytes. Raises `TransportError` if the memory was freed."""
        self._check()
        copy_memory(address, self._start, self.size)

    def _check(self) -> None:
        for storage, address, size in self._storages:
            if storage.data_ptr() != address or storage.nbytes() != size:
                raise TransportError(
                    "the memory of a tensor was freed or resized while it was being sent; do not change the storage of "
                    "the tensors of a call until the call is done"
                )


def pinned_memory(size: int) -> torch.Tensor:
    """Bytes of the host that a GPU copies by itself. torch's allocator keeps them for reuse when copies are done."""
    return torch.empty(size, dtype=torch.uint8, device=_CPU, pin_memory=True)


def staging_memory(size: int) -> torch.Tensor:
    """Pinned memory for a copy to or from a GPU; other memory if the system pins no more, for which the thread that
    copies waits. Raises `SerializationError` if there is none.
    """
    try:
        return pinned_memory(size)
    except RuntimeError:
        return ReceiveBuffer.allocate(size).memory


def keep_for_current_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of GPU tensors until the current streams have reached this point, though the tensors are freed.

    torch's allocator reuses memory for the stream of its allocation, which may be another one.
    """
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class GpuBuffer(LargeBuffer):
    """Memory of tensors on a GPU. If it cannot be lent, `on_host` starts a copy, for which only sending waits: for each
    part of it.
    """

    may_wait = True

    __slots__ = ("_copied", "_host", "_tensors", "device", "start")

    def __init__(self, start: int, size: int, tensors: Sequence[torch.Tensor]) -> None:
        self.size = size
        self.start = start
        self.device = tensors[0].device
        self._tensors = tensors
        self._host: torch.Tensor | None = None
        self._copied: list[torch.cuda.Event] = []  # for each chunk

    def keep(self) -> None:
        """Call this before the current stream copies the memory."""
        keep_for_current_streams(self._tensors)

    def on_host(self) -> GpuBuffer:
        """Starts the copy into pinned memory, in the current stream; returns this buffer."""
        storage = self._tensors[0].untyped_storage()
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(0, dtype=torch.uint8, device=self.device)
            flat.set_(storage, self.start - storage.data_ptr(), (self.size,), (1,))
            self._host = staging_memory(self.size)
            stream = torch.cuda.current_stream(self.device)
            for there, here in zip(self._host.split(STAGED_BYTES), flat.split(STAGED_BYTES), strict=True):
                there.copy_(here, non_blocking=True)
                self._copied.append(stream.record_event())
        self._tensors = ()
        return self

    @property
    def view(self) -> memoryview:
        """The copy; waits until it is complete."""
        return self.part(0, self.size)

    def part(self, start: int, end: int) -> memoryview:
        """A part of the copy; waits until it is there."""
        self._copied_up_to(end).synchronize()
        host = self._host
        assert host is not None  # no code has this buffer before `on_host`
        return memory_view(host.data_ptr(), self.size, host)[start:end]

    def is_ready(self, end: int) -> bool:
        return bool(self._copied_up_to(end).query())

    def copy_to(self, address: int) -> None:
        """Copies the bytes from the host, each part when it is there."""
        host = self._host
        assert host is not None
        for start in range(0, self.size, TWO_THREADS_FROM_BYTES):
            end = min(start + TWO_THREADS_FROM_BYTES, self.size)
            self._copied_up_to(end).synchronize()
            copy_memory(address + start, host.data_ptr() + start, end - start)

    def _copied_up_to(self, end: int) -> torch.cuda.Event:
        return self._copied[(end - 1) // STAGED_BYTES]


def copy_of(buffer: LargeBuffer) -> ReceiveBuffer:
    """The buffer as its receiver would have it; for calls of a worker to itself."""
    received = ReceiveBuffer.allocate(buffer.size)
    received.view[:] = buffer.view
    return received


def takes_long(buffers: Sequence[LargeBuffer]) -> bool:
    """Whether a thread that sends these is busy for a while: it copies them into shared memory, a few threads at a
    time.

    Meanwhile it must not prevent others from reading, nor count as a thread that will soon take the next job.
    """
    return sum(buffer.size for buffer in buffers) >= TAKES_LONG_FROM_BYTES


@dataclass(slots=True, eq=False, repr=False)
class ReceiveBuffer:
    """Memory for one large buffer that is about to arrive. The tensors that are decoded from it use this memory.

    Attributes:
        size: size in bytes.
    """

    size: int
    _memory: torch.Tensor | None  # each of the two is made on demand: most buffers need only one
    _view: memoryview | None
    _lent: memoryview | None = None  # not copied yet

    @property
    def view(self) -> memoryview:
        """Writable bytes, into which the transport writes chunks on any thread; they are complete before `decode`."""
        view = self._view
        if view is None:
            memory = self.memory
            view = self._view = memory_view(memory.data_ptr(), self.size, memory)
        return view

    @property
    def memory(self) -> torch.Tensor:
        """The bytes as a uint8 tensor, aligned to 64 bytes; its storage is resizable unless it is borrowed.

        Raises `SerializationError` if there is no memory for a copy.
        """
        memory = self._memory
        if memory is None:
            if self._lent is None:
                memory = torch.frombuffer(self._view, dtype=torch.uint8)
            else:
                memory = ReceiveBuffer.allocate(self.size).memory
                copy_view(memory.data_ptr(), self._lent)
                self._lent = None
            self._memory = memory
        return memory

    @property
    def borrowed_view(self) -> memoryview | None:
        """The view that was given to `borrowed`, unless the buffer has been made a tensor."""
        return self._view if self._memory is None else None

    @classmethod
    def allocate(cls, size: int) -> ReceiveBuffer:
        """Memory of `size` bytes, not zeroed.

        Raises:
            SerializationError: the size is impossible, or the memory cannot be allocated.
        """
        if not 0 <= size <= MAX_BUFFER_SIZE:
            raise SerializationError(f"a buffer of {size} bytes was announced; no buffer can be that large")
        if size >= LARGE_BYTES:  # a thread that reads a connection has a heap of its own
            stock_small_blocks()
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=_CPU)
        except (RuntimeError, MemoryError) as exc:
            raise SerializationError(
                f"a buffer of {size} bytes does not fit into memory, of which {free_memory()}: {exc}"
            ) from exc
        if size >= HUGE_PAGES_FROM:
            _ask_for_huge_pages(memory.data_ptr(), size)
        return cls(size, memory, None)

    @classmethod
    def borrowed(cls, view: memoryview) -> ReceiveBuffer:
        """Memory of another process that `view` keeps; the loan ends when the tensors on it are freed.

        Its storage cannot grow, like that of tensors in shared memory.
        """
        return cls(view.nbytes, None, view)

    @classmethod
    def copied(cls, view: memoryview) -> ReceiveBuffer:
        """Memory that another process may write to at any time: readers get a copy, made on demand.

        torch reads some tensors twice (a mask: to count, then to fill what it has counted), and relies on them not to
        change.
        """
        return cls(view.nbytes, None, None, view)


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Requests huge pages for the whole pages of an untouched range; the kernel may ignore it."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(start, end - start, mmap.MADV_HUGEPAGE)


def add_buffer(value: value_pb2.Value, view: memoryview, large: list[LargeBuffer]) -> int:
    """Appends a buffer to `value`, inside it if small, and returns its index. `view` must be contiguous bytes."""
    buffer = value.buffers.add()
    if view.nbytes <= INLINE_LIMIT:
        buffer.inline = bytes(view)
    else:
        buffer.size = view.nbytes
        large.append(LargeBuffer(view))
    return len(value.buffers) - 1


Received = bytes | ReceiveBuffer | value_pb2.Buffer
"""A buffer of an arrived value: its bytes, its memory, or its position in a loan."""


def received_buffers(value: value_pb2.Value, large: Sequence[ReceiveBuffer]) -> list[Received]:
    """The buffers of `value` in their order.

    Raises:
        SerializationError: the buffers that arrived are not those that the value announced.
    """
    buffers: list[Received] = []
    used = 0
    messages = value.buffers
    for position in range(len(messages)):  # by index: protobuf's own iteration costs more
        buffer = messages[position]
        size = buffer.size
        if not size:
            buffers.append(buffer.inline)
            continue
        if buffer.gpu_loan:
            buffers.append(buffer)
            continue
        if used == len(large) or large[used].size != size:
            raise SerializationError(f"large buffer {used} of {size} bytes did not arrive as announced")
        buffers.append(large[used])
        used += 1
    if used != len(large):
        raise SerializationError(f"{len(large)} large buffers arrived for a value that has {used}")
    return buffers
